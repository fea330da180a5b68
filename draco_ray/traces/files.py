"""Records in files: finds the files to read in the given paths, and reads their records one at a time.

A JSON Lines file is read one line at a time; a JSON document stays in memory while its traces are read.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from draco_ray.errors import TraceError
from draco_ray.traces.entry import BadTrace, decode_if_json
from draco_ray.traces.templates import parse_chat_template

LINE_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
DOCUMENT_SUFFIXES = (".json", ".traj", ".har")
TEXT_SUFFIXES = (".chatml", ".txt")
INSPECT_SUFFIXES = (".eval",)
PACKED_SUFFIXES = (".parquet", ".zip")
COMPRESSED_SUFFIXES = (".gz", ".zst")
MAGIC = {b"PAR1": ".parquet", b"PK\x03\x04": ".zip", b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}
"""First bytes of a file -> its kind, independent of its name."""
STREAMED = (b"data:", b"event:")
"""First bytes of server-sent events."""
MAX_LINE, MAX_DOCUMENT = 2**28, 2**30
"""Maximum length of a line, and of a document, in bytes."""
MAX_RATIO, FREE_BYTES = 300, 2**26
"""Maximum decompression ratio, not counting the first `FREE_BYTES` bytes of a file."""
ROWS_AT_ONCE = 64
TRACES_FILE = "traces.jsonl"
"""File of a run directory with judged traces: the source of each trace."""


@dataclass(frozen=True, slots=True)
class RecordOrError:
    """A record, or a problem with it."""

    where: str
    record: Any = None
    problem: str | None = None


def trace_files(paths: Sequence[Path], other: Counter[str] | None = None) -> list[Path]:
    """The files and run directories of the paths, sorted by name.

    ``other`` counts, by suffix, the files in folders that are not read.

    Raises:
        TraceError: a path does not exist, or is neither a file nor a folder.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise TraceError(f"{path}: no such file or folder")
        if not path.is_dir() and not path.is_file():
            raise TraceError(f"{path}: not a file or a folder; write its content to a file first")
        found += [path] if is_run(path) or not path.is_dir() else _below(path, Counter() if other is None else other)
    # Skip links to another file of the list (latest.jsonl).
    return list({path.resolve(): path for path in reversed(found)}.values())[::-1]


def is_run(path: Path) -> bool:
    """Whether the path is a draco-ray run directory; False if access is denied."""
    try:
        return path.is_dir() and (path / "config.yaml").is_file() and (path / "tables").is_dir()
    except PermissionError:
        return False


def _below(folder: Path, other: Counter[str]) -> list[Path]:
    if is_run(folder):
        # A run directory with results of earlier judging is read only if it is named explicitly.
        return [] if (folder / TRACES_FILE).is_file() else [folder]
    found: list[Path] = []
    try:
        inside = sorted(folder.iterdir())
        # The simulations of τ-bench's directory format are read with the results.json beside them.
        tau2 = (folder / "results.json").is_file()
    except PermissionError:
        # Return the folder itself: the caller will try to read it as a file, and report the error.
        return [folder]
    known = (*LINE_SUFFIXES, *DOCUMENT_SUFFIXES, *INSPECT_SUFFIXES, *PACKED_SUFFIXES)
    for path in inside:
        if path.name.startswith(".") or (path.is_symlink() and path.is_dir()):
            continue
        if path.is_dir():
            found += [] if tau2 and path.name == "simulations" else _below(path, other)
        elif path.is_file() and plain_suffix(path) in known:
            found.append(path)
        elif path.is_file():
            other[path.suffix or path.name] += 1
    return found


def plain_suffix(path: Path) -> str:
    """The suffix of the file name, ignoring ``.gz`` and ``.zst``."""
    name = path.name.casefold()
    return Path(next((name.removesuffix(each) for each in COMPRESSED_SUFFIXES if name.endswith(each)), name)).suffix


def records(path: Path, inside: str | None = None) -> Iterator[RecordOrError]:
    """The records of a file: one per line, or those of a JSON document.

    Args:
        inside: dotted path to the records of a document; None: the document is a record or a list of records.
    """
    try:
        kind_ = detect_compression(path)
        if kind_ == ".parquet":
            yield from _parquet(path)
        elif plain_suffix(path) in INSPECT_SUFFIXES:
            yield from _inspect(path)
        elif kind_ == ".zip":
            yield from _zip(path, inside)
        else:
            with _open(path, kind_) as file:
                yield from _stream(_Bounded(file, path.stat().st_size), str(path), plain_suffix(path), inside)
    except BadTrace as problem:
        yield RecordOrError(str(path), problem=str(problem))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        yield RecordOrError(str(path), problem=f"cannot be read: {getattr(error, 'strerror', None) or error}")


