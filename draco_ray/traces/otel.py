"""OpenTelemetry spans of generative AI: OTLP JSON from collectors, and exports of Langfuse, Phoenix and MLflow.

Every model call is a span with the conversation so far and the model's answer. A trace is assembled from the spans with
the same ``gen_ai.conversation.id`` (or else trace id): the new part of each span's input, then its output. Spans below
an ``invoke_agent`` span other than the first belong to a sub-agent, unless it took over the conversation (a handoff).

=======================  ===========================================================================================
convention               location of the messages
=======================  ===========================================================================================
GenAI, current           ``gen_ai.input.messages``, ``gen_ai.output.messages``, ``gen_ai.system_instructions``, as
                         attributes or on the event ``gen_ai.client.inference.operation.details``
GenAI, earlier           events ``gen_ai.user.message``, ``gen_ai.assistant.message``, ..., ``gen_ai.choice``
OpenLLMetry              ``gen_ai.prompt.0.role``, ``gen_ai.completion.0.content``, ...
OpenInference (Phoenix)  ``llm.input_messages.0.message.role``, ...; else ``input.value``, ``output.value``
Vercel AI SDK            ``ai.prompt.messages``, ``ai.response.text``, ``ai.response.toolCalls``
Langfuse, MLflow         ``langfuse.observation.input``, ``mlflow.spanInputs``, ...
=======================  ===========================================================================================

If no later input repeats a tool's result, it is taken from an ``execute_tool`` span.

Spans are in OTLP's lists (``resourceSpans``, Tempo's ``batches``), in ``data.spans`` (MLflow, Jaeger), in ``data``
(Phoenix's API), in ``observations`` (Langfuse), or each is a record. Rows of Phoenix's table and observations of
Langfuse have other field names and are converted to spans.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from draco_ray.traces.calls import SUB_AGENT, ModelCall, continues_conversation, main_conversation
from draco_ray.traces.entry import (
    AGENT,
    BadTrace,
    Entry,
    ToolCall,
    compact_json,
    decode_if_json,
    first_of,
    json_type_name,
    object_of,
)
from draco_ray.traces.formats import ReadOptions, build_trace, get_field, number, path_value, register_format
from draco_ray.traces.messages import ANSWER_FIELDS, entries, is_message, reply_entries
from draco_ray.traces.model import Trace, printable_id
from draco_ray.traces.model_request import TOOLS, first_path_value, request_entries
from draco_ray.traces.parts import result_text

Span = dict[str, Any]
CALL_SPANS = ("chat", "text_completion", "generate_content", "llm", "generation", "chat_model")
AGENT_SPANS = ("invoke_agent", "agent")
INPUT_ATTRIBUTES = (
    "gen_ai.input.messages",
    "ai.prompt.messages",
    "langfuse.observation.input",
    "mlflow.spanInputs",
    "input.value",
)
OUTPUT_ATTRIBUTES = (
    "gen_ai.output.messages",
    "langfuse.observation.output",
    "mlflow.spanOutputs",
    "output.value",
)
FLAT_INPUTS = ("llm.input_messages", "gen_ai.prompt")
FLAT_OUTPUTS = ("llm.output_messages", "gen_ai.completion")
TOOL_LISTS = ("gen_ai.tool.definitions", "mlflow.chat.tools", "ai.prompt.tools")
AI_SDK = ("text", "object", "toolCalls", "reasoning")
"""Parts of an answer in the attributes of Vercel's AI SDK."""
OUTPUT_TOKENS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion")
TASK_ATTRIBUTES = ("draco.task_id", "gen_ai.task.id", "task_id", "langfuse.trace.metadata.task_id", "metadata.task_id")


