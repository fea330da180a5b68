"""Options that the jobs with `measured` runs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Seeds = Annotated[int, typer.Option(min=1, help="Training seeds per setting.")]
FirstSeed = Annotated[int, typer.Option(min=0, help="First seed.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Training steps of every run (default: the preset's).")]
RunsPerTask = Annotated[int, typer.Option(min=1, help="Evaluation rollouts per task.")]
Root = Annotated[
    Path | None, typer.Option(help="Folder of the runs (default: runs/JOB); interrupted ones are continued.")
]
Figures = Annotated[
    Path | None, typer.Option(help="Folder with one file of figures per finished run (default: ROOT/measured).")
]
PrintOnly = Annotated[bool, typer.Option("--print-only", help="Only print the figures of finished runs.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Configuration keys for every run.")]
