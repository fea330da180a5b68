"""Structured logs in the run directory: one JSON object per line, with run, step, task and rollout.

Every process of a run calls `start_run_log`: the driver with the run directory, actors without it, because they inherit
an environment variable. Each process writes its own file, so no locks are needed.
"""

from __future__ import annotations

import contextvars
import json
import logging
import os
import re
import socket
import time
from pathlib import Path
from typing import NamedTuple

from draco_ray.errors import StoreError

RUN_DIRECTORY_VARIABLE = "DRACO_RUN_DIRECTORY"
LOGS_FOLDER = "logs"
LOGGER_NAME = "draco_ray"
"""Parent of this package's loggers; vLLM, Ray and LiteLLM write to Ray's logs instead."""


class LogContext(NamedTuple):
    """What the current asyncio task works on; None: not applicable."""

    step: int | None = None
    task: str | None = None
    rollout: int | None = None


_NOWHERE = LogContext()
_where: contextvars.ContextVar[LogContext] = contextvars.ContextVar("draco_ray_where", default=_NOWHERE)


def set_log_context(group: str, rollout: int | None = None) -> None:
    """Set what the current asyncio task works on; tasks it starts inherit this.

    Args:
        group: ``step<n>/<task>`` or ``evaluation<n>/<task>``; any other text is a task's name.
        rollout: index in the group, from 0.
    """
    match = re.fullmatch(r"(?:step|evaluation)(\d+)/(.+)", group)
    step, task = (int(match[1]), match[2]) if match else (None, group)
    _where.set(LogContext(step, task, rollout))


def start_run_log(run: Path | None = None) -> None:
    """Send this process's logs to ``<run>/logs/<actor's name, or driver>.jsonl``, if there is a run.

    Args:
        run: the run directory, which is stored in DRACO_RUN_DIRECTORY for child processes; None: read that variable.
    """
    if run is not None:
        os.environ[RUN_DIRECTORY_VARIABLE] = str(run)
    named = os.environ.get(RUN_DIRECTORY_VARIABLE)
    if not named or not Path(named).is_dir():
        return
    stop_run_log()
    process = _process_name()
    folder = Path(named) / LOGS_FOLDER
    set_private_umask()
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder}: logs cannot be written: {error.strerror}; move this folder away") from None
    handler = _RunLogHandler(folder / f"{process}.jsonl", encoding="utf-8")
    handler.setFormatter(JsonFormatter(Path(named).name, process))
    logger = logging.getLogger(LOGGER_NAME)
    logger.addHandler(handler)
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)


def set_private_umask() -> None:
    """Make files that this process writes private to the user, since run directories are private."""
    os.umask(0o077)


def _process_name() -> str:
    """The actor's name without the run's name; ``driver`` in other processes."""
    import ray

    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return "driver"
    return str(ray.get_runtime_context().get_actor_name()).split("@")[0]


def stop_run_log() -> None:
    """Close this process's log."""
    logger = logging.getLogger(LOGGER_NAME)
    for handler in [handler for handler in logger.handlers if isinstance(handler, _RunLogHandler)]:
        logger.removeHandler(handler)
        handler.close()


class _RunLogHandler(logging.FileHandler):
    """A file handler that `stop_run_log` recognises."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore write errors: on a full disk every line would print a traceback; the run store reports a full disk."""


class JsonFormatter(logging.Formatter):
    """Formats records as lines of JSON with the same keys."""

    def __init__(self, run: str, process: str) -> None:
        super().__init__()
        self._run = run
        self._process = process
        self._host = socket.gethostname()

    def format(self, record: logging.LogRecord) -> str:
        """Keys: time (UTC), level, run, step, task, rollout, process, host, pid, logger, message, error."""
        where = _where.get()
        milliseconds = f"{int(record.msecs):03d}"
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{milliseconds}Z",
            "level": record.levelname.lower(),
            "run": self._run,
            "step": getattr(record, "step", where.step),
            "task": getattr(record, "task", where.task),
            "rollout": getattr(record, "rollout", where.rollout),
            "process": self._process,
            "host": self._host,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
            "error": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps(line, ensure_ascii=False)