LOG_FIELDS = ("resourceLogs", "scopeLogs", "logRecords")
"""OTLP's lists of events, which have the fields of a span."""
OTLP = ("resourceSpans", "resource_spans", "batches", "scopeSpans", "scope_spans", *LOG_FIELDS)
HOLDERS = (*OTLP, "spans", "observations", "data", "traces", "trace")
"""Fields of exports that contain spans."""
MAX_DEPTH = 8
KIND_ATTRIBUTES = (
    *("gen_ai.operation.name", "openinference.span.kind", "langfuse.observation.type", "mlflow.spanType"),
    "traceloop.span.kind",
)
"""Attributes with the kind of a span."""
TOOL_CALL_IDS = ("gen_ai.tool.call.id", "tool_call.id", "ai.toolCall.id")
TOOL_NAMES = ("gen_ai.tool.name", "tool.name", "ai.toolCall.name", "traceloop.entity.name")
TOOL_ARGUMENTS = ("gen_ai.tool.call.arguments", *INPUT_ATTRIBUTES[2:], "ai.toolCall.args", "traceloop.entity.input")
TOOL_RESULTS = ("gen_ai.tool.call.result", *OUTPUT_ATTRIBUTES[1:], "ai.toolCall.result", "traceloop.entity.output")


def is_otel(record: object) -> bool:
    """Whether the record is an export of spans, or a span."""
    if isinstance(record, Mapping) and any(name in record for name in OTLP):
        return True
    try:
        return _is_span(next(_below(record), None))
    except BadTrace:
        return False


def _is_span(record: object) -> bool:
    if not isinstance(record, Mapping):
        return False
    own = "attributes" in record and any(name in record for name in ("spanId", "span_id", "context", "traceId"))
    return own or "context.span_id" in record or {"traceID", "tags"} <= record.keys() or _is_row(record)


def _is_row(record: Mapping[str, Any]) -> bool:
    """Whether the record is an observation of Langfuse, a row of Braintrust, or a span of OpenAI's Agents SDK."""
    observed = {"id", "type"} <= record.keys() and bool(
        {"parentObservationId", "parent_observation_id"} & record.keys()
    )
    return (
        observed or {"span_attributes", "span_id"} <= record.keys() or record.get("object") in ("trace", "trace.span")
    )


def parse_spans(record: Any) -> list[Span]:
    """The spans of an export, in a common form: flat attributes, names as in OTLP.

    Raises:
        BadTrace: the export contains no spans, or something other than spans; then none of it is used, since a trace
            without some of its spans would be misread.
    """
    if not (found := [_span(each) for each in _below(record)]):
        raise BadTrace("the export contains no spans")
    if not all(span["trace"] or span["id"] or span["attributes"] for span in found):
        raise BadTrace("expected spans, found an object without ids and attributes")
    return found


def _below(node: object, name: str = "", depth: int = 0) -> Iterator[Any]:
    """The spans in an export at any depth; ``name`` is the field that contains the node."""
    holder = None if not isinstance(node, Mapping) or _is_span(node) else next((h for h in HOLDERS if h in node), None)
    if depth > MAX_DEPTH:
        raise BadTrace("expected a list of spans, found lists of lists")
    if isinstance(node, list):
        for each in node:
            yield from _below(each, name, depth + 1)
    elif isinstance(node, Mapping) and holder is not None:
        value = _json(node[holder])
        if value is not None and not isinstance(value, list | Mapping):
            raise BadTrace(f'expected "{holder}" as a list, found {json_type_name(value)}')
        for span in _below([] if value is None else value, holder, depth + 1):
            # Langfuse stores data of the trace beside its observations.
            observed = holder == "observations" and isinstance(span, dict)
            yield {**span, "trace": node.get("trace", node)} if observed else span
    elif name in ("spans", "observations") or _is_span(node):
        yield node
    elif name not in OTLP or not isinstance(node, Mapping):
        raise BadTrace(f"expected spans, found {json_type_name(node)}")


