"""Which format a file or a record is in, and where in it the traces are.

A format is recognised by the names of its fields; `FORMATS` lists those that there are, in the order in which they are
tried. How the messages themselves are written is the business of `draco_ray.traces.messages`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draco_ray.records import EpisodeEnd
from draco_ray.traces.conversation import CODE, assemble, tool_texts
from draco_ray.traces.messages import AGENT, BadTrace, Entry, entries, kind
from draco_ray.traces.model import Trace, clean, identifier

Record = Mapping[str, Any]

TASK_IDS = ("task_id", "example_id", "problem_id", "instance_id", "question_id", "scenario_id")
"""Fields of a record, or of its metadata, that name its task."""
TRACE_IDS = ("trace_id", "id", "run_id", "custom_id", "session_id", "conversation_id", "uuid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How records are read, beyond their format."""

    group_by: str | None = None
    """Dotted path of what names the task; None: the format's own, or one of `TASK_IDS`, else equal prompts."""
    code: re.Pattern[str] = CODE
    """See `draco_ray.traces.conversation.assemble`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format of records."""

    name: str
    shape: str
    """What a record of it looks like, for messages."""
    recognises: Callable[[object], bool]
    read: Callable[[Any, str, Reading], Iterator[Trace]]
    """The traces of a record found at a place; BadTrace where it is not what it should be."""


def path_value(record: object, path: str) -> object:
    """What a dotted path leads to; None where nothing is there.

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


def named(record: object, names: Sequence[str]) -> str:
    """The first of these fields that holds a name or a number, of the record or of its metadata; empty: none does."""
    holders = [record]
    if isinstance(record, Mapping):
        holders += [record.get(key) for key in ("metadata", "info", "meta")]
    for holder in holders:
        for name in names:
            value = holder.get(name) if isinstance(holder, Mapping) else None
            if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
                return identifier(value)
    return ""


def task_of(record: object, reading: Reading, own: str = "") -> str:
    """What names the task of a record; empty: its prompt does.

    Raises:
        BadTrace: ``reading.group_by`` leads to nothing that can.
    """
    if reading.group_by is None:
        return own or named(record, TASK_IDS)
    value = path_value(record, reading.group_by)
    if not isinstance(value, str | int | float) or not str(value).strip():
        raise BadTrace(f"--group-by {reading.group_by}: expected text or a number there, found {kind(value)}")
    return identifier(value)


def number(value: object) -> float | None:
    """A finite number, or nothing."""
    ok = isinstance(value, int | float) and value == value and abs(value) < 1e300
    return float(value) if ok else None  # type: ignore[arg-type]


def build(
    said: Sequence[Entry],
    *,
    record: object,
    where: str,
    format_: str,
    reading: Reading,
    task_id: str = "",
    trace_id: str = "",
    instruction: str | None = None,
    tools: object = None,
    ended: EpisodeEnd | None = None,
    outcome: float | None = None,
) -> Trace:
    """A trace of a conversation.

    Raises:
        BadTrace: the agent says nothing in it.
    """
    if not any(entry.role == AGENT for entry in said):
        raise BadTrace("no turn of an agent in it (role assistant)")
    conversation = assemble(said, instruction=instruction, tools=tool_texts(tools), code=reading.code)
    return Trace(
        trace_id=trace_id or named(record, TRACE_IDS),
        task_id=task_of(record, reading, task_id),
        prompt=conversation.prompt,
        turns=conversation.turns,
        format=format_,
        source=where,
        ended=ended or conversation.ended,
        outcome=outcome,
        notes=conversation.notes,
    )


ITEM = re.compile(r"message|reasoning|item_reference|compaction|mcp_\w+|\w+_call|\w+_output")
"""Types of the items of OpenAI's responses."""


def is_messages(value: object) -> bool:
    """Whether it is a list of chat messages or items."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value[:3]))


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and ("role" in value or bool(ITEM.fullmatch(str(value.get("type")))))


def blocks(messages: object) -> Iterator[Mapping[str, Any]]:
    """Content blocks of the messages."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            yield from (part for part in content if isinstance(part, Mapping))


def _field(record: object, name: str) -> object:
    return record.get(name) if isinstance(record, Mapping) else None


# --- chat messages ---------------------------------------------------------------------------------------------------


def _messages_of(record: object) -> object:
    return record if isinstance(record, list) else _field(record, "messages")


