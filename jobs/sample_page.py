"""Write docs/sample/report.html from a run of examples/library: a run's page for a reader without an installation.

    python jobs/sample_page.py RUN [--steps 4] [--out docs/sample/report.html]

The page is that of the run after so many steps.

The page contains no path of the machine that made it: the configuration's paths are made relative to the repository,
and a page with another absolute path is refused.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draco_ray.errors import ConfigError
from draco_ray.lab.report.groups import unpack
from draco_ray.lab.report.page import write_report
from draco_ray.runs.directory import RunDirectory

NAME = "library"
"""Name of the run on its page."""
COPIED = ("metrics.jsonl", "tables", "evaluations")
_PATH = re.compile(r"(?<![\w./<])/(?:home|root|tmp|work|mnt|opt|usr|var|data|Users|dev/shm)/[\w./-]+")
_PACKED = re.compile(r'<script type="text/plain" id="\w+">([\w+/=]*)</script>')


def main() -> None:
    """Read the command line and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("docs/sample/report.html"))
    arguments = parser.parse_args()
    write_sample(RunDirectory.open(arguments.run.resolve()), arguments.out, arguments.steps)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1024:.0f} KiB")


def write_sample(run: RunDirectory, out: Path, steps: int = 4) -> None:
    """Write the page of the first steps of a run of an environment that is entirely this project's.

    Raises:
        ConfigError: it is a run of another environment, or its page would name a place of this machine.
    """
    if run.setting("environment.use") != "tools":
        raise ConfigError(f"{run.path}: a run of {run.setting('environment.use')}; expected a run of examples/library")
    with tempfile.TemporaryDirectory() as folder:
        neutral = RunDirectory.create(Path(folder) / NAME, without_places(run.config_text()))
        for name in COPIED:
            if (run.path / name).is_dir():
                shutil.copytree(run.path / name, neutral.path / name)
            elif (run.path / name).exists():
                shutil.copy(run.path / name, neutral.path / name)
        _cut(neutral, steps)
        page = Path(folder) / "report.html"
        write_report(neutral, page, tokens=True)
        if left := sorted(set(places(page.read_text(encoding="utf-8")))):
            raise ConfigError(f"{run.path}: its page would name {', '.join(left[:5])}")
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, out)


def _cut(run: RunDirectory, steps: int) -> None:
    """Remove everything after the first ``steps`` steps."""
    lines = (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= steps]
    (run.path / "metrics.jsonl").write_text("".join(kept), encoding="utf-8")
    for path in sorted(run.path.rglob("step*")):
        if (number := re.match(r"step(\d+)", path.name)) and int(number[1]) > steps:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def without_places(config: str) -> str:
    """A configuration whose absolute paths begin where the project does, or are a file's name alone."""

    def shortened(found: re.Match[str]) -> str:
        for part in ("examples/", "prompts/", ".cache/", "runs"):
            if f"/{part}" in found[0]:
                return part + found[0].rpartition(f"/{part}")[2]
        return found[0].rpartition("/")[2]

    return _PATH.sub(shortened, config)


def places(page: str) -> Iterator[str]:
    """Absolute paths in a page and in what is packed in it, and this machine's name."""
    host = socket.gethostname()
    for text in (
        _PACKED.sub("", page),
        *(written for packed in _PACKED.findall(page) for written in _texts(unpack(packed))),
    ):
        yield from _PATH.findall(text)
        if len(host) > 3 and host in text:
            yield host


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


if __name__ == "__main__":
    main()
