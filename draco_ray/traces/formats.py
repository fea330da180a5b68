"""Formats of records, and helpers for their readers: fields of a record, its task, and the trace built from it.

The readers are in `draco_ray.traces.readers`; messages themselves are read by `draco_ray.traces.messages`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draco_ray.records import SIDE_CALL, EpisodeEnd
from draco_ray.traces.calls import SUB_AGENT
from draco_ray.traces.conversation import CODE_PATTERN, assemble_conversation, tool_texts
from draco_ray.traces.entry import AGENT, BadTrace, Entry, MissingTaskId, json_type_name
from draco_ray.traces.model import Trace, printable_id

Record = Mapping[str, Any]

TASK_IDS = ("task_id", "example_id", "problem_id", "instance_id", "question_id", "scenario_id")
"""Fields of a record, or of its metadata, that name its task."""
TRACE_IDS = ("trace_id", "id", "run_id", "custom_id", "session_id", "conversation_id", "uuid")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options for reading records that do not depend on the format."""

    group_by: str | None = None
    """Dotted path of the task's name; None: use the format's task id or one of `TASK_IDS`, or else group by prompt."""
    code: re.Pattern[str] = CODE_PATTERN
    """See `draco_ray.traces.conversation.assemble_conversation`."""
    format: str = ""
    """Name of the format of the records."""
    where: str = ""
    """Location of the record."""
    wheres: Sequence[str] = ()
    """Locations of the records of a session; empty for a record that is read by itself."""
    unreadable: Callable[[str, Exception], None] = lambda where, problem: None
    """(location, error): called for an unreadable record of a session; the other records are still read."""
    may_be_silent: bool = False
    """Whether to accept a trace in which all turns of the agent are empty. In a file, empty turns mean that the reader
    did not understand them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format of records."""

    name: str
    shape: str
    """Description of a record, for messages."""
    recognises: Callable[[object], bool]
    read: Callable[[Any, ReadOptions], Iterator[Trace]]
    """The traces of a record, or of all records of a session as a list.

    Raises BadTrace if the record does not fit the format."""
    session: Callable[[Any, str], str | tuple[str, ...] | None] | None = None
    """(record, file) -> name of the record's session, or several names that each identify the session; None: the record
    is read by itself."""
    split: Callable[[Any], Iterable[Any]] | None = None
    """Splits a record into the records it contains, such as the spans of an export."""
    repeated: tuple[str, ...] = ()
    """Fields whose content is also in another field that is read."""
    metered: bool = True
    """Whether unread fields are reported; off for formats with fields that must not be read, such as answers."""


READERS: dict[str, Format] = {}
"""Formats registered by `register_format`, by name."""
Read = Callable[[Any, ReadOptions], Iterator[Trace]]


def register_format(
    name: str, shape: str, recognises: Callable[[object], bool], **options: Any
) -> Callable[[Read], Read]:
    """Decorator that registers the reader of a format; the arguments are fields of `Format`."""

    def register(read: Read) -> Read:
        READERS[name] = Format(name=name, shape=shape, recognises=recognises, read=read, **options)
        return read

    return register


def path_value(record: object, path: str) -> Any:
    """The value at a dotted path; None if there is none.

    >>> path_value({"data": [{"id": 7}]}, "data.0.id")
    7
    """
    for part in path.split("."):
        if isinstance(record, Mapping):
            record = record.get(part)
        elif isinstance(record, list) and part.lstrip("-").isdigit():
            record = record[int(part)] if -len(record) <= int(part) < len(record) else None
        else:
            return None
    return record


def get_field(record: object, name: str) -> Any:
    """A field of a record; None if there is none."""
    return record.get(name) if isinstance(record, Mapping) else None


def first_identifier(record: object, names: Sequence[str]) -> str:
    """The first of these fields, in the record or its metadata, that has text or a number; empty if none has."""
    holders = [record]
    if isinstance(record, Mapping):
        holders += [record.get(key) for key in ("metadata", "info", "meta")]
    for holder in holders:
        for name in names:
            value = holder.get(name) if isinstance(holder, Mapping) else None
            known = isinstance(value, str | int | float) and not isinstance(value, bool) and value == value
            if known and str(value).strip():
                return printable_id(value)
    return ""


def record_task_id(record: object, reading: ReadOptions, own: str = "") -> str:
    """The task id of a record; empty if the prompt identifies the task.

    Raises:
        MissingTaskId: there is no text or number at ``reading.group_by``.
    """
    if reading.group_by is None:
        return own or first_identifier(record, TASK_IDS)
    value = path_value(record, reading.group_by)
    if not isinstance(value, str | int | float) or not str(value).strip():
        raise MissingTaskId(
            f"--group-by {reading.group_by}: expected text or a number there, found {json_type_name(value)}"
        )
    return printable_id(value)


def number(value: object) -> float | None:
    """A finite number; None for anything else."""
    ok = isinstance(value, int | float) and value == value and abs(value) < 1e300
    return float(value) if ok else None  # type: ignore[arg-type]


def build_trace(
    said: Sequence[Entry],
    record: object,
    reading: ReadOptions,
    *,
    task_id: str = "",
    trace_id: str = "",
    instruction: str | None = None,
    tools: object = None,
    ended: EpisodeEnd | None = None,
    outcome: float | None = None,
) -> Trace:
    """Build the trace of a conversation.

    Raises:
        BadTrace: the agent says nothing in the conversation.
    """
    if not any(entry.role == AGENT for entry in said):
        raise BadTrace("the trace has no turn of an agent (role assistant)")
    spoke = any(entry.text or entry.calls or entry.code for entry in said if entry.role == AGENT)
    if not spoke and not reading.may_be_silent:
        raise BadTrace("all turns of the agent are empty, because no part of them could be read")
    prompt, turns, notes, task = assemble_conversation(
        said, instruction=instruction, tools=tool_texts(tools), code=reading.code
    )
    # If the conversation ends with a message of the agent, the agent has finished. Side calls may follow.
    last = next((turn for turn in reversed(turns) if not turn.role.startswith((SIDE_CALL, SUB_AGENT))), None)
    finished = last is not None and last.message
    return Trace(
        trace_id=trace_id or first_identifier(record, TRACE_IDS),
        task_id=record_task_id(record, reading, task_id),
        task=task,
        prompt=prompt,
        turns=turns,
        format=reading.format,
        source=reading.where,
        ended=ended or (EpisodeEnd.FINISHED if finished else EpisodeEnd.UNSTATED),
        outcome=outcome,
        notes=notes,
    )