def logged(record: object) -> object:
    """The request in a log of API calls, with its response; other records as they are."""
    request = next((r for name in ("request", "body") if isinstance(r := _field(record, name), Mapping)), None)
    if request is None or not isinstance(record, Mapping):
        return record
    response = _field(_field(record, "response"), "body") or _field(record, "response")
    output = {"output": response["output"]} if isinstance(response, Mapping) and "output" in response else {}
    return {**record, **request, "response": response, **output}


def is_anthropic(record: object) -> bool:
    """Whether a record holds Anthropic messages."""
    messages = _messages_of(record)
    own = {"tool_use", "tool_result", "thinking", "server_tool_use", "redacted_thinking"}
    has_blocks = any(str(part.get("type")) in own for part in blocks(messages))
    return is_messages(messages) and (has_blocks or (isinstance(record, Mapping) and "system" in record))


def is_chat(record: object) -> bool:
    """Whether it holds OpenAI's chat messages."""
    return (isinstance(record, Mapping) and "messages" in record) or (is_messages(record) and not is_items(record))


def read_chat(name: str) -> Callable[[Any, str, Reading], Iterator[Trace]]:
    """What reads messages, as those of the format ``name``."""

    def read(record: Any, where: str, reading: Reading) -> Iterator[Trace]:
        said = entries(_messages_of(record))
        if (system := _field(record, "system")) is not None:
            said = [*(Entry(role="system", text=each.text) for each in _loose(system)), *said]
        # A log of requests: the last turn is in the response.
        for reply in (_field(record, "response"), record):
            choice = path_value(reply, "choices.0.message")
            if isinstance(choice, Mapping):
                said += entries([choice], "choice")
                break
        reply = _field(record, "response")
        if isinstance(reply, Mapping) and reply.get("role") == AGENT:
            said += entries([reply], "response")
        yield build(
            said,
            record=record,
            where=where,
            format_=name,
            reading=reading,
            tools=_field(record, "tools") or _field(record, "functions"),
            outcome=number(_field(record, "reward")),
        )

    return read


def _loose(system: object) -> list[Entry]:
    return entries([{"role": "system", "content": system}], "system")


def is_items(record: object) -> bool:
    """Whether it holds items of OpenAI's responses."""
    items = record if isinstance(record, list) else [*_listed(record, "input"), *_listed(record, "output")]
    types = {item.get("type") for item in items if isinstance(item, Mapping) and isinstance(item.get("type"), str)}
    return (
        bool(types & {"function_call", "function_call_output", "reasoning", "custom_tool_call", "mcp_call"})
        or (isinstance(record, Mapping) and record.get("object") == "response")
        or (isinstance(record, Mapping) and "input" in record and is_messages(record.get("output")))
        or (is_messages(_field(record, "input")) and isinstance(_field(record, "output"), str | Mapping))
    )


def _listed(record: object, name: str, role: str = "user") -> list[Any]:
    value = _field(record, name)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return value if isinstance(value, list) else [value] if _is_message(value) else []


def read_items(record: Any, where: str, reading: Reading) -> Iterator[Trace]:
    """One trace of items."""
    items = record if isinstance(record, list) else [*_listed(record, "input"), *_listed(record, "output", AGENT)]
    said = entries(items, "item")
    if isinstance(told := _field(record, "instructions"), str) and told:
        said = [Entry(role="system", text=clean(told)), *said]
    stopped = path_value(record, "incomplete_details.reason") == "max_output_tokens"
    yield build(
        said,
        record=record,
        where=where,
        format_="openai-responses",
        reading=reading,
        tools=_field(record, "tools"),
        ended=EpisodeEnd.RESPONSE_LIMIT if stopped else None,
    )


# --- benchmarks ------------------------------------------------------------------------------------------------------


def is_inspect(record: object) -> bool:
    """Whether it is an Inspect log."""
    return isinstance(record, Mapping) and isinstance(record.get("eval"), Mapping) and "status" in record


def read_inspect(record: Any, where: str, reading: Reading) -> Iterator[Trace]:
    """A trace of every sample. Raises: BadTrace for a log without samples."""
    samples = record.get("samples")
    if not isinstance(samples, list) or not samples:
        raise BadTrace(f"an Inspect log without samples (status {record.get('status')!r})")
    for place, sample in enumerate(samples):
        yield from read_sample(sample, f"{where} sample {place + 1}", reading, str(record["eval"].get("task", "")))


