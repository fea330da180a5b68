"""Child processes that end with this one, and whose output is logged with API keys masked."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from draco_ray.environments.jail import linux
from draco_ray.temp_dirs import PrivateTempDir


def die_with_parent() -> None:
    """Kill this process with SIGKILL as soon as its parent has ended.

    Does nothing in a process that `multiprocessing` did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


KEY_MASK = "***"
SHORTEST_KEY = 6
"""Minimum length of a key that is masked, in characters; masking shorter keys would hide parts of words."""
END_SECONDS = 15.0


class Scrubber:
    """Masks keys in text of other programs, e.g. in a provider's error that quotes a refused key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = sorted({key for key in keys if len(key) >= SHORTEST_KEY}, key=len, reverse=True)

    def text(self, text: str) -> str:
        """``text`` with every key masked."""
        for key in self._keys:
            text = text.replace(key, KEY_MASK)
        return text

    def file(self, path: Path) -> None:
        """Mask keys in a file; a file without keys is not changed."""
        text = path.read_text(encoding="utf-8", errors="replace")
        if (masked := self.text(text)) != text:
            partial = path.with_name(f".{path.name}.masked")
            partial.write_text(masked, encoding="utf-8")
            partial.replace(path)


class Child:
    """A process in its own process group; its output is appended to a log, with keys masked."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        scrubber: Scrubber,
        *,
        folder: Path | None = None,
        temporary: str | None = None,
    ) -> None:
        """Start the process.

        Args:
            folder: working directory; None: this process's.
            temporary: environment variable set to a temporary folder, which is removed with the process
                (`PrivateTempDir`); a value in ``environment`` is kept.
        """
        self._temporary: PrivateTempDir | None = None
        if temporary is not None and temporary not in environment:
            self._temporary = PrivateTempDir()
            environment = {**environment, temporary: str(self._temporary.path)}
        self.last_line = ""
        """The last non-empty line of its output."""
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=partial(linux.die_with_parent, signal.SIGTERM) if sys.platform.startswith("linux") else None,
        )
        self._reader = threading.Thread(target=self._copy, args=(log, scrubber), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Id of the process and of its group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait at most ``seconds`` for the process to end; returns the exit code, or None if it still runs."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        # Wait briefly for remaining output, but not for a grandchild that holds the pipe open.
        self._reader.join(END_SECONDS)
        return code

    def end(self) -> None:
        """End the process and its descendants with SIGTERM, then SIGKILL. Safe to call twice."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
            if number == signal.SIGTERM:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_SECONDS)
        self._process.wait()
        self._reader.join(END_SECONDS)
        if self._temporary is not None:
            self._temporary.remove()

    def _copy(self, log: Path, scrubber: Scrubber) -> None:
        assert self._process.stdout is not None
        # If the run directory is not mounted on this node, this creates a local folder, and the log stays on the node.
        log.parent.mkdir(parents=True, exist_ok=True)
        with self._process.stdout, log.open("a", encoding="utf-8") as file:
            for line in self._process.stdout:
                masked = scrubber.text(line)
                file.write(masked)
                file.flush()
                self.last_line = masked.strip() or self.last_line
