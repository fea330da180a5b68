"""Logs of benchmarks and training frameworks: Inspect, tau2-bench, verifiers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from draco_ray.records import EpisodeEnd
from draco_ray.traces.entry import AGENT, EARLIER_AGENT, BadTrace, Entry, json_type_name
from draco_ray.traces.formats import ReadOptions, Record, build_trace, get_field, number, path_value, register_format
from draco_ray.traces.messages import entries
from draco_ray.traces.model import Trace, escape_surrogates, printable_id


def is_inspect(record: object) -> bool:
    """Whether the record is an Inspect log."""
    return isinstance(record, Mapping) and isinstance(record.get("eval"), Mapping) and "status" in record


@register_format("inspect", 'an Inspect log: an object with "eval", "status" and "samples"', is_inspect, metered=False)
def read_inspect(record: Any, reading: ReadOptions) -> Iterator[Trace]:
    """A trace of every sample. Raises: BadTrace for a log without samples."""
    samples = record.get("samples")
    if not isinstance(samples, list) or not samples:
        raise BadTrace(f"an Inspect log without samples (status {record.get('status')!r})")
    for sample in samples:
        yield _inspect_sample(sample, reading, str(record["eval"].get("task", "")))


def _inspect_sample(sample: Any, reading: ReadOptions, task: str) -> Trace:
    if not isinstance(sample, Mapping):
        raise BadTrace(f"expected a sample as an object, found {json_type_name(sample)}")
    limit = path_value(sample, "limit.type")
    ended = None
    if sample.get("error"):
        ended = EpisodeEnd.CRASHED
    elif isinstance(limit, str):
        ended = EpisodeEnd.RESPONSE_LIMIT if limit in ("token", "context") else EpisodeEnd.TURN_LIMIT
    named_ = printable_id(sample.get("id", ""))
    scores = sample.get("scores")
    first = next(iter(scores.values()), None) if isinstance(scores, Mapping) and scores else None
    value = get_field(first, "value")
    attached = sample.get("attachments")
    return build_trace(
        entries(_attached(sample.get("messages"), attached if isinstance(attached, Mapping) else {})),
        sample,
        reading,
        task_id=f"{task}/{named_}".strip("/"),
        trace_id=f"{named_}/{sample.get('epoch', 1)}",
        ended=ended,
        outcome={"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}.get(value) if isinstance(value, str) else number(value),
    )


def _attached(value: object, attachments: Mapping[str, Any]) -> object:
    """The value with Inspect's attachments (``attachment://DIGEST``) resolved."""
    if isinstance(value, str) and value.startswith("attachment://"):
        return attachments.get(value.removeprefix("attachment://"), value)
    if isinstance(value, list):
        return [_attached(each, attachments) for each in value]
    if isinstance(value, Mapping):
        return {key: _attached(each, attachments) for key, each in value.items()}
    return value


TAU2_GREETING = "Hi! How can I help you today?"
"""The agent's first message in every simulation, which tau2-bench writes itself."""
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
    """Whether the record contains results of tau2-bench."""
    many = isinstance(record, Mapping) and isinstance(record.get("simulations"), list) and "info" in record
    return many or _is_simulation(record)


@register_format("tau2", 'results of tau2-bench: an object with "info" and "simulations"', is_tau2, metered=False)
def read_tau2(record: Any, reading: ReadOptions) -> Iterator[Trace]:
    """A trace of every simulation."""
    simulations = [record] if _is_simulation(record) else record["simulations"]
    tasks = {str(get_field(task, "id")): task for task in get_field(record, "tasks") or ()}
    policy = path_value(record, "info.environment_info.policy")
    domain = str(path_value(record, "info.environment_info.domain_name") or "")
    for simulation in simulations:
        if not isinstance(simulation, Mapping):
            raise BadTrace(f"expected a simulation as an object, found {json_type_name(simulation)}")
        told = simulation.get("policy") or policy
        said = _tau2_entries(simulation.get("messages"))
        if isinstance(told, str) and told:
            said = [Entry(role="system", text=escape_surrogates(told)), *said]
        task_id = printable_id(f"{domain}/{simulation.get('task_id', '')}".strip("/"))
        trace = build_trace(
            said,
            simulation,
            reading,
            task_id=task_id,
            trace_id=printable_id(simulation.get("id", "")),
            instruction=_scenario(tasks.get(str(simulation.get("task_id")))),
            tools=path_value(record, "info.environment_info.tool_defs"),
            ended=TAU2_ENDS.get(str(simulation.get("termination_reason")), EpisodeEnd.UNSTATED),
            outcome=number(path_value(simulation, "reward_info.reward")),
        )
        first, *rest = trace.turns
        if first.text == TAU2_GREETING:
            trace = replace(trace, turns=(replace(first, role=EARLIER_AGENT, message=False), *rest))
        yield trace


def _tau2_entries(messages: object) -> list[Entry]:
    """Entries of a simulation; results of the simulated user's own tools are not the agent's and get another role."""
    if not isinstance(messages, list):
        return entries(messages)
    shown = []
    for message in messages:
        if isinstance(message, Mapping) and message.get("is_audio") and isinstance(message.get("content"), str):
            part = {"type": "audio", "data": message["content"], "media_type": "audio"}
            message = {**message, "content": [part, str(message.get("audio_script_gold") or "")]}
        if isinstance(message, Mapping) and message.get("role") == "tool":
            # Several results may be stored in one message as a list of messages.
            for each in message.get("tool_messages") or [message]:
                users = isinstance(each, Mapping) and each.get("requestor") == "user"
                role = {"role": "user's tool"} if users else {}
                error = {"error": True} if isinstance(each, Mapping) and each.get("error") else {"error": None}
                shown.append({**each, **role, **error} if isinstance(each, Mapping) else each)
        else:
            shown.append(message)
    return entries(shown)