def read_sample(sample: Any, where: str, reading: Reading, task: str) -> Iterator[Trace]:
    """The trace of one sample of an Inspect log.

    Raises:
        BadTrace: it is none.
    """
    if not isinstance(sample, Mapping):
        raise BadTrace(f"expected a sample as an object, found {kind(sample)}")
    limit = path_value(sample, "limit.type")
    ended = None
    if sample.get("error"):
        ended = EpisodeEnd.CRASHED
    elif isinstance(limit, str):
        ended = EpisodeEnd.RESPONSE_LIMIT if limit in ("token", "context") else EpisodeEnd.TURN_LIMIT
    named_ = identifier(sample.get("id", ""))
    scores = sample.get("scores")
    first = next(iter(scores.values()), None) if isinstance(scores, Mapping) and scores else None
    value = _field(first, "value")
    attached = sample.get("attachments")
    yield build(
        entries(_attached(sample.get("messages"), attached if isinstance(attached, Mapping) else {})),
        record=sample,
        where=where,
        format_="inspect",
        reading=reading,
        task_id=f"{task}/{named_}".strip("/"),
        trace_id=f"{named_}/{sample.get('epoch', 1)}",
        ended=ended,
        outcome={"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}.get(value) if isinstance(value, str) else number(value),
    )


def _attached(value: object, attachments: Mapping[str, Any]) -> object:
    """The value with what Inspect has put aside (``attachment://DIGEST``) back in its place."""
    if isinstance(value, str) and value.startswith("attachment://"):
        return attachments.get(value.removeprefix("attachment://"), value)
    if isinstance(value, list):
        return [_attached(each, attachments) for each in value]
    if isinstance(value, Mapping):
        return {key: _attached(each, attachments) for key, each in value.items()}
    return value


TAU2_ENDS = {
    "user_stop": EpisodeEnd.FINISHED,
    "agent_stop": EpisodeEnd.FINISHED,
    "max_steps": EpisodeEnd.TURN_LIMIT,
    "context_window_exceeded": EpisodeEnd.RESPONSE_LIMIT,
    "agent_error": EpisodeEnd.CRASHED,
    "infrastructure_error": EpisodeEnd.SERVER_ERROR,
}


def _is_simulation(record: object) -> bool:
    return isinstance(record, Mapping) and "termination_reason" in record and "task_id" in record


def is_tau2(record: object) -> bool:
    """Whether it holds results of tau2-bench."""
    many = isinstance(record, Mapping) and isinstance(record.get("simulations"), list) and "info" in record
    return many or _is_simulation(record)


def read_tau2(record: Any, where: str, reading: Reading) -> Iterator[Trace]:
    """A trace of every simulation."""
    simulations = [record] if _is_simulation(record) else record["simulations"]
    tasks = {str(_field(task, "id")): task for task in _listed(record, "tasks")}
    policy = path_value(record, "info.environment_info.policy")
    for place, simulation in enumerate(simulations):
        at = where if simulation is record else f"{where} simulation {place + 1}"
        if not isinstance(simulation, Mapping):
            raise BadTrace(f"{at}: expected a simulation as an object, found {kind(simulation)}")
        told = simulation.get("policy") or policy
        said = _tau2_entries(simulation.get("messages"))
        if isinstance(told, str) and told:
            said = [Entry(role="system", text=clean(told)), *said]
        task_id = identifier(simulation.get("task_id", ""))
        yield build(
            said,
            record=simulation,
            where=at,
            format_="tau2",
            reading=reading,
            task_id=task_id,
            trace_id=identifier(simulation.get("id", "")),
            instruction=_scenario(tasks.get(str(simulation.get("task_id")))),
            tools=path_value(record, "info.environment_info.tool_defs"),
            ended=TAU2_ENDS.get(str(simulation.get("termination_reason")), EpisodeEnd.UNSTATED),
            outcome=number(path_value(simulation, "reward_info.reward")),
        )


def _tau2_entries(messages: object) -> list[Entry]:
    """The simulated user has tools of its own, whose results are not the agent's."""
    if not isinstance(messages, list):
        return entries(messages)
    shown = []
    for message in messages:
        if isinstance(message, Mapping) and message.get("is_audio") and isinstance(message.get("content"), str):
            part = {"type": "audio", "data": message["content"], "media_type": "audio"}
            message = {**message, "content": [part, str(message.get("audio_script_gold") or "")]}
        if isinstance(message, Mapping) and message.get("role") == "tool":
            # Several results at once come as one message of messages.
            for each in message.get("tool_messages") or [message]:
                users = isinstance(each, Mapping) and each.get("requestor") == "user"
                role = {"role": "user's tool"} if users else {}
                error = {"error": True} if isinstance(each, Mapping) and each.get("error") else {"error": None}
                shown.append({**each, **role, **error} if isinstance(each, Mapping) else each)
        else:
            shown.append(message)
    return entries(shown)


def _scenario(task: object) -> str | None:
    """What the simulated user was told, which is the task; what it is graded by is left where it is."""
    told = path_value(task, "user_scenario.instructions")
    if not told:
        return None
    lines = (
        told
        if isinstance(told, str)
        else "\n".join(f"{k}: {v}" for k, v in told.items() if v)
        if isinstance(told, Mapping)
        else str(told)
    )
    return clean(f"What the agent's user wants and knows; the agent was not told this, only the user:\n{lines}")


def is_verifiers(record: object) -> bool:
    """Whether it is an episode or a result of verifiers."""
    if not isinstance(record, Mapping):
        return False
    episode = isinstance(record.get("traces"), list) and "task" in record
    old = "completion" in record and "prompt" in record and not isinstance(record["completion"], str)
    return episode or ("nodes" in record and "task" in record) or old


def read_verifiers(record: Any, where: str, reading: Reading) -> Iterator[Trace]:
    """Traces of an episode, or the one of a result."""
    if "completion" in record and "nodes" not in record and "traces" not in record:
        yield build(
            [*entries(record["prompt"], "prompt message"), *entries(record["completion"], "completion message")],
            record=record,
            where=where,
            format_="verifiers",
            reading=reading,
            tools=_field(record, "tools") or path_value(record, "info.oai_tools"),
            outcome=number(record.get("reward")),
        )
        return
    for place, trace in enumerate(record.get("traces", [record])):
        at = where if trace is record else f"{where} trace {place + 1}"
        if not isinstance(trace, Mapping):
            raise BadTrace(f"{at}: expected a trace as an object, found {kind(trace)}")
        yield _verifiers_trace(trace, at, reading)


def _verifiers_trace(trace: Record, where: str, reading: Reading) -> Trace:
    nodes = trace.get("nodes")
    if not isinstance(nodes, list) or not all(isinstance(node, Mapping) for node in nodes):
        raise BadTrace(f'expected "nodes" as a list of objects, found {kind(nodes)}')
    task, data = _field(trace, "task"), path_value(trace, "task.data")
    rewards = trace.get("rewards")
    scores = [each for each in rewards.values() if isinstance(each, Mapping)] if isinstance(rewards, Mapping) else []
    earned = [(number(each.get("score")) or 0.0) * (number(each.get("weight")) or 0.0) for each in scores]
    stopped = str(trace.get("stop_condition") or "")
    ended = EpisodeEnd.TURN_LIMIT if "turn" in stopped else EpisodeEnd.RESPONSE_LIMIT if "token" in stopped else None
    asked = _field(data, "prompt")
    return build(
        _walk(nodes),
        record=trace,
        where=where,
        format_="verifiers",
        reading=reading,
        task_id=identifier(_field(data, "id") or _field(task, "key") or _field(data, "idx") or ""),
        trace_id=identifier(trace.get("id", "")),
        instruction=clean(asked) if isinstance(asked, str) and not any(_said_by(n) == "user" for n in nodes) else None,
        tools=trace.get("tools"),
        ended=EpisodeEnd.CRASHED if trace.get("errors") and not trace.get("ok") else ended,
        outcome=sum(earned) if earned else None,
    )


def _said_by(node: Mapping[str, Any]) -> object:
    return _field(node.get("message"), "role")


def _walk(nodes: list[Mapping[str, Any]]) -> list[Entry]:
    """The graph's path to its last sampled node; what was sampled beside it is a sub-agent's, or was rewritten."""
    last = max((i for i, node in enumerate(nodes) if node.get("sampled")), default=len(nodes) - 1)
    path: set[int] = set()
    at: object = last
    while isinstance(at, int) and 0 <= at < len(nodes) and at not in path:
        path.add(at)
        at = nodes[at].get("parent")
    found: list[Entry] = []
    for index, node in enumerate(nodes):
        if index in path:
            found += entries([node.get("message")], f"node {index}")
        elif node.get("sampled"):
            found += other_agent(entries([node.get("message")], f"node {index}"), "agent on another branch")
    return found


def other_agent(said: Sequence[Entry], name: str) -> list[Entry]:
    """Turns of somebody else's than the agent that is judged, as gaps under their own name."""
    return [Entry(role=name, text=each.text, calls=each.calls) for each in said if each.role == AGENT]
