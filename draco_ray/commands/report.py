"""`draco report`: write the page, figures and tables of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draco_ray.errors import ConfigError
from draco_ray.lab.analysis.tables import write_tables
from draco_ray.lab.files import create_output_folder
from draco_ray.lab.report.figures import write_figures
from draco_ray.lab.report.page import write_report
from draco_ray.runs.directory import RunDirectory


def write_reports(
    directories: Sequence[Path], *, figures: bool, tables: bool, tokens: bool = False, out: Path | None
) -> list[Path]:
    """Write the page of one run, or figures and tables of one or several; returns the files.

    Args:
        tokens: whether the page shows every sampled token.
        out: the page's file or a folder for it, or the folder of figures and tables; None is ``report.html``,
            ``figures/`` and ``tidy/`` in the first run directory.

    Raises:
        ConfigError: if a directory is no run, has no rows yet or shares its name with another, or if ``out`` cannot be
            written.
    """
    runs = [_open(directory) for directory in directories]
    names = [run.path.name for run in runs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"two runs have the name {twice}, which labels them in figures; rename one directory")
    if len(runs) > 1 and not (figures or tables):
        raise ConfigError(f"a page shows one run, found {len(runs)}; to compare runs add --figures or --tables")
    if not (figures or tables):
        page = out or runs[0].path
        page = page / "report.html" if page.is_dir() else page
        write_report(runs[0], page, tokens=tokens)
        return [page]
    written = []
    if figures:
        written += write_figures(runs, create_output_folder(out or runs[0].path / "figures"))
    if tables:
        written += write_tables(runs, create_output_folder(out or runs[0].path / "tidy"))
    return written


def _open(directory: Path) -> RunDirectory:
    # Resolved, so that the name in charts and tables is the directory's own even for ".".
    run = RunDirectory.open(directory.resolve())
    if not run.steps():
        raise ConfigError(f"{directory}: the run has no rows yet; wait for its first rollout")
    return run
