"""A judge that answers through files: each prompt is a numbered file, and its reply is read from a file beside it.

It writes ``0001-score-3fa91c2b70d4.prompt.txt`` and ``.schema.json``, and waits for the ``.reply.txt`` of that name.
The replies may come from a chat window, a batch system or a gateway. A directory with all replies is a recorded judge,
even without the prompts. The same question has the same file in every run, so an interrupted command can continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from draco_ray.errors import StoreError
from draco_ray.judging.completion import Completion, Request
from draco_ray.judging.reply import TAG, is_complete

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Time between two checks for a reply."""
SETTLE_SECONDS = 2.0
"""Time without growth after which a reply is read: a model's output, redirected into the file, arrives in pieces."""
PAUSE_SECONDS = 60.0
"""The same for a reply without complete JSON: programs may write their output in blocks of some kilobytes."""
REMIND_SECONDS = 60.0
"""Time between two messages that name the awaited replies."""
MAX_NAMED_PROMPTS = 20
"""Maximum number of prompts that a reminder lists."""
RECORDED_FILE = "recorded"
"""File that marks a complete recording, with its author and date: a prompt without a reply is then an error."""
PROMPT, SCHEMA, REPLY = ".prompt.txt", ".schema.json", ".reply.txt"


class FileJudge:
    """A `draco_ray.judging.completion.Completer` that writes prompts to a directory and reads the replies from it.

    Several processes may use the same directory.
    """

    def __init__(self, directory: Path, model: str) -> None:
        """``directory`` is created when the first prompt is written; ``model`` is the name in the archive."""
        self._directory, self._model = directory, model
        self._asked: set[str] = set()
        """Keys of the requests that this judge has received."""
        self._waiting: set[str] = set()
        self._announced: set[str] = set()
        self._reminded = time.monotonic()

    async def __call__(self, request: Request) -> Completion:
        """Write the request's prompt, unless it exists, and wait for its reply.

        Raises:
            StoreError: the directory cannot be used, or is a recording without this reply.
        """
        started, clock = time.time(), time.perf_counter()
        self._asked.add(_key(request))
        try:
            name, answered = await asyncio.to_thread(self._write, request)
            text = await self._reply(name)
        except OSError as error:
            raise StoreError(f"judge {self._model}: {error}") from None
        except UnicodeDecodeError as error:
            raise StoreError(f"judge {self._model}: {name}{REPLY}: {error}; expected UTF-8") from None
        if not answered and TAG not in text and TAG in request.messages[0].content:
            log.warning("%s%s contains no %s, so a reply to the wrong prompt would not be noticed", name, REPLY, TAG)
        return Completion(
            text=text,
            finish_reason="stop",
            model=self._model,
            started_at=started,
            seconds=time.perf_counter() - clock,
            requests=0 if answered else 1,
            call_id=f"{name}-{started}",
        )

    async def forget(self, request: Request) -> None:
        """Rename an unusable reply to ``.reply.txt.refused``, so that the same question waits for a new reply.

        A recording stays as it is.
        """
        for reply in self._directory.glob(f"*-{_key(request)}{REPLY}"):
            # Another process may already have renamed the reply.
            with contextlib.suppress(FileNotFoundError):
                if not self._recorded:
                    reply.rename(f"{reply}.refused")
                    log.warning("a reply could not be used and is now %s.refused", reply)

    async def check(self) -> None:
        """Do nothing: a reply may take any time."""

    def _write(self, request: Request) -> tuple[str, bool]:
        """Write prompt and schema under the next number, unless they or the reply exist.

        Returns: their name, and whether the reply already exists.
        """
        key = _key(request)
        there = self._found(key)
        answered = there is not None and (self._directory / f"{there}{REPLY}").exists()
        if there and (answered or not self._recorded):
            return there, answered
        if self._recorded:
            raise StoreError(
                f"judge {self._model}: no recorded reply to this {request.phase} prompt, because traces or prompts "
                f"have changed; to write the prompt and wait for a reply, remove {self._directory / RECORDED_FILE}"
            )
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if there := self._found(key):
                return there, False
            numbers = [path.name.partition("-")[0] for path in self._directory.glob("[0-9]*.txt")]
            number = max((int(each) for each in numbers if each.isdecimal()), default=0) + 1
            name = f"{number:04d}-{request.phase or 'question'}-{key}"
            if request.schema is not None:
                schema = json.dumps(request.schema, ensure_ascii=False, indent=1)
                (self._directory / f"{name}{SCHEMA}").write_text(f"{schema}\n", encoding="utf-8")
            draft = self._directory / f".{name}"
            draft.write_text(_shown(request), encoding="utf-8")
            os.replace(draft, self._directory / f"{name}{PROMPT}")
        if len(request.messages) > 1:
            log.warning("a reply could not be used; for the reason see the end of %s%s", name, PROMPT)
        return name, False

    def _found(self, key: str) -> str | None:
        """Name of the prompt or reply with a key; None if there is none."""
        found = (path for ending in (REPLY, PROMPT) for path in self._directory.glob(f"[0-9]*-{key}{ending}"))
        return next((path.name.partition(".")[0] for path in found), None)

    def _not_asked(self) -> Iterator[str]:
        """Unanswered prompts that this judge did not write; other processes or earlier commands did."""
        for prompt in self._directory.glob(f"[0-9]*{PROMPT}"):
            name = prompt.name.removesuffix(PROMPT)
            if name.rpartition("-")[2] not in self._asked and not prompt.with_name(f"{name}{REPLY}").exists():
                yield name

    @property
    def _recorded(self) -> bool:
        return (self._directory / RECORDED_FILE).exists()

    async def _reply(self, name: str) -> str:
        path, size, grown = self._directory / f"{name}{REPLY}", 0, 0.0
        self._waiting.add(name)
        try:
            while True:
                try:
                    found, now = path.stat(), time.monotonic()
                    if size != found.st_size:
                        size, grown = found.st_size, now
                    # The modification time can show that a reply is complete, unless a file server's clock is ahead.
                    idle = max(now - grown, time.time() - found.st_mtime)
                    if size and idle > SETTLE_SECONDS:
                        written = path.read_bytes().decode("utf-8", "replace")
                        if idle > PAUSE_SECONDS or is_complete(written):
                            return path.read_text(encoding="utf-8-sig")
                except FileNotFoundError:
                    # It is not written yet, or another process has just renamed it.
                    size = 0
                await asyncio.sleep(POLL_SECONDS)
                self._remind()
        finally:
            self._waiting.discard(name)

    def _remind(self) -> None:
        """Log the awaited replies when there are new ones, and otherwise every `REMIND_SECONDS`."""
        if self._waiting <= self._announced and time.monotonic() - self._reminded < REMIND_SECONDS:
            return
        self._reminded = time.monotonic()
        self._announced |= self._waiting
        name, *others = sorted(self._waiting)
        first = self._directory / name
        log.warning("%s: read %s%s, then write %s%s", _count(len(self._waiting)), first, PROMPT, first, REPLY)
        if others:
            log.warning("then likewise: %s", _listed(others))
        if idle := sorted(self._not_asked()):
            log.warning("this command does not wait for replies to: %s", _listed(idle))
        for name in sorted(self._waiting):
            for stray in self._directory.glob(f"{name.partition('-')[0]}[!0-9]*"):
                if stray.name.removeprefix(name) not in (PROMPT, SCHEMA, REPLY, f"{REPLY}.refused"):
                    log.warning("%s is ignored; the reply is read from %s%s", stray, name, REPLY)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMED_PROMPTS]) + (", ..." if names[MAX_NAMED_PROMPTS:] else "")


def _count(prompts: int) -> str:
    return "1 prompt waits for a reply" if prompts == 1 else f"{prompts} prompts wait for replies; first"


def _key(request: Request) -> str:
    asked = [[message.role, message.content] for message in request.messages]
    return hashlib.sha256(json.dumps([asked, request.vote]).encode()).hexdigest()[:12]


def _shown(request: Request) -> str:
    """The prompt; if it has several messages, each has its role as heading."""
    if len(request.messages) == 1:
        return request.messages[0].content
    return "\n\n".join(f"[{message.role}]\n{message.content}" for message in request.messages)
