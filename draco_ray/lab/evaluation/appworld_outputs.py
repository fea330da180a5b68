"""Rollouts laid out as AppWorld lays out an experiment: `draco reevaluate` reads them, and AppWorld's tools do.

::

    <evaluation>/appworld/data/            links into the data root, and datasets/evaluated.txt: this evaluation's tasks
    <evaluation>/appworld/experiments/outputs/<measurement>-run<n>/tasks/<task>/{dbs,logs,...}

A rollout that was lost is laid out as the world nobody touched, which AppWorld's evaluator fails, so that its rates are
over the same tasks as ours.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

DATASET = "evaluated"
"""The dataset name to give AppWorld."""
_PLAIN = re.compile(r"(dbs|logs|version)/[a-z_]{1,64}\.(jsonl?|md|txt)")


def outputs_folder(root: Path, measurement: str, run: int) -> Path:
    """The folder of one measurement's 0-based run, which has a folder for each task."""
    return root / "experiments" / "outputs" / f"{measurement}-run{run + 1}" / "tasks"


class AppWorldOutputs:
    """Writes one evaluation's outputs."""

    def __init__(self, path: Path, data_root: Path, tasks: Iterable[str]) -> None:
        """Begin, or go on with, an AppWorld root at ``path``; ``data_root`` is linked, never written to."""
        self.path = path
        self._data = (data_root / "data").resolve()
        data = path / "data"
        (data / "datasets").mkdir(parents=True, exist_ok=True)
        for source in [*self._data.iterdir(), *(self._data / "datasets").iterdir()]:
            link = data / source.relative_to(self._data)
            if not link.exists() and source.stem != DATASET:
                link.symlink_to(source)
        (data / "datasets" / f"{DATASET}.txt").write_text("".join(f"{task}\n" for task in tasks), encoding="utf-8")

    def write(self, measurement: str, run: int, task_id: str, saved: Mapping[str, str]) -> None:
        """Lay out one rollout; ``saved`` is `AppWorldSlot.saved_files`, empty for one that was lost."""
        folder = outputs_folder(self.path, measurement, run) / task_id
        shutil.rmtree(folder, ignore_errors=True)
        if not any(name.startswith("dbs/") for name in saved):
            shutil.copytree(self._data / "tasks" / task_id / "dbs", folder / "dbs")
            return
        for name, text in saved.items():
            # Names come out of the jail of model-written code.
            if not _PLAIN.fullmatch(name):
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode())
