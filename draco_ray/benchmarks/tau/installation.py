"""The tau2-bench installation: its Python, its checkout, and whether they are the ones we were built against."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from draco_ray.config.schema import TauBenchConfig
from draco_ray.errors import ConfigError

log = logging.getLogger(__name__)

RUNNER = Path(__file__).with_name("tau2_runner.py")
PYTHON_VARIABLE, HOME_VARIABLE = "TAU2_PYTHON", "TAU2_HOME"
DOMAIN = "banking_knowledge"
TASKS = Path("data/tau2/domains") / DOMAIN / "tasks"
FULL_SPLIT = 97
TESTED_COMMIT = "a2c0247"
"""Of tau2-bench 1.0.1; what was true of it is in docs/tau_bench.md."""
CHECK_SECONDS = 300.0
SHELL_RETRIEVAL = ("alltools-qwen", "terminal_use")
DENSE_RETRIEVAL = ("alltools-qwen", "qwen_embeddings", "qwen_embeddings_grep")
SHELL_PROGRAMS = ("srt", "rg", "bwrap", "socat") if sys.platform.startswith("linux") else ("srt", "rg")
_INSTALL = "install tau2-bench as its own README says (docs/tau_bench.md)"


class Where(Protocol):
    """What a configuration says of an installation: that of the evaluation, or of an environment's options."""

    @property
    def tau2_python(self) -> str | None:
        """See `TauBenchConfig`."""
        ...

    @property
    def tau2_home(self) -> Path | None:
        """See `TauBenchConfig`."""
        ...

    @property
    def tau2_version(self) -> str:
        """See `TauBenchConfig`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tau2:
    """An installation that was looked at."""

    python: str
    home: Path
    version: str
    commit: str
    """Of the checkout; ``unknown`` where it is no git repository."""
    tasks: tuple[str, ...]
    """Ids of the banking domain's tasks."""

    @property
    def data(self) -> Path:
        """What TAU2_DATA_DIR must say."""
        return self.home / "data"

    @property
    def solutions(self) -> list[str]:
        """Files and folders the agent's shell must not read: tasks with their solutions, history, keys."""
        return [str(path) for path in (self.data, self.home / ".git", self.home / ".env") if path.exists()]


def find_tau2(config: TauBenchConfig) -> Tau2:
    """Find tau2-bench and ask its Python what it is; takes seconds.

    Raises:
        ConfigError: it is missing, another version, another package of that name, without its data, or without the
            programs its shell tool needs.
    """
    home = find_home(config, TASKS)
    python = find_python(config, home)
    tasks = tuple(sorted(path.stem for path in (home / TASKS).glob("task_*.json")))
    if len(tasks) != FULL_SPLIT:
        raise ConfigError(
            f"tau2_home {home}: {len(tasks)} tasks in {TASKS}; expected the {FULL_SPLIT} of tau2-bench "
            f"{config.tau2_version}; check out that version"
        )
    version = str(check_package(config, python)["version"])
    if config.retrieval in SHELL_RETRIEVAL:
        absent = [program for program in SHELL_PROGRAMS if shutil.which(program) is None]
        if absent:
            raise ConfigError(
                f"retrieval {config.retrieval}: {', '.join(absent)} not on PATH; its shell tool needs "
                f"{', '.join(SHELL_PROGRAMS)}; install them, or set tau_bench.retrieval=bm25"
            )
    commit = _commit(home)
    if not commit.startswith(TESTED_COMMIT):
        log.warning("tau2_home %s is at commit %s; this runner was made for %s", home, commit, TESTED_COMMIT)
    return Tau2(python=python, home=home, version=version, commit=commit, tasks=tasks)


def find_home(config: Where, needed: Path) -> Path:
    """The checkout. Raises: ConfigError where there is none, or it lacks the folder ``needed``."""
    named = config.tau2_home or os.environ.get(HOME_VARIABLE)
    if not named:
        raise ConfigError(f"tau2_home is not set; expected a checkout of tau2-bench; {_INSTALL}, set {HOME_VARIABLE}")
    home = Path(named).expanduser().resolve()
    if not (home / needed).is_dir():
        raise ConfigError(f"tau2_home {home}: no {needed}; expected a checkout of tau2-bench; {_INSTALL}")
    return home


def find_python(config: Where, home: Path) -> str:
    """The Python of tau2-bench's environment. Raises: ConfigError where there is none."""
    named = config.tau2_python or os.environ.get(PYTHON_VARIABLE) or str(home / ".venv" / "bin" / "python")
    if not os.access(named, os.X_OK) or Path(named).is_dir():
        raise ConfigError(
            f"tau2_python {named}: no executable file; expected the Python of tau2-bench's own environment; "
            f"{_INSTALL}, set {PYTHON_VARIABLE}"
        )
    # Not resolved: a virtual environment is known by the path of its own `python` link.
    return os.path.abspath(named)


def check_package(config: Where, python: str, home: Path | None = None, domain: str | None = None) -> dict[str, Any]:
    """What that Python has, and of a ``domain`` in ``home`` the policy and the tools; takes seconds.

    Raises: ConfigError: it is too old, or has no tau2-bench, another version, or another package of that name.
    """
    environment = {"PATH": os.environ.get("PATH", ""), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    try:
        asked = subprocess.run(
            [python, "-P", str(RUNNER), "check", *([domain] if domain else [])],
            env=environment | ({} if home is None else {"TAU2_DATA_DIR": str(home / "data")}),
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
        found = json.loads(asked.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise ConfigError(
            f"tau2_python {python}: does not run ({type(error).__name__}); expected Python 3.12 or later; {_INSTALL}"
        ) from None
    if found["version"] is None:
        raise ConfigError(
            f"tau2_python {python}: has no tau2 and is Python {found['python']}; tau2-bench needs 3.12 or later; "
            f"{_INSTALL}"
        )
    if found["error"] is not None:
        raise ConfigError(
            f"tau2_python {python}: tau2 {found['version']} is not tau2-bench or is incomplete ({found['error']}); the "
            f"package index's 'tau2' is a physics program; {_INSTALL}"
        )
    if found["version"] != config.tau2_version:
        raise ConfigError(
            f"tau2_python {python}: tau2 {found['version']}; expected {config.tau2_version}, because grading changed "
            "between versions; install that one, or set tau2_version"
        )
    checked: dict[str, Any] = found
    return checked


def _commit(home: Path) -> str:
    try:
        command = ["git", "-C", str(home), "rev-parse", "--verify", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 and (home / ".git").exists() else "unknown"