def detect_compression(path: Path) -> str:
    """Compression of a file by its first bytes: one of the suffixes in `MAGIC`, or empty."""
    with path.open("rb") as file:
        start = file.read(4)
    return next((ending for magic, ending in MAGIC.items() if start.startswith(magic)), "")


def _open(path: Path, kind_: str) -> Any:
    if kind_ == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return gzip.open(path, "rb") if kind_ == ".gz" else path.open("rb")


class _Bounded:
    """A stream that raises `BadTrace` when it becomes far larger than its file (a decompression bomb)."""

    def __init__(self, file: Any, size: int) -> None:
        self._file = file
        self._limit = FREE_BYTES + size * MAX_RATIO
        self._read = 0

    def line(self) -> bytes:
        """The next line; empty at the end."""
        return self._checked(self._file.readline(min(MAX_LINE, self._limit) + 1), MAX_LINE, "a line")

    def rest(self) -> bytes:
        """The rest of the stream."""
        return self._checked(self._file.read(min(MAX_DOCUMENT, self._limit) + 1), MAX_DOCUMENT, "a JSON document")

    def _checked(self, content: bytes, limit: int, what: str) -> bytes:
        self._read += len(content)
        if self._read > self._limit:
            raise BadTrace(f"the file is more than {MAX_RATIO} times larger when decompressed; decompress it first")
        if len(content) > limit:
            raise BadTrace(f"the file has {what} of more than {limit >> 20} MiB; convert the file to JSON Lines")
        return content


def _parquet(path: Path) -> Iterator[RecordOrError]:
    """The rows of a Parquet file; columns of JSON text are read as JSON."""
    import pyarrow.parquet

    row = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
            for record in batch.to_pylist():
                row += 1
                yield RecordOrError(f"{path}[{row}]", {key: decode_if_json(value) for key, value in record.items()})


def _zip(path: Path, inside: str | None) -> Iterator[RecordOrError]:
    """The records of the files in a ZIP archive."""
    found = False
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            ending = plain_suffix(Path(member.filename))
            if member.is_dir() or ending not in (*LINE_SUFFIXES, *DOCUMENT_SUFFIXES):
                continue
            found = True
            with archive.open(member) as file:
                content = _Bounded(file, member.compress_size)
                yield from _stream(content, f"{path}/{member.filename}", ending, inside)
    if not found:
        yield RecordOrError(str(path), problem="a ZIP archive without .json or .jsonl files")


def _stream(file: _Bounded, where: str, ending: str, inside: str | None) -> Iterator[RecordOrError]:
    """The records of an open file."""
    if ending in LINE_SUFFIXES:
        yield from _lines(file, where)
    elif ending in TEXT_SUFFIXES:
        yield from _chatml(file.rest(), where)
    else:
        yield from _document(file.rest().strip(), where, inside)


def _lines(file: _Bounded, where: str) -> Iterator[RecordOrError]:
    number, empty = 0, True
    while line := file.line():
        number += 1
        if not line.strip():
            continue
        if empty and line.strip() in (b"{", b"["):
            # A single document with line breaks.
            yield from _document((line + file.rest()).strip(), where, None)
            return
        empty = False
        yield from _line(line, f"{where}:{number}")
    if empty:
        yield RecordOrError(where, problem="is empty")


def _line(line: bytes, where: str) -> Iterator[RecordOrError]:
    try:
        yield from _several(loads(line), where)
    except BadTrace as problem:
        yield RecordOrError(where, problem=f"expected a JSON object, {problem}")


def _chatml(content: bytes, where: str) -> Iterator[RecordOrError]:
    """The conversation in a text rendered by a chat template."""
    text = content.decode("utf-8", "replace")
    messages = parse_chat_template(text)
    if messages:
        yield RecordOrError(where, {"messages": messages})
    else:
        yield RecordOrError(
            where, problem="text without a chat template's marks (<|im_start|>); expected JSON or JSON Lines"
        )