def _renamed(span: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of Phoenix's table, or one that `_is_row` recognises, converted to a span."""
    if "context.span_id" in span:
        named = {key: value for key, value in span.items() if value is not None}
        attributes = {key.removeprefix("attributes."): named[key] for key in named if key.startswith("attributes.")}
        context = {key: span.get(f"context.{key}") for key in ("trace_id", "span_id")}
        return {**span, "attributes": attributes, "context": context}
    if "attributes" in span or not _is_row(span):
        return span
    said = object_of(span, "span_data") or {**span, **object_of(span, "span_attributes")}
    kinds = {"type": "tool" if said.get("type") == "function" else said.get("type")}
    usage = _json(first_of(span, "usageDetails", "usage_details", "usage"))
    return {
        "traceId": first_of(span, "traceId", "trace_id", "root_span_id", "id"),
        "spanId": first_of(span, "span_id", "id"),
        "parentSpanId": first_of(span, "parentObservationId", "parent_observation_id", "parent_id")
        or path_value(span, "span_parents.0"),
        "name": said.get("name"),
        "start_time": first_of(span, "startTime", "start_time", "started_at", "created"),
        "attributes": {
            **{f"langfuse.observation.{key}": {**said, **kinds}.get(key) for key in ("type", "input", "output")},
            "langfuse.trace.metadata": path_value(span, "trace.metadata"),
            "metadata": _json(span.get("metadata")),
            "gen_ai.usage.output_tokens": path_value(usage, "output"),
        },
    }


def _span(span: object) -> Span:
    if not isinstance(span, Mapping):
        raise BadTrace(f"expected a span as an object, found {json_type_name(span)}")
    span = _renamed(span)
    attributes = _attributes(span.get("attributes", span.get("tags")))
    # Logfire writes the events as an attribute.
    written = _json(attributes.get("events"))
    events = [(str(get_field(each, "event.name")), each) for each in written] if isinstance(written, list) else []
    for event in span.get("events") or span.get("logs") or ():
        more = _attributes(first_of(event, "attributes", "fields")) if isinstance(event, Mapping) else {}
        events.append((str(get_field(event, "name") or more.get("event", "")), more))
    for name, more in events:
        if name == "gen_ai.client.inference.operation.details":
            attributes = more | attributes
    parents = ("parentSpanId", "parent_span_id", "parent_id")
    times = ("startTimeUnixNano", "start_time_unix_nano", "start_time", "timeUnixNano", "startTime")
    return {
        "trace": str(first_of(span, "traceId", "trace_id", "traceID") or path_value(span, "context.trace_id") or ""),
        "id": str(first_of(span, "spanId", "span_id", "spanID") or path_value(span, "context.span_id") or ""),
        # Jaeger stores the parent's id in `references`.
        "parent": str(first_of(span, *parents) or path_value(span, "references.0.spanID") or ""),
        "name": str(first_of(span, "name", "operationName") or ""),
        "at": _time(first_of(span, *times)),
        "attributes": attributes,
        "events": [event for event in events if event[0].startswith("gen_ai.")],
    }


def _time(value: object) -> str:
    """A time as sortable text: nanoseconds since 1970, padded; other text stays as it is."""
    text = str(value or "")
    whole, point, rest = text.partition(".")
    if not whole.isdigit():
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            return text
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        whole, point, rest = str((at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000), "", ""
    return f"{whole.zfill(24)}{point}{rest}"


def _attributes(attributes: object) -> dict[str, Any]:
    """Attributes as a flat mapping, from OTLP's list of keys with typed values or from a flat or nested mapping."""
    found: dict[str, Any] = {}
    if isinstance(attributes, list):
        for each in attributes:
            if isinstance(each, Mapping) and isinstance(each.get("key"), str):
                found[each["key"]] = _value(each.get("value"))
    elif isinstance(attributes, Mapping):
        _flatten("", attributes, found)
    return found


def _flatten(prefix: str, tree: Mapping[str, Any], found: dict[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" not in (*INPUT_ATTRIBUTES, *OUTPUT_ATTRIBUTES):
            _flatten(f"{prefix}{key}.", value, found)
        elif isinstance(value, list) and f"{prefix}{key}".startswith((*FLAT_INPUTS, *FLAT_OUTPUTS)):
            _flatten(f"{prefix}{key}.", {str(i): each for i, each in enumerate(value)}, found)
        else:
            found[f"{prefix}{key}"] = value


def _value(value: object) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "arrayValue" in value:
        return [_value(each) for each in path_value(value, "arrayValue.values") or ()]
    if "kvlistValue" in value:
        return _attributes(path_value(value, "kvlistValue.values"))
    return next(iter(value.values()), None)


CONVERSATION_ID = "gen_ai.conversation.id"
SESSIONS = (CONVERSATION_ID, "session.id", "langfuse.session.id")


def session(span: Span, file: str) -> tuple[str, ...]:
    """Names of a span's session: its trace id, and its conversation or session id."""
    attributes = span["attributes"]
    named = [attributes[name] for name in SESSIONS if isinstance(attributes.get(name), str) and attributes[name]]
    return (str(span["trace"]), *named[:1])


@register_format(
    "otel", 'OTLP JSON: an object with "resourceSpans"', is_otel, split=parse_spans, session=session, metered=False
)
def read(spans_: Any, reading: ReadOptions) -> Iterator[Trace]:
    """The traces of the spans of a session. Raises: BadTrace if no span contains messages."""
    ordered = sorted(spans_, key=lambda span: str(span["at"]))
    named = _named(ordered)
    groups = list(named.items())
    if not named:
        unnamed = _conversations(ordered)
        groups = [(session(each[0], "")[-1 if len(unnamed) == 1 else 0], each) for each in unnamed]
    for name, group in groups:
        yield _trace(group, printable_id(name), replace(reading, where=f"{reading.where} trace {printable_id(name)}"))


def _named(ordered: list[Span]) -> dict[str, list[Span]]:
    """The spans by conversation. A span without a conversation id belongs to the conversation of an ancestor, or to the
    only conversation below its nearest ancestor."""
    by_id = {span["id"]: span for span in ordered}
    above: dict[str, list[str]] = {}
    around: dict[str, set[str]] = {}
    for span in ordered:
        at, above[span["id"]] = span, [span["id"]]
        while at["parent"] in by_id and at["parent"] not in above[span["id"]]:
            at = by_id[at["parent"]]
            above[span["id"]].append(at["id"])
        if name := span["attributes"].get(CONVERSATION_ID):
            for each in (*above[span["id"]], span["trace"]):
                around.setdefault(each, set()).add(str(name))
    found: dict[str, list[Span]] = {}
    for span in ordered:
        own = [str(name) for each in above[span["id"]] if (name := by_id[each]["attributes"].get(CONVERSATION_ID))]
        alone = (next(iter(around[e])) for e in (*above[span["id"]], span["trace"]) if len(around.get(e, ())) == 1)
        if around:
            found.setdefault(next(iter(own), None) or next(alone, str(span["trace"])), []).append(span)
    return {name: group for name, group in found.items() if len(found) == 1 or _model_calls(group)}


def _conversations(ordered: list[Span]) -> list[list[Span]]:
    """The spans by trace; traces of one session are joined if the later one repeats messages of the earlier one."""
    by_trace: dict[str, list[Span]] = {}
    for span in ordered:
        by_trace.setdefault(str(span["trace"]), []).append(span)
    found: list[tuple[list[Span], list[Entry]]] = []
    for group in by_trace.values():
        calls = [call for _, call in _model_calls(group)]
        place = next(
            (n for n, (_, said) in enumerate(found) if any(continues_conversation(said, c.inputs) for c in calls)), None
        )
        joined = group if place is None else [*found[place][0], *group]
        end = len(found) if place is None else place
        found[end : end + 1] = [(joined, main_conversation([call for _, call in _model_calls(joined)]))]
    return [group for group, _ in found]


def _model_calls(of_trace: list[Span]) -> list[tuple[Span, ModelCall]]:
    """The spans that are model calls, or, if there are none, those of agents.

    If two such spans are parent and child, the parent is left out, because it may repeat the child's messages.
    """
    for of_agents in (False, True):
        said = []
        for span in of_trace:
            if (found := _said(span, of_agents)) is not None:
                inputs, outputs = found
                if of_agents and not any(entry.calls for entry in inputs + outputs):
                    outputs = [*_used(span, of_trace), *outputs]
                said.append((span, ModelCall(inputs=inputs, outputs=outputs)))
        parents = {span["parent"] for span, _ in said}
        if said:
            return [each for each in said if each[0]["id"] not in parents] or said
    return []


def _trace(of_trace: list[Span], trace_id: str, reading: ReadOptions) -> Trace:
    calls = _model_calls(of_trace)
    if not calls:
        raise BadTrace(
            f"none of the {len(of_trace)} spans contains messages (gen_ai.input.messages, gen_ai.output.messages); "
            "enable the capture of message content in the program that records them"
        )
    by_id = {span["id"]: span for span in of_trace}
    main = _agent(calls[0][0], by_id)
    agents, said = {main}, calls[0][1].outputs
    own: list[ModelCall] = []
    for span, call in calls:
        agent = _agent(span, by_id)
        if agent and _around(agent, by_id) == _around(main, by_id) and continues_conversation(said, call.inputs):
            # A handoff: another agent continues the conversation, and the same agent or tool started both agents.
            # A model call that belongs to no agent is not a handoff; it may, for example, generate a title.
            agents.add(agent)
        if agent in agents:
            said = call.inputs + call.outputs
        own.append(call if agent in agents else _of_sub_agent(call, agent, by_id))
    return build_trace(
        _with_results(main_conversation(own), of_trace),
        _record(of_trace),
        reading,
        task_id=_task(of_trace),
        trace_id=trace_id,
        tools=next((tools for span, _ in calls if (tools := _tools(span["attributes"]))), None),
    )


def _tools(attributes: Mapping[str, Any]) -> Any:
    """The tools that a model call declares, in an attribute or in its input."""
    for name in (*TOOL_LISTS, "llm.invocation_parameters", *INPUT_ATTRIBUTES):
        value = _json(attributes.get(name))
        value = _json(first_path_value([value, get_field(value, "kwargs")], TOOLS)) if name not in TOOL_LISTS else value
        if isinstance(value, list) and value:
            return value
    numbered = _numbered(_tree(attributes, "llm.tools."))
    return [_json(path_value(each, "tool.json_schema")) for _, each in numbered]


def _of_sub_agent(call: ModelCall, agent: str, by_id: Mapping[str, Span]) -> ModelCall:
    """A sub-agent's call: its outputs, with the sub-agent's name as role."""
    name = str(by_id[agent]["attributes"].get("gen_ai.agent.name") or "") if agent in by_id else ""
    said = [Entry(role=f"{SUB_AGENT} {name}".strip(), text=e.text, calls=e.calls) for e in call.outputs]
    return ModelCall(inputs=[], outputs=[each for each in said if each.text or each.calls], sub_agent=True)


def _record(of_trace: list[Span]) -> dict[str, Any]:
    """The attributes of all spans for ``--group-by``; the first span takes precedence."""
    merged: dict[str, Any] = {}
    for span in reversed(of_trace):
        merged |= span["attributes"]
    return _tree(merged)


def _tree(attributes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted attributes as nested objects; only those below a prefix."""
    tree: dict[str, Any] = {}
    for key, value in attributes.items():
        if key.startswith(prefix):
            node = tree
            *path, leaf = key.removeprefix(prefix).split(".")
            for part in path:
                below = node.setdefault(part, {})
                node = below if isinstance(below, dict) else {}
            node[leaf] = value
    return tree


def _task(of_trace: list[Span]) -> str:
    for span in of_trace:
        for name in TASK_ATTRIBUTES:
            if (value := span["attributes"].get(name)) is not None and str(value).strip():
                return printable_id(value)
    return ""


def _kind(span: Span) -> str:
    """The kind of a span in lower case; empty if not stated."""
    attributes = span["attributes"]
    return next((str(attributes[name]).strip('"').casefold() for name in KIND_ATTRIBUTES if attributes.get(name)), "")


def _agent(span: Span, by_id: Mapping[str, Span]) -> str:
    """The id of the nearest ``invoke_agent`` span above a call; empty if there is none."""
    return next((str(each["id"]) for each in _above(span, by_id) if _kind(each) in AGENT_SPANS), "")


def _around(agent: str, by_id: Mapping[str, Span]) -> str:
    """The id of the agent or tool that started an agent; empty if there is none."""
    above = _above(by_id[agent], by_id) if agent else ()
    return next((str(each["id"]) for each in above if _kind(each) in AGENT_SPANS or _is_tool(each)), "")


def _above(span: Span, by_id: Mapping[str, Span]) -> Iterator[Span]:
    """The spans above a span, the nearest first."""
    seen = set()
    while span["parent"] in by_id and span["parent"] not in seen:
        span = by_id[span["parent"]]
        seen.add(span["id"])
        yield span


def _said(span: Span, of_agents: bool) -> tuple[list[Entry], list[Entry]] | None:
    """Input and output of a model call, or of an agent's span (``of_agents``); None for other spans."""
    attributes = span["attributes"]
    if _kind(span) not in ("", *(AGENT_SPANS if of_agents else CALL_SPANS)):
        return None
    stated = _kind(span) != ""
    outputs = _messages(attributes, OUTPUT_ATTRIBUTES, FLAT_OUTPUTS, AGENT, stated) or _choices(span)
    outputs = outputs or _of_ai_sdk(attributes, of_agents)
    if not outputs:
        return None
    # `ai.prompt` is not in `INPUT_ATTRIBUTES`: with nested attributes, it may hold `ai.prompt.messages` instead.
    inputs = _messages(attributes, (*INPUT_ATTRIBUTES, "ai.prompt"), FLAT_INPUTS, "user", stated) or _earlier(span)
    system = _json(attributes.get("gen_ai.system_instructions"))
    if system:
        parts = system if isinstance(system, list | str) else [system]
        inputs = entries([{"role": "system", "parts": parts}]) + inputs
    tokens = _tokens(attributes)
    if tokens > 0 and [entry.role for entry in outputs] == [AGENT]:
        outputs = [replace(outputs[0], tokens=tokens)]
    return inputs, outputs


def _tokens(attributes: Mapping[str, Any]) -> int:
    """Number of tokens that the model wrote; 0 if the span does not state it."""
    for name in OUTPUT_TOKENS:
        value = attributes.get(name)
        # OTLP writes 64-bit integers as text; tables store them as floats.
        count = number(int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else value)
        if count is not None:
            return int(count)
    return 0


def _messages(
    attributes: Mapping[str, Any], names: tuple[str, ...], flat: tuple[str, ...], role: str, stated: bool = False
) -> list[Entry]:
    """The messages in the first of these attributes of a span that contains any.

    Args:
        names: attributes with a value that contains messages.
        flat: prefixes of messages that were flattened into several attributes; tried first.
        role: the role of a text or an object without one.
        stated: whether the span is known to be a model call or an agent. If so, an object that is not a message is the
            text of the input or of the answer.
    """
    for prefix in flat:
        if messages := _flat_messages(attributes, prefix):
            return entries(messages)
    for name in names:
        said = value = _json(attributes.get(name))
        several = isinstance(value, list) and len(value) > 1 and all(isinstance(each, str) for each in value)
        found = request_entries(value) if role != AGENT else [] if several else reply_entries(value)
        if any(each.role in (role, "tool", "user") for each in found):
            return found
        blocked = role == AGENT and isinstance(value, Mapping) and value.keys() & set(ANSWER_FIELDS)
        if not value or blocked or (isinstance(value, str) and not value.strip()):
            # Nothing was said, for example because the answer was blocked.
            continue
        if stated and role == AGENT:
            return [Entry(role=AGENT, text=compact_json(said))]
        for path in ("messages", "choices", "input", "output") if role == AGENT else ("messages", "input"):
            if isinstance(value, Mapping) and isinstance(value.get(path), list):
                value = value[path]
        if isinstance(value, Mapping):
            value = [value]
        if isinstance(value, list) and value:
            # LangChain's callbacks record a list of conversations, with a single one in it.
            value = value[0] if isinstance(path_value(value, "0.0"), Mapping) else value
            unwrapped = [object_of(each, "message") or each if isinstance(each, Mapping) else each for each in value]
            if stated and not any(isinstance(each, str) or is_message(each) for each in unwrapped):
                return [Entry(role=role, text=compact_json(said))]
            return entries([e if isinstance(e, Mapping) else {"role": role, "content": e} for e in unwrapped])
        if isinstance(value, str) and value:
            return entries([{"role": role, "content": value}])
    return []


def _flat_messages(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """Messages that were flattened into attributes with numbers in their names."""
    tree = _tree(attributes, f"{prefix}.")
    found = []
    for index in sorted((key for key in tree if key.isdigit()), key=int):
        message = tree[index].get("message", tree[index]) if isinstance(tree[index], dict) else {}
        calls = [call.get("tool_call", call) for _, call in _numbered(message.get("tool_calls"))]
        parts = [part.get("message_content", part) for _, part in _numbered(message.get("contents"))]
        role = message.get("role", "user")
        # OpenLLMetry may store a prompt's text in a field with the name of the role.
        content = message.get("content", parts or message.get(role))
        named, arguments = message.get("function_call_name"), message.get("function_call_arguments_json")
        called = {"name": named, "arguments": arguments}
        found.append({"function_call": called, **message, "content": content, "tool_calls": calls, "role": role})
    return found


def _numbered(tree: object) -> list[tuple[int, Any]]:
    if not isinstance(tree, Mapping):
        return []
    return sorted((int(key), value) for key, value in tree.items() if str(key).isdigit() and isinstance(value, Mapping))


def _earlier(span: Span) -> list[Entry]:
    """The input, from events of the earlier GenAI conventions."""
    found: list[Entry] = []
    for name, attributes in span["events"]:
        role = name.removeprefix("gen_ai.").removesuffix(".message")
        if name == "gen_ai.content.prompt":
            found += _messages(attributes, ("gen_ai.prompt",), (), "user")
        elif name.endswith(".message"):
            content = attributes.get("content", attributes.get("gen_ai.prompt"))
            calls = _json(attributes.get("tool_calls")) or []
            found += entries([{**attributes, "role": role, "content": _json(content), "tool_calls": calls}])
    return found


def _choices(span: Span) -> list[Entry]:
    for name, attributes in span["events"]:
        if name == "gen_ai.content.completion":
            return _messages(attributes, ("gen_ai.completion",), (), AGENT)
        if name == "gen_ai.choice":
            message = _json(attributes.get("message")) or attributes
            message = message if isinstance(message, Mapping) else {"content": message}
            return entries([{**message, "role": AGENT}])
    return []


def _of_ai_sdk(attributes: Mapping[str, Any], of_agents: bool) -> list[Entry]:
    # The span around all calls of a conversation has only the first prompt (`ai.prompt`) and the last answer.
    if "ai.prompt.messages" not in attributes and not (of_agents and "ai.prompt" in attributes):
        return []
    # Version 3 of the AI SDK has the names `ai.result.*`.
    said = {key: attributes.get(f"ai.response.{key}") or attributes.get(f"ai.result.{key}") for key in AI_SDK}
    message = {"content": said["text"] or said["object"], "tool_calls": _json(said["toolCalls"]) or ()}
    return entries([{**message, "role": AGENT, "reasoning": said["reasoning"]}]) if any(said.values()) else []


def _json(value: object) -> Any:
    return decode_if_json(value, '[{"')


def _with_results(known: list[Entry], of_trace: list[Span]) -> list[Entry]:
    """The conversation, completed by results that are only in tool spans."""
    answered = {entry.call_id for entry in known if entry.role == "tool"}
    results = [result for span in of_trace if (result := _tool_result(span)) is not None]
    found: list[Entry] = []
    for place, entry in enumerate(known):
        found.append(entry)
        if entry.role != AGENT or not entry.calls or not results:
            continue
        following = itertools.takewhile(lambda each: each.role == "tool", known[place + 1 :])
        nameless = sum(not each.call_id or not any(c.call_id for c in entry.calls) for each in following)
        for call in entry.calls[nameless:]:
            if call.call_id in answered and call.call_id:
                continue
            same = (r for r in results if r.call_id == call.call_id and r.call_id) if call.call_id else iter(())
            named = (r for r in results if r.name == call.name and not (r.call_id and call.call_id))
            if (result := next(itertools.chain(same, named), None)) is not None:
                results.remove(result)
                found.append(replace(result, call_id=call.call_id))
    return found


def _used(agent: Span, of_trace: list[Span]) -> Iterator[Entry]:
    """Tool calls and results, from the tool spans below an agent's span."""
    by_id = {span["id"]: span for span in of_trace}
    for span in of_trace:
        if _is_tool(span) and any(each is agent for each in _above(span, by_id)):
            name = str(first_of(span["attributes"], *TOOL_NAMES) or span["name"])
            arguments = _json(first_of(span["attributes"], *TOOL_ARGUMENTS))
            yield Entry(role=AGENT, calls=(ToolCall(name=name, arguments=arguments, call_id=span["id"]),))
            yield replace(_tool_result(span) or Entry(role="tool"), call_id=span["id"])


def _is_tool(span: Span) -> bool:
    return "tool" in _kind(span) or first_of(span["attributes"], *TOOL_CALL_IDS) is not None


def _tool_result(span: Span) -> Entry | None:
    """The result in a tool span; None for other spans, or without a result."""
    attributes = span["attributes"]
    call_id = str(first_of(attributes, *TOOL_CALL_IDS) or "")
    if not _is_tool(span):
        return None
    value = _json(first_of(attributes, *TOOL_RESULTS))
    name = str(first_of(attributes, *TOOL_NAMES) or span["name"])
    return None if value is None else Entry(role="tool", text=result_text(value), name=name, call_id=call_id)
