"""`load_traces`: read traces from paths into groups.

Every trace is read once, converted to its common form and written to a temporary file; only a
`draco_ray.traces.model.TraceSummary` of each stays in memory. So thousands of them fit on a laptop.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from draco_ray.errors import ConfigError, TraceError
from draco_ray.records import Message, Trajectory, Turn
from draco_ray.traces.conversation import CODE_PATTERN
from draco_ray.traces.entry import AGENT, UNREADABLE_ERRORS, BadTrace, MissingTaskId, json_type_name
from draco_ray.traces.field_tracking import track_fields, unused_fields
from draco_ray.traces.files import RecordOrError, is_run, records, trace_files
from draco_ray.traces.formats import Format, ReadOptions
from draco_ray.traces.mapping import FieldMapping, load_mapping, mapped_format
from draco_ray.traces.model import Trace, TraceGroup, TraceSummary, escape_surrogates
from draco_ray.traces.readers import FORMATS, detect_format
from draco_ray.traces.readers.chat import session as chat_session

log = logging.getLogger(__name__)

AUTO_FORMAT = "auto"
RUN_FORMAT = "run"
"""Name of the format of our own run directories."""
SHOWN_PROBLEMS = 20
NO_GROUPS = "none"
"""Value of ``group_by`` that puts every trace into its own group."""


Place = tuple[int, int]
"""Position of a text in the spool: (offset, length), in bytes."""


def format_names() -> list[str]:
    """Valid values of ``format``."""
    return [AUTO_FORMAT, *FORMATS, RUN_FORMAT]


class Groups(list[TraceGroup]):
    """The groups of `load_traces`, with the problems found while reading."""

    problems: Sequence[str] = ()
    """One line per problem: file and line, what is wrong, what was expected."""
    warnings: Sequence[str] = ()
    """One line per format whose records contain text or calls that were not read."""


class Spool:
    """Texts in an unnamed temporary file that exists as long as this process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="draco-traces-")  # noqa: SIM115 (it lives as long as the groups)
        # Several threads read groups.
        self._lock = threading.Lock()

    def put(self, content: bytes) -> Place:
        """Append a text; returns its place."""
        with self._lock:
            begin = self._file.seek(0, 2)
            self._file.write(content)
        return begin, len(content)

    def get(self, place: Place) -> bytes:
        """The text at a place."""
        with self._lock:
            self._file.seek(place[0])
            return self._file.read(place[1])


TRACE_ADAPTER = TypeAdapter(Trace)
_Name = tuple[Any, str]
"""Identity of a session: (function that names the sessions of the format, session name)."""


@dataclass(slots=True)
class _Session:
    """The records of one session, which may be in several lines or files."""

    format: Format
    where: str
    places: list[tuple[Place, str]] = field(default_factory=list)
    """The records of the session: place in the spool, and source location."""