def _scenario(task: object) -> str | None:
    """The simulated user's instructions, which serve as the task; the grading criteria are not read."""
    told = path_value(task, "user_scenario.instructions")
    if not told:
        return None
    lines = "\n".join(f"{k}: {v}" for k, v in told.items() if v) if isinstance(told, Mapping) else str(told)
    return escape_surrogates(
        f"What the agent's user wants and knows; the agent was not told this, only the user:\n{lines}"
    )


def is_verifiers(record: object) -> bool:
    """Whether the record is an episode or a result of verifiers."""
    if not isinstance(record, Mapping):
        return False
    episode = isinstance(record.get("traces"), list) and "task" in record
    old = "completion" in record and "prompt" in record and not isinstance(record["completion"], str)
    return episode or ("nodes" in record and "task" in record) or old


@register_format(
    "verifiers",
    'an episode of verifiers ("task", "traces" with "nodes") or an object with "prompt" and "completion"',
    is_verifiers,
    metered=False,
)
def read_verifiers(record: Any, reading: ReadOptions) -> Iterator[Trace]:
    """The traces of an episode, or the single trace of a result."""
    if "completion" in record and "nodes" not in record and "traces" not in record:
        environment, example = get_field(record, "task"), get_field(record, "example_id")
        own = f"{environment}/{example}" if isinstance(environment, str) and example is not None else ""
        yield build_trace(
            [
                *map(_earlier, entries(record["prompt"], "prompt message")),
                *entries(record["completion"], "completion message"),
            ],
            record,
            reading,
            task_id=printable_id(own),
            tools=get_field(record, "tools") or path_value(record, "info.oai_tools"),
            outcome=number(record.get("reward")),
        )
        return
    for trace in record.get("traces", [record]):
        if not isinstance(trace, Mapping):
            raise BadTrace(f"expected a trace as an object, found {json_type_name(trace)}")
        yield _verifiers_trace(trace, reading)


def _verifiers_trace(trace: Record, reading: ReadOptions) -> Trace:
    nodes = trace.get("nodes")
    if not isinstance(nodes, list) or not all(isinstance(node, Mapping) for node in nodes):
        raise BadTrace(f'expected "nodes" as a list of objects, found {json_type_name(nodes)}')
    task, data = get_field(trace, "task"), path_value(trace, "task.data")
    rewards = trace.get("rewards")
    scores = [each for each in rewards.values() if isinstance(each, Mapping)] if isinstance(rewards, Mapping) else []
    earned = [(number(each.get("score")) or 0.0) * (number(each.get("weight")) or 0.0) for each in scores]
    stopped = str(trace.get("stop_condition") or "")
    ended = EpisodeEnd.TURN_LIMIT if "turn" in stopped else EpisodeEnd.RESPONSE_LIMIT if "token" in stopped else None
    asked = get_field(data, "prompt")
    number_ = next(
        (each for each in (get_field(data, "id"), get_field(task, "key"), get_field(data, "idx")) if each is not None),
        None,
    )
    environment = None if number_ is None else get_field(task, "environment") or get_field(trace, "environment")
    return build_trace(
        _walk(nodes),
        trace,
        reading,
        task_id=printable_id("/".join(str(each) for each in (environment, number_) if each not in (None, ""))),
        trace_id=printable_id(trace.get("id", "")),
        instruction=escape_surrogates(asked)
        if isinstance(asked, str) and not any(_said_by(n) == "user" for n in nodes)
        else None,
        tools=trace.get("tools"),
        ended=EpisodeEnd.CRASHED if trace.get("errors") and not trace.get("ok") else ended,
        outcome=sum(earned) if earned else None,
    )


def _said_by(node: Mapping[str, Any]) -> object:
    return get_field(node.get("message"), "role")


def _walk(nodes: list[Mapping[str, Any]]) -> list[Entry]:
    """Entries on the path to the last sampled node; other sampled nodes belong to sub-agents or were rewritten."""
    last = max((i for i, node in enumerate(nodes) if node.get("sampled")), default=len(nodes) - 1)
    path: set[int] = set()
    at: object = last
    while isinstance(at, int) and 0 <= at < len(nodes) and at not in path:
        path.add(at)
        at = nodes[at].get("parent")
    found: list[Entry] = []
    stated = any(node.get("sampled") for node in nodes)
    for index, node in enumerate(nodes):
        if index in path:
            said = entries([node.get("message")], f"node {index}")
            found += map(_earlier, said) if stated and not node.get("sampled") else said
        elif node.get("sampled"):
            found += other_agent(entries([node.get("message")], f"node {index}"), "agent on another branch")
    return found


def _earlier(entry: Entry) -> Entry:
    return replace(entry, role=EARLIER_AGENT) if entry.role == AGENT else entry


def other_agent(said: Sequence[Entry], name: str) -> list[Entry]:
    """The turns of an agent that is not judged. They get the role ``name``, which makes them gaps, not steps."""
    return [Entry(role=name, text=each.text, calls=each.calls) for each in said if each.role == AGENT]