def _document(content: bytes, where: str, inside: str | None) -> Iterator[RecordOrError]:
    from draco_ray.traces.formats import path_value

    if not content:
        yield RecordOrError(where, problem="is empty")
        return
    try:
        document = loads(content)
    except BadTrace as problem:
        first = content.partition(b"\n")[0].rstrip()
        if b"\n{" in content and first.startswith(b"{") and first != b"{":
            # JSON Lines with another suffix.
            for number, line in enumerate(content.splitlines(), 1):
                if line.strip():
                    yield from _line(line, f"{where}:{number}")
        else:
            yield from _values(where, b"" if inside is not None or content.startswith(STREAMED) else content, problem)
        return
    if inside is not None:
        document = path_value(document, inside)
        if document is None:
            yield RecordOrError(where, problem=f'has nothing at "{inside}", where the mapping expects the records')
            return
    yield from _several(document, where)


def _values(where: str, content: bytes, problem: BadTrace) -> Iterator[RecordOrError]:
    """The readable values of a document that is not valid JSON, followed by the problem if something is unreadable.

    Such a document has concatenated values, or is a truncated list.
    """
    from draco_ray.traces.model_request import is_messages

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
            yield from _several(value, f"{where}[{place}]")
    if not found or at < len(text):
        yield RecordOrError(where, problem=f"expected JSON, {problem}")


_BETWEEN = re.compile(r"[\s,]*")


def _several(document: Any, where: str) -> Iterator[RecordOrError]:
    """The records of a list, or of a list within an object of unknown format; otherwise the document is one record."""
    from draco_ray.traces.model_request import HISTORIES, is_messages
    from draco_ray.traces.readers import detect_format

    known = detect_format(document) is not None
    several = isinstance(document, dict) and len(document) > 1 and document.keys().isdisjoint(HISTORIES)
    if several and all(map(is_messages, document.values())):
        # An object with a conversation under each name.
        document, known = list(document.values()), False
    if isinstance(document, dict) and not known:
        # An HTTP archive of a proxy or browser has its entries in a log.
        document = document["log"] if document.keys() == {"log"} and isinstance(document["log"], dict) else document
        lists = ((key, value) for key, value in document.items() if isinstance(value, list) and value)
        name = next((key for key, value in lists if all(detect_format(_row(each)) for each in value[:3])), None)
        document, where = (document, where) if name is None else (document[name], f"{where}.{name}")
    if isinstance(document, list) and not known:
        for place, record in enumerate(document, 1):
            yield RecordOrError(f"{where}[{place}]", _row(record))
        if not document:
            yield RecordOrError(where, problem="is an empty list")
        return
    yield RecordOrError(where, document)


def _row(record: Any) -> Any:
    """The record in a row of Hugging Face's dataset viewer."""
    return record["row"] if isinstance(record, dict) and {"row_idx", "row"} <= record.keys() else record


def loads(content: bytes) -> Any:
    """JSON in UTF-8.

    Raises:
        BadTrace: the content is not valid JSON; the message names the position.
    """
    try:
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if content.startswith(STREAMED):
            raise BadTrace(
                'found server-sent events without their request; expected {"request": ..., "response": ...}'
            ) from None
        raise _not_json(error) from None


def _not_json(error: ValueError | RecursionError) -> BadTrace:
    if isinstance(error, UnicodeDecodeError):
        return BadTrace(f"not UTF-8 at byte {error.start}; convert it with `iconv -t utf-8`")
    if isinstance(error, json.JSONDecodeError):
        return BadTrace(f"not valid at line {error.lineno}, column {error.colno}: {error.msg}")
    if isinstance(error, RecursionError):
        return BadTrace("nested too deeply")
    return BadTrace(f"not valid: {' '.join(str(error).split())[:200]}")


def _inspect(path: Path) -> Iterator[RecordOrError]:
    """The samples of a ``.eval`` file, read one at a time by Inspect's own reader."""
    if importlib.util.find_spec("inspect_ai") is None:
        yield RecordOrError(
            str(path),
            problem="a packed Inspect log; to read it run pip install inspect_ai, or convert it with `inspect log "
            "convert --to json`",
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
            yield RecordOrError(where, log)
    except Exception as error:  # Inspect's reader may raise anything for a damaged file.
        yield RecordOrError(str(path), problem=f"Inspect cannot read it: {' '.join(str(error).split())[:300]}")