@dataclass(slots=True)
class _Loader:
    reading: ReadOptions
    forced: Format | None
    alone: bool
    spool: Spool = field(default_factory=Spool)
    members: dict[str, list[tuple[TraceSummary, Place]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    sessions: dict[_Name, _Session] = field(default_factory=dict)
    joined: dict[_Name, _Name] = field(default_factory=dict)
    """Session name -> another name of the same session."""
    taken: dict[str, int] = field(default_factory=dict)
    tasks: dict[str, list[str]] = field(default_factory=dict)
    """Task id -> digests of the tasks with that id."""
    lost: dict[str, Counter[str]] = field(default_factory=dict)
    """Format -> unread field with prose or tool calls -> number of records that have it."""

    def read(self, several: Iterable[RecordOrError]) -> None:
        """Read the records of a file, or those in memory."""
        latest: Format | None = None
        refused = False
        for found in several:
            if found.problem is not None:
                self.problem(found.where, found.problem)
                continue
            latest = self.forced or detect_format(found.record) or latest
            if latest is not None:
                self._record(found, latest)
            elif not refused:
                # Report an unknown format once per file.
                refused = True
                self.problem(
                    found.where,
                    f"unknown format, found {_described(found.record)}; expected one of {', '.join(FORMATS)}, or a "
                    "mapping of another format (--mapping FILE)",
                )

    def problem(self, where: str, text: str) -> None:
        """Note a problem."""
        self.problems.append(f"{where}: {text}")

    def _record(self, found: RecordOrError, format_: Format) -> None:
        for each in _single(found) if format_.session is None else (found,):
            try:
                for record in (each.record,) if format_.split is None else format_.split(each.record):
                    self._part(RecordOrError(each.where, record), format_)
            except UNREADABLE_ERRORS as problem:
                self.unreadable(each.where, problem, format_)

    def _part(self, found: RecordOrError, format_: Format) -> None:
        """Read a record, or spool it until its session is complete."""
        file = re.sub(r"(:\d+|\[\d+\])+$", "", found.where)
        names = None if format_.session is None else format_.session(found.record, file)
        if names is None:
            self._read(format_, found)
            return
        first, *others = [(format_.session, each) for each in ([names] if isinstance(names, str) else names)]
        for other in others:
            self._join(first, other)
        kept = self.sessions.setdefault(first, _Session(format_, file if names == file else found.where))
        kept.places.append((self.spool.put(json.dumps(found.record).encode("ascii")), found.where))

    def _read(self, format_: Format, found: RecordOrError, wheres: Sequence[str] = ()) -> None:
        """Add the traces of a record, or of a session's records from ``wheres``, and note their unread fields."""
        record = track_fields(found.record) if format_.metered else found.record
        traces = []
        reading = replace(
            self.reading,
            format=format_.name,
            where=found.where,
            wheres=wheres,
            unreadable=lambda where, problem: self.unreadable(where, problem, format_),
        )
        # Add traces one by one, so that a bad trace does not lose earlier traces of the same document.
        for trace in format_.read(record, reading):
            silent = reading.may_be_silent and not any(turn.text for turn in trace.turns if turn.role == AGENT)
            if silent and format_.metered and (lost := unused_fields(record, [trace], format_.repeated)):
                raise BadTrace(f"all turns of the agent are empty, and the field {lost[0]} was not understood")
            self.add(trace)
            traces.append(trace)
        if format_.metered:
            self.lost.setdefault(format_.name, Counter()).update(unused_fields(record, traces, format_.repeated))

    def _root(self, name: _Name) -> _Name:
        while (other := self.joined.get(name, name)) != name:
            name = other
        return name

    def _join(self, one: _Name, other: _Name) -> None:
        """Record that two names identify the same session."""
        if (root := self._root(one)) != (end := self._root(other)):
            self.joined[root] = end

    def finish_sessions(self, one_file_a_call: bool = True) -> None:
        """Read the sessions, now that all their records are known.

        Args:
            one_file_a_call: whether files with one request each in one folder may belong to the same conversation.
        """
        together: dict[_Name, list[_Session]] = {}
        for name, session in self.sessions.items():
            lone = one_file_a_call and name[0] is chat_session and name[1] == session.where and len(session.places) == 1
            key = (name[0], str(Path(session.where).parent)) if lone else self._root(name)
            together.setdefault(key, []).append(session)
        for sessions in together.values():
            format_, where = self.forced or sessions[0].format, sessions[0].where
            places = [place for session in sessions for place in session.places]
            gathered = [json.loads(self.spool.get(place)) for place, _ in places]
            try:
                self._read(format_, RecordOrError(where, gathered), [each for _, each in places])
            except UNREADABLE_ERRORS as problem:
                self.unreadable(where, problem, format_)
        self.sessions = {}

    def unreadable(self, where: str, problem: Exception, format_: Format) -> None:
        """Note a problem: the reader of ``format_`` raised an error for the record at ``where``."""
        said = str(problem) if isinstance(problem, BadTrace) else f"{type(problem).__name__}: {problem}"
        self.problem(where, said if isinstance(problem, MissingTaskId) else f"{said}; expected {format_.shape}")

    def add(self, trace: Trace) -> None:
        """Add a trace to its group."""
        trace_id = trace.trace_id or f"trace-{sum(map(len, self.members.values())) + 1}"
        self.taken[trace_id] = self.taken.get(trace_id, 0) + 1
        notes = trace.notes
        if self.taken[trace_id] > 1:
            notes = (*notes, f"the id {trace_id} occurs more than once; a suffix tells the traces apart")
            trace_id = f"{trace_id}#{self.taken[trace_id]}"
        # A file's name need not be UTF-8.
        source, task_id = escape_surrogates(trace.source), self._task_id(trace, trace_id)
        trace = replace(trace, trace_id=trace_id, task_id=task_id, source=source, notes=notes)
        place = self.spool.put(TRACE_ADAPTER.dump_json(trace))
        summary = TraceSummary(
            trace_id=trace_id,
            format=trace.format,
            source=trace.source,
            steps=len(trace.steps),
            turns=len(trace.turns),
            characters=trace.characters,
            prompt_characters=sum(len(message.content) for message in trace.prompt),
            outcome=trace.outcome,
            notes=notes,
        )
        self.members.setdefault(trace.task_id, []).append((summary, place))

    def _task_id(self, trace: Trace, trace_id: str) -> str:
        """The group id of a trace. A trace without a task gets its own group; equal ids of different tasks get a
        suffix."""
        digest = trace.task_digest
        if self.alone or not (trace.task_id or digest):
            return trace_id
        task_id = trace.task_id or f"prompt-{digest}"
        if self.reading.group_by is not None or not digest:
            return task_id
        known = self.tasks.setdefault(task_id, [])
        if digest not in known:
            known.append(digest)
        return task_id if known[0] == digest else f"{task_id}#{known.index(digest) + 1}"

    def groups(self) -> Groups:
        """All traces by task, in the order of first appearance."""
        found = Groups(
            TraceGroup(
                task_id=task_id,
                summaries=tuple(summary for summary, _ in members),
                read=_reader(self.spool, [place for _, place in members]),
            )
            for task_id, members in self.members.items()
        )
        found.problems = tuple(self.problems)
        found.warnings = tuple(
            f"{name}: not shown to the judge: {', '.join(f'{path} ({n} records)' for path, n in paths.most_common(5))}"
            for name, paths in self.lost.items()
            if paths
        )
        return found


def load_traces(
    path: str | Path | Sequence[str | Path],
    format: str = AUTO_FORMAT,
    group_by: str | None = None,
    mapping: str | Path | None = None,
) -> Groups:
    """Read traces and group them by task.

    Args:
        path: files, folders (searched for files) and draco-ray run directories.
        format: one of `format_names`; ``auto`` detects the format of each record.
        group_by: dotted path of the task's name in a record (``metadata.task_id``); ``none``: every trace is judged
            alone. Default: the task as stated by the format; otherwise equal prompts are one task.
        mapping: YAML file that describes records of an unknown format (`FieldMapping`).

    Returns: groups in the order in which their tasks appear; ``problems`` has a line for everything that could not be
        read; the lines are also logged.

    Raises:
        TraceError: no trace was found, or a path does not exist.
        ConfigError: an unknown format, or a mapping that cannot be used.
    """
    paths = [Path(each) for each in ([path] if isinstance(path, str | Path) else path)]
    if format not in format_names():
        raise ConfigError(f"format {format!r}: unknown; expected one of {', '.join(format_names())}")
    if mapping is not None and format != AUTO_FORMAT:
        raise ConfigError(f"format {format} and a mapping both describe the records; give only one of them")
    mapped = None if mapping is None else load_mapping(Path(mapping))
    loader = _Loader(
        ReadOptions(group_by=None if group_by == NO_GROUPS else group_by, code=_code(mapped)),
        mapped_format(mapped) if mapped is not None else FORMATS.get(format),
        alone=group_by == NO_GROUPS,
    )
    other: Counter[str] = Counter()
    files = trace_files(paths, other)
    if other:
        counted = ", ".join(f"{count} of {ending}" for ending, count in sorted(other.items()))
        log.warning("files of other kinds are ignored: %s", counted)
    for file in files:
        if is_run(file):
            if format not in (AUTO_FORMAT, RUN_FORMAT) or mapped is not None or group_by not in (None, NO_GROUPS):
                raise ConfigError(
                    f"{file}: rollouts of a run directory are already grouped by task; leave out --format, --mapping "
                    "and --group-by"
                )
            for trace in read_run_traces(file):
                loader.add(trace)
        elif format == RUN_FORMAT:
            loader.problem(str(file), "expected a run directory (it has a config.yaml and tables/)")
        else:
            _read_file(loader, file, None if mapped is None else mapped.records)
    loader.finish_sessions()
    for line in loader.problems[:SHOWN_PROBLEMS]:
        log.warning("%s", line)
    if not loader.members:
        nothing = f"none of the files has one in the format {format}"
        if not files:
            nothing = "no .json, .jsonl or .eval file and no run directory in it"
        reason = loader.problems[0] if loader.problems else nothing
        more = f" (and {len(loader.problems) - 1} more)" if len(loader.problems) > 1 else ""
        raise TraceError(f"no trace found in {', '.join(map(str, paths))}: {reason}{more}")
    groups = loader.groups()
    for line in groups.warnings:
        log.warning("%s", line)
    return groups


RECORD = "record"


def record_index(trace: Trace) -> int:
    """Index of the record of a trace from `groups_of`."""
    return int(trace.source.split()[1]) - 1


def groups_of(records: Sequence[Any], group_by: str | None = None) -> Groups:
    """`load_traces` for records in memory, in any known format.

    An agent that said nothing is judged like any other, because a trainer's policy may end at once.

    Raises:
        TraceError: no record is a trace.
    """
    reading = ReadOptions(group_by=None if group_by == NO_GROUPS else group_by, may_be_silent=True)
    loader = _Loader(reading, None, alone=group_by == NO_GROUPS)
    for number, record in enumerate(records, 1):
        where = f"{RECORD} {number}"
        known = detect_format(record)
        if known is None:
            loader.problem(where, f"unknown format, found {_described(record)}")
        else:
            loader._record(RecordOrError(where, record), known)
    loader.finish_sessions(one_file_a_call=False)
    if not loader.members:
        raise TraceError(f"no trace: {loader.problems[0] if loader.problems else 'no records'}")
    return loader.groups()


def read_run_traces(path: Path) -> Iterator[Trace]:
    """The rollouts of a run directory, with token counts; a group is one task of one training step."""
    from draco_ray.runs.directory import RunDirectory
    from draco_ray.runs.rows import step_trajectories

    run = RunDirectory.open(path)
    for step in run.steps():
        for trajectories in step_trajectories(run, step).values():
            for trajectory in trajectories:
                yield trace_of(trajectory, f"{path} step {step}", step)


def trace_of(trajectory: Trajectory, source: str, training_step: int) -> Trace:
    """Convert a draco-ray rollout to a trace."""
    return Trace(
        trace_id=f"{trajectory.group}/{trajectory.rollout}",
        task_id=trajectory.group,
        task="\n".join(escape_surrogates(each.content) for each in trajectory.prompt),
        prompt=tuple(Message(role=each.role, content=escape_surrogates(each.content)) for each in trajectory.prompt),
        turns=tuple(
            Turn(
                role=turn.role,
                text=escape_surrogates(turn.text),
                action=None if turn.action is None else escape_surrogates(turn.action),
                observation=None if turn.observation is None else escape_surrogates(turn.observation),
                last_token=turn.tokens or 0,
                message=turn.message,
            )
            for turn in trajectory.turns
        ),
        format=RUN_FORMAT,
        source=source,
        ended=trajectory.ended,
        training_step=training_step,
    )


def _read_file(loader: _Loader, file: Path, inside: str | None) -> None:
    simulations = file.parent / "simulations"
    if file.name == "results.json" and simulations.is_dir() and loader.forced in (None, FORMATS["tau2"]):
        # τ-bench's directory format: this file has tasks and policy; each simulation has its own file.
        head = next(iter(records(file)), None)
        if head is not None and isinstance(head.record, dict) and "info" in head.record:
            if head.record.get("simulations"):
                loader.read([head])
            for each in sorted(path for path in simulations.glob("*.json") if not path.name.startswith(".")):
                loader.read(
                    replace(found, record={**head.record, "simulations": [found.record]}) for found in records(each)
                )
            return
    loader.read(records(file, inside))


def _single(found: RecordOrError) -> Iterator[RecordOrError]:
    """Split a record into records of one trace each, so that a bad trace does not affect the others."""
    for name in ("samples", "simulations", "traces"):
        inner = found.record.get(name) if isinstance(found.record, dict) else None
        if isinstance(inner, list) and inner:
            for place, one in enumerate(inner, 1):
                yield RecordOrError(f"{found.where} {name.removesuffix('s')} {place}", {**found.record, name: [one]})
            return
    yield found


def _code(mapped: FieldMapping | None) -> re.Pattern[str]:
    given = mapped is not None and mapped.action_pattern
    return re.compile(given, re.DOTALL) if given else CODE_PATTERN


def _reader(spool: Spool, places: Sequence[Place]) -> Callable[[], Sequence[Trace]]:
    return lambda: [TRACE_ADAPTER.validate_json(spool.get(place)) for place in places]


def _described(record: object) -> str:
    if isinstance(record, dict):
        return f"an object with {', '.join(map(repr, list(record)[:6])) or 'no keys'}"
    return json_type_name(record)
