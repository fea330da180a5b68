"""Files to records: which files of the paths given, and what is in each, one at a time.

A JSON Lines file is read a line at a time; a JSON document is in memory while its own traces are read.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from draco_ray.errors import TraceError
from draco_ray.traces.messages import BadTrace

LINES = (".jsonl", ".ndjson", ".jsonlines")
DOCUMENTS = (".json",)
INSPECT = (".eval",)
INDEX = "traces.jsonl"
"""In a run directory in which traces were judged: where each came from."""


@dataclass(frozen=True, slots=True)
class Found:
    """A record, or what is wrong with it."""

    where: str
    record: Any = None
    problem: str | None = None


def trace_files(paths: Sequence[Path], other: Counter[str] | None = None) -> list[Path]:
    """The files and run directories that the paths stand for, in the order of their names.

    ``other`` counts, by their endings, the files in folders that are of no kind that is read.

    Raises:
        TraceError: a path does not exist.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise TraceError(f"{path}: no such file or folder")
        found += [path] if is_run(path) or not path.is_dir() else _below(path, Counter() if other is None else other)
    # A link to another of them (latest.jsonl) adds nothing.
    return list({path.resolve(): path for path in reversed(found)}.values())[::-1]


def is_run(path: Path) -> bool:
    """Whether it is a run directory of ours."""
    return path.is_dir() and (path / "config.yaml").is_file() and (path / "tables").is_dir()


def _below(folder: Path, other: Counter[str]) -> list[Path]:
    if is_run(folder):
        # What an earlier judging has left beside the traces is no further trace, unless it is named.
        return [] if (folder / INDEX).is_file() else [folder]
    found: list[Path] = []
    # The simulations of τ-bench's directory format are read with the results.json beside them.
    tau2 = (folder / "results.json").is_file()
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or (path.is_symlink() and path.is_dir()):
            continue
        if path.is_dir():
            found += [] if tau2 and path.name == "simulations" else _below(path, other)
        # A pipe in a folder would be waited for without end; one that is named on purpose is read.
        elif path.is_file() and suffix(path) in (*LINES, *DOCUMENTS, *INSPECT):
            found.append(path)
        elif path.is_file():
            other[path.suffix or path.name] += 1
    return found


def suffix(path: Path) -> str:
    """What the name ends in, less ``.gz``."""
    return Path(path.name.removesuffix(".gz")).suffix.casefold()


def records(path: Path, inside: str | None = None) -> Iterator[Found]:
    """What is in a file: a record a line, or those of a JSON document.

    Args:
        inside: dotted path to the records of a document; None: the document is one, or a list of them.
    """
    try:
        if suffix(path) in LINES:
            yield from _lines(path)
        elif suffix(path) in INSPECT:
            yield from _inspect(path)
        else:
            yield from _document(path, inside)
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        yield Found(str(path), problem=f"cannot be read: {getattr(error, 'strerror', None) or error}")


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")


def _lines(path: Path) -> Iterator[Found]:
    empty = True
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if empty and line.strip() in (b"{", b"["):
                # Written over several lines.
                yield from _document(path, None)
                return
            empty, where = False, f"{path}:{number}"
            try:
                yield from _several(loads(line), where)
            except BadTrace as problem:
                yield Found(where, problem=f"expected a JSON object, {problem}")
    if empty:
        yield Found(str(path), problem="is empty")


def _document(path: Path, inside: str | None) -> Iterator[Found]:
    from draco_ray.traces.formats import path_value

    with _open(path) as file:
        content = file.read().strip()
    if not content:
        yield Found(str(path), problem="is empty")
        return
    try:
        document = loads(content)
    except BadTrace as problem:
        first = content.partition(b"\n")[0].rstrip()
        if b"\n{" in content and first.startswith(b"{") and first != b"{":
            # JSON Lines under another name.
            yield from _lines(path)
        else:
            yield from _values(path, content if inside is None else b"", problem)
        return
    del content
    if inside is not None:
        document = path_value(document, inside)
        if document is None:
            yield Found(str(path), problem=f'has nothing at "{inside}", where the mapping says that records are')
            return
    yield from _several(document, str(path))


def _values(path: Path, content: bytes, problem: BadTrace) -> Iterator[Found]:
    """What can be read of a document that is no JSON as a whole, then what is wrong with it, if anything is.

    That is values one behind the other, or those before the end of a list that is cut.
    """
    from draco_ray.traces.formats import is_messages

    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = ""
    decoder, found, at = json.JSONDecoder(), list[Any](), 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
            found.append(value)
        except (ValueError, RecursionError) as error:
            problem = _not_json(error)
            if at or text[0] != "[":
                break
            at = 1
        at = cast("re.Match[str]", _BETWEEN.match(text, at)).end()
    if not is_messages(found):
        for place, value in enumerate(found, 1):
            yield from _several(value, f"{path}[{place}]")
    if not found or at < len(text):
        yield Found(str(path), problem=f"expected JSON, {problem}")


_BETWEEN = re.compile(r"[\s,]*")


def _several(document: object, where: str) -> Iterator[Found]:
    """The records of a list, or the one that it is."""
    from draco_ray.traces.formats import is_messages

    if isinstance(document, list) and not is_messages(document):
        for place, record in enumerate(document, 1):
            yield Found(f"{where}[{place}]", record)
        if not document:
            yield Found(where, problem="is an empty list")
        return
    yield Found(where, document)


def loads(content: bytes) -> Any:
    """JSON in UTF-8.

    Raises:
        BadTrace: it is none; the message says where.
    """
    try:
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None


def _not_json(error: ValueError | RecursionError) -> BadTrace:
    if isinstance(error, UnicodeDecodeError):
        return BadTrace(f"not UTF-8 at byte {error.start} (`iconv -t utf-8` makes it so)")
    if isinstance(error, json.JSONDecodeError):
        return BadTrace(f"not valid at line {error.lineno}, column {error.colno}: {error.msg}")
    if isinstance(error, RecursionError):
        return BadTrace("nested too deep")
    return BadTrace(f"not valid: {' '.join(str(error).split())[:200]}")


def _inspect(path: Path) -> Iterator[Found]:
    """The samples of a ``.eval`` file, one at a time, by Inspect's own reader."""
    if importlib.util.find_spec("inspect_ai") is None:
        yield Found(
            str(path),
            problem="an Inspect log in its packed form: pip install inspect_ai, which reads it, or write it as JSON "
            "with `inspect log convert --to json`",
        )
        return
    from inspect_ai.log import read_eval_log, read_eval_log_sample, read_eval_log_sample_summaries

    try:
        header = read_eval_log(str(path), header_only=True)
        for summary in read_eval_log_sample_summaries(str(path)):
            where = f"{path} sample {summary.id} epoch {summary.epoch}"
            sample = read_eval_log_sample(str(path), summary.id, summary.epoch, resolve_attachments=True)
            log = {
                "eval": {"task": header.eval.task},
                "status": header.status,
                "samples": [sample.model_dump(mode="json", exclude={"events", "store"})],
            }
            yield Found(where, log)
    except Exception as error:  # Whatever its reader raises over a damaged file.
        yield Found(str(path), problem=f"Inspect cannot read it: {' '.join(str(error).split())[:300]}")
