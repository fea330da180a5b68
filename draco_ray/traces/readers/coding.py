"""Sessions of coding agents: Claude Code, Codex, OpenHands, SWE-agent, mini-swe-agent, smolagents, and ATIF."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from draco_ray.records import SIDE_CALL, EpisodeEnd
from draco_ray.traces.calls import SUB_AGENT
from draco_ray.traces.entry import (
    AGENT,
    BadTrace,
    Entry,
    ToolCall,
    compact_json,
    first_of,
    json_type_name,
    object_of,
    text_of,
    wrap_thinking,
)
from draco_ray.traces.formats import ReadOptions, build_trace, get_field, number, path_value, register_format
from draco_ray.traces.messages import entries
from draco_ray.traces.model import Trace, escape_surrogates, printable_id
from draco_ray.traces.parts import parts, result_text

MINI_SWE_CODE = re.compile(r"```(?:mswea_bash_command|bash)[ \t]*\n(.*?)\n?```", re.DOTALL)
"""Matches the command in a turn of mini-swe-agent."""


# --- Claude Code -----------------------------------------------------------------------------------------------------

SUMMARY = "This session is being continued from a previous conversation"
"""First words of the summary that replaces a compacted conversation."""


def is_claude_code(record: object) -> bool:
    """Whether the record is a line of a Claude Code session or of its output (``--output-format stream-json``)."""
    if not isinstance(record, Mapping) or not isinstance(record.get("type"), str):
        return False
    return (
        ("sessionId" in record and "uuid" in record)
        or ("session_id" in record and record["type"] in ("system", "user", "assistant", "result", "stream_event"))
        or "leafUuid" in record
        or (
            record["type"] in ("file-history-snapshot", "queue-operation")
            and ("messageId" in record or "sessionId" in record)
        )
    )


def claude_code_session(record: Any, file: str) -> str | None:
    """The id of the session that a line belongs to. Lines without an id contain no turn; for these it is the file."""
    return str(record.get("sessionId") or record.get("session_id") or file)


@register_format(
    "claude-code",
    'lines of a Claude Code session: objects with "type", "uuid" and "sessionId"',
    is_claude_code,
    session=claude_code_session,
)
def read_claude_code(lines: Any, reading: ReadOptions) -> Iterator[Trace]:
    """The trace of a session. Raises: BadTrace if the agent says nothing in it."""
    lines = _in_order(lines)
    said: list[Entry] = []
    for line in _one_line_a_message(_without_rewound(lines)):
        message = line.get("message")
        if line.get("type") == "tool_call" and line.get("subtype") == "completed":
            said += [replace(each, item=each.role == AGENT) for each in entries([_of_cursor(line)])]
        if not isinstance(message, Mapping):
            continue
        # Lines with the same message id are merged already.
        item = not isinstance(message.get("id"), str)
        of_line = [replace(each, item=item) if each.role == AGENT else each for each in entries([message])]
        if line.get("isSidechain") or line.get("parent_tool_use_id"):
            # Drop the sub-agent's task: the call that started the sub-agent contains it.
            role = {AGENT: SUB_AGENT, "tool": f"{SUB_AGENT}'s tool"}
            of_line = [Entry(role=role[e.role], text=e.text, calls=e.calls) for e in of_line if e.role in role]
        elif line.get("isMeta") or line.get("isApiErrorMessage") or message.get("model") == "<synthetic>":
            # These messages come from the program, not from the user or the agent.
            of_line = [e if e.role == "tool" else Entry(role="system", text=e.text) for e in of_line]
        said += of_line
    if not said:
        return
    first: Mapping[str, Any] = next((line for line in lines if "sessionId" in line or "session_id" in line), {})
    yield build_trace(
        said,
        first,
        reading,
        trace_id=printable_id(claude_code_session(first, "")),
        tools=next((line["tools"] for line in lines if line.get("subtype") == "init" and "tools" in line), None),
    )


def _of_cursor(line: Mapping[str, Any]) -> dict[str, Any]:
    """Convert Cursor's ``tool_call`` line, a call with its result, to a message."""
    key, call = next(iter(line["tool_call"].items()))
    named = {"toolCallId": text_of(line, "call_id"), "toolName": text_of(call, "name") or key.removesuffix("ToolCall")}
    asked = first_of(call, "args", "arguments")
    return {"role": AGENT, "content": [{**named, "type": "dynamic-tool", "input": asked, "output": call.get("result")}]}


def _in_order(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines in order. Each sub-agent's lines, which may be in another file, precede the result of the call that
    started it, or are placed by time if there is no link to this call."""
    main: list[Mapping[str, Any]] = []
    apart: dict[object, list[Mapping[str, Any]]] = {}
    for line in lines:
        agent = line.get("agentId") if line.get("isSidechain") else None
        (main if agent is None else apart.setdefault(agent, [])).append(line)
    found = []
    for line in main:
        found += apart.pop(path_value(line, "toolUseResult.agentId"), [])
        found.append(line)
    for rest in apart.values():
        began = text_of(rest[0], "timestamp")
        place = next((n for n, line in enumerate(found) if text_of(line, "timestamp") > began), len(found))
        found[place:place] = rest
    return found


def _without_rewound(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines that the session kept.

    If the user went back and replaced a prompt, the old prompt and the lines that descend from it are left out.
    """
    latest: dict[object, object] = {}
    prompts = [line for line in lines if _is_prompt(line)]
    for line in prompts:
        latest[line.get("parentUuid")] = line.get("uuid")
    rewound = {line.get("uuid") for line in prompts if latest[line.get("parentUuid")] != line.get("uuid")}
    kept = []
    for line in lines:
        if line.get("uuid") in rewound or line.get("parentUuid") in rewound:
            rewound.add(line.get("uuid"))
        else:
            kept.append(line)
    return kept


def _is_prompt(line: Mapping[str, Any]) -> bool:
    content = path_value(line, "message.content")
    typed = isinstance(content, str) or (
        isinstance(content, list) and all(get_field(each, "type") != "tool_result" for each in content)
    )
    apart = any(line.get(name) for name in ("isMeta", "isSidechain", "isCompactSummary"))
    summary = isinstance(content, str) and content.startswith(SUMMARY)
    return line.get("type") == "user" and "parentUuid" in line and typed and not apart and not summary


def _one_line_a_message(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines, with the blocks of each message merged; in the file, each block has its own line."""
    first: dict[str, dict[str, Any]] = {}
    found: list[Mapping[str, Any]] = []
    for line in lines:
        message = line.get("message")
        number_ = get_field(message, "id")
        content = get_field(message, "content")
        if not isinstance(number_, str) or not isinstance(content, list) or not isinstance(message, Mapping):
            found.append(line)
        elif number_ in first:
            whole = first[number_]["message"]
            whole["content"] = [*whole["content"], *(each for each in content if each not in whole["content"])]
            whole["usage"] = message.get("usage") or whole.get("usage")
        else:
            first[number_] = {**line, "message": {**message}}
            found.append(first[number_])
    return found


# --- Codex -----------------------------------------------------------------------------------------------------------

CODEX_ITEMS = ("reasoning", "function_call", "function_call_output", "local_shell_call", "message")
"""Line types of Codex's first format, which are items of OpenAI's Responses API."""
CODEX_LINES = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")


EXEC_LINES = ("thread.started", "turn.started", "turn.completed", "turn.failed", "item.started", "item.updated")
EXEC_ITEM = "item.completed"
"""`EXEC_LINES` and `EXEC_ITEM`: types of the lines that ``codex exec --json`` prints."""


def is_codex(record: object) -> bool:
    """Whether the record is a line of a Codex rollout (old or new format), or of what ``codex exec --json`` prints."""
    if not isinstance(record, Mapping):
        return False
    if record.get("type") in CODEX_LINES:
        return isinstance(record.get("payload"), Mapping)
    first = {"id", "timestamp", "instructions"} <= record.keys() or record.get("record_type") == "state"
    item = record.get("type") in CODEX_ITEMS and not {"messages", "uuid", "source", "model"} & record.keys()
    return first or item or record.get("type") in (*EXEC_LINES, EXEC_ITEM)


@register_format(
    "codex",
    'lines of a Codex rollout: objects with "type" (session_meta, response_item) and "payload"',
    is_codex,
    session=lambda record, file: file,
)
def read_codex(lines: Any, reading: ReadOptions) -> Iterator[Trace]:
    """The trace of a rollout file. Raises: BadTrace if the agent says nothing in it."""
    said: list[Entry] = []
    meta: Mapping[str, Any] = {}
    tokens = None
    for line in lines:
        payload, type_ = line.get("payload", line), line.get("type")
        if type_ == "session_meta" or "instructions" in line:
            meta = meta or payload
        elif type_ == EXEC_ITEM:
            said += _exec_item(object_of(line, "item"))
        elif type_ == "response_item" or type_ in CODEX_ITEMS:
            items = entries([payload], "item")
            said += [replace(each, item=True) for each in items]
        elif type_ == "compacted" and payload.get("message"):
            said.append(
                Entry(role="user", text=f"[summary of the conversation so far]\n{result_text(payload['message'])}")
            )
        elif type_ == "event_msg" and payload.get("type") == "token_count":
            tokens = path_value(payload, "info.last_token_usage.output_tokens")
            last = next((place for place in range(len(said) - 1, -1, -1) if said[place].role == AGENT), None)
            if last is not None and isinstance(tokens, int) and tokens > 0:
                said[last] = replace(said[last], tokens=tokens)
    told = text_of(meta, "instructions") or str(path_value(meta, "base_instructions.text") or "")
    yield build_trace(
        [*([Entry(role="system", text=escape_surrogates(told))] if told else []), *said],
        meta,
        reading,
        trace_id=printable_id(meta.get("id") or next((line["thread_id"] for line in lines if "thread_id" in line), "")),
    )


def _exec_item(item: Mapping[str, Any]) -> Iterator[Entry]:
    """An item in the output of ``codex exec --json``."""
    type_, said = str(item.get("type")), text_of(item, "text", "message")
    if type_ in ("agent_message", "reasoning"):
        yield Entry(role=AGENT, text=wrap_thinking(said) if type_ == "reasoning" else said, item=True)
    elif type_ == "error":
        yield Entry(role="system", text=said)
    else:
        about = {key: item[key] for key in item if key not in ("id", "type", "status", *_EXEC_RESULTS)}
        call = ToolCall(name=type_, arguments=about, call_id=text_of(item, "id"))
        yield Entry(role=AGENT, calls=(call,), item=True)
        results = {key: item[key] for key in _EXEC_RESULTS if item.get(key) not in (None, "")}
        if results:
            only = results.get("aggregated_output") if not results.get("exit_code") else None
            yield Entry(role="tool", text=result_text(only or results), call_id=text_of(item, "id"))


_EXEC_RESULTS = ("aggregated_output", "exit_code", "result", "error")


# --- OpenHands -------------------------------------------------------------------------------------------------------


OPENHANDS_INTERNAL = ("condensation", "condensation_request", "change_agent_state", "recall", "null")
"""Actions that are not turns of the policy; the first contains a summary, which a call of its own has written."""


def is_openhands(record: object) -> bool:
    """Whether the record is an event of OpenHands, a list of events, or an evaluation result with its history."""
    events = record if isinstance(record, list) else get_field(record, "history")
    if isinstance(events, list):
        return bool(events) and all(_is_event(each) for each in events[:3])
    return _is_event(record)


def _is_event(record: object) -> bool:
    if not isinstance(record, Mapping) or not isinstance(record.get("source"), str):
        return False
    return "kind" in record if "action" not in record and "observation" not in record else "role" not in record


def openhands_session(record: Any, file: str) -> str | None:
    """Name of the session that a single event belongs to: its file.

    None for a list of events and for an evaluation result, which are sessions of their own.
    """
    return None if isinstance(record, list) or "history" in record else file


@register_format(
    "openhands",
    'events of OpenHands: objects with "source" and "action" or "observation"',
    is_openhands,
    repeated=("model_response", "message"),
    session=openhands_session,
)
def read_openhands(record: Any, reading: ReadOptions) -> Iterator[Trace]:
    """The trace of a list of events. Raises: BadTrace if the agent does nothing in it."""
    events = record if isinstance(record, list) else record["history"]
    said: list[Entry] = []
    first: dict[str, int] = {}
    for event in events:
        for entry in _event(event) if isinstance(event, Mapping) else ():
            response = _response(event) if entry.calls else ""
            if response in first:
                # Each of several parallel calls has its own event.
                turn = said[first[response]]
                text = "\n".join(filter(None, [turn.text, entry.text]))
                said[first[response]] = replace(turn, text=text, calls=turn.calls + entry.calls)
                continue
            if response:
                first[response] = len(said)
            said.append(entry)
    about = {} if isinstance(record, list) else record
    yield build_trace(
        said,
        about,
        reading,
        instruction=text_of(about, "instruction") or None,
        tools=next((event["tools"] for event in events if isinstance(get_field(event, "tools"), list)), None),
        outcome=number(path_value(about, "test_result.report.resolved")),
    )


def _event(event: Mapping[str, Any]) -> Iterator[Entry]:
    if "kind" in event:
        yield from entries([each for each in (_sdk_message(event),) if each is not None])
        return
    arguments = object_of(event, "args")
    action, source = event.get("action"), str(event["source"])
    call_id = str(path_value(event, "tool_call_metadata.tool_call_id") or "")
    if isinstance(action, str) and action in ("message", "system"):
        role = "system" if action == "system" else AGENT if source == "agent" else "user"
        yield Entry(role=role, text=result_text(arguments.get("content") or event.get("message")))
    elif isinstance(action, str) and source == "agent" and action not in OPENHANDS_INTERNAL:
        thought = text_of(arguments, "thought")
        hidden = ("thought", "hidden", "is_input", "confirmation_state", "security_risk", "blocking")
        about = {key: value for key, value in arguments.items() if key not in hidden and value not in ("", None)}
        if action == "finish" and set(about) <= {"final_thought", "outputs", "task_completed"}:
            yield Entry(
                role=AGENT, text="\n".join(filter(None, [thought, text_of(about, "final_thought")])) or "finish"
            )
        else:
            yield Entry(
                role=AGENT,
                text=thought,
                calls=(ToolCall(name=action, arguments=about, call_id=call_id or str(event.get("id", ""))),),
            )
    elif isinstance(action, str):
        if action not in ("change_agent_state", "recall", "null", "condensation_request"):
            yield Entry(
                role=SIDE_CALL if source == "agent" else source,
                text=result_text(
                    first_of(arguments, "content", "summary") or event.get("message") or compact_json(arguments)
                ),
            )
    elif "observation" in event and event["observation"] not in ("agent_state_changed", "null", "recall"):
        text = result_text(event.get("content") or event.get("message"))
        yield Entry(role="tool", text=text, call_id=call_id or str(event.get("cause", "")))


def _response(event: Mapping[str, Any]) -> str:
    """Id of the model's response that an action is part of; empty if the event does not state it."""
    return str(event.get("llm_response_id") or path_value(event, "tool_call_metadata.model_response.id") or "")


def _sdk_message(event: Mapping[str, Any]) -> Any:
    """The message of an event of OpenHands' agent SDK; None if it has none."""
    kind_ = str(event["kind"])
    if kind_ == "SystemPromptEvent":
        return {"role": "system", "content": event.get("system_prompt")}
    if kind_ == "MessageEvent":
        return event["llm_message"]
    identity = {"name": event.get("tool_name"), "tool_call_id": event.get("tool_call_id")}
    if kind_ == "ActionEvent":
        call, action = object_of(event, "tool_call"), object_of(event, "action")
        arguments = call.get("arguments") or {key: action[key] for key in action if key != "kind"}
        name = identity["name"] or call.get("name") or action.get("kind", "action")
        said = {"role": AGENT, "reasoning_content": event.get("reasoning_content"), "content": event.get("thought")}
        return {**said, "tool_calls": [{**identity, "name": name, "arguments": arguments}]}
    if kind_.endswith("ObservationEvent") or kind_ == "AgentErrorEvent":
        observed = event.get("observation", event.get("error"))
        content = first_of(observed, "content") if isinstance(observed, Mapping) else observed
        content = observed if content is None else content
        return {"role": "tool", **identity, "content": content, "error": kind_ == "AgentErrorEvent"}
    return None


# --- SWE-agent and mini-swe-agent ------------------------------------------------------------------------------------


def is_swe_agent(record: object) -> bool:
    """Whether the record is a trajectory of SWE-agent."""
    steps = get_field(record, "trajectory")
    return isinstance(steps, list) and all(
        "action" in each and "observation" in each for each in steps[:3] if isinstance(each, Mapping)
    )


@register_format("swe-agent", 'a trajectory of SWE-agent: an object with "trajectory" and "history"', is_swe_agent)
def read_swe_agent(record: Any, reading: ReadOptions) -> Iterator[Trace]:
    """The trace of a trajectory. Raises: BadTrace if it has no steps."""
    history = [each for each in record.get("history") or () if isinstance(each, Mapping) and not each.get("is_demo")]
    first = next((place for place, each in enumerate(history) if each.get("role") == "assistant"), len(history))
    said = entries(history[:first])
    for step in record["trajectory"]:
        if not isinstance(step, Mapping):
            raise BadTrace(f"expected a step as an object, found {json_type_name(step)}")
        action = text_of(step, "action").strip("\n")
        text = text_of(step, "response") or text_of(step, "thought")
        spoken = text if action and action in text else "\n".join(filter(None, [text, action]))
        said.append(Entry(role=AGENT, text=spoken, code=action or None))
        if text_of(step, "observation") or action:
            said.append(Entry(role="tool", text=text_of(step, "observation")))
    yield build_trace(said, record, reading, ended=_swe_end(record))


def _swe_end(record: Mapping[str, Any]) -> EpisodeEnd | None:
    status = str(path_value(record, "info.exit_status") or "").casefold()
    if status.startswith("submitted"):
        return EpisodeEnd.FINISHED
    return EpisodeEnd.TURN_LIMIT if "limit" in status or "exit_cost" in status else None


def is_mini_swe(record: object) -> bool:
    """Whether the record is a trajectory of mini-swe-agent."""
    return str(get_field(record, "trajectory_format") or "").startswith("mini-swe-agent")


@register_format(
    "mini-swe-agent", 'a trajectory of mini-swe-agent: an object with "messages" and "trajectory_format"', is_mini_swe
)
def read_mini_swe(record: Any, reading: ReadOptions) -> Iterator[Trace]:
    """The trace of a trajectory. Raises: BadTrace if the agent says nothing in it."""
    messages = [each for each in record.get("messages") or () if get_field(each, "role") != "exit"]
    yield build_trace(entries(messages), record, replace(reading, code=MINI_SWE_CODE), ended=_swe_end(record))


# --- ATIF and smolagents ---------------------------------------------------------------------------------------------


def is_atif(record: object) -> bool:
    """Whether the record is a trajectory in Harbor's Agent Trajectory Interchange Format."""
    return str(get_field(record, "schema_version") or "").startswith("ATIF") and isinstance(
        get_field(record, "steps"), list
    )


@register_format("atif", 'a trajectory in ATIF: an object with "schema_version" and "steps"', is_atif)
def read_atif(record: Any, reading: ReadOptions) -> Iterator[Trace]:
    """The trace of a trajectory. Raises: BadTrace if a step is not an object, or no step is the agent's."""
    said: list[Entry] = []
    for place, step in enumerate(record["steps"], 1):
        if not isinstance(step, Mapping):
            raise BadTrace(f"step {place}: expected an object, found {json_type_name(step)}")
        source = str(step.get("source"))
        message = {"role": source if source in ("agent", "system") else "user", "content": step.get("message")}
        if source == "agent":
            message |= {name: step.get(name) for name in ("reasoning_content", "tool_calls")}
            message["usage"] = step.get("metrics")
        results = [
            {"role": "tool", "content": result.get("content"), "tool_call_id": text_of(result, "source_call_id")}
            for result in path_value(step, "observation.results") or ()
        ]
        said += entries([message, *results])
    yield build_trace(
        said,
        record,
        reading,
        trace_id=printable_id(record.get("session_id") or ""),
        tools=path_value(record, "agent.tool_definitions"),
    )


def is_smolagents(record: object) -> bool:
    """Whether the record is the memory of a smolagents agent: its steps, or an object that contains them."""
    steps = record if isinstance(record, list) else get_field(record, "steps")
    named = ("step_number", "task", "system_prompt", "plan")
    return (
        isinstance(steps, list)
        and bool(steps)
        and all(any(n in each for n in named) for each in steps if isinstance(each, Mapping))
        and any("step_number" in each for each in steps if isinstance(each, Mapping))
    )


@register_format(
    "smolagents",
    'the memory of a smolagents agent: "steps" with "step_number" and "task"',
    is_smolagents,
    repeated=("model_input_messages", "model_output_message", "tool_calls"),
)
def read_smolagents(record: Any, reading: ReadOptions) -> Iterator[Trace]:
    """The trace of an agent's memory. Raises: BadTrace if the agent does nothing in it."""
    said: list[Entry] = []
    steps = record if isinstance(record, list) else record["steps"]
    if not any(step.get("system_prompt") for step in steps):
        asked: Any = next((step["model_input_messages"] for step in steps if step.get("model_input_messages")), [])
        said += [each for each in entries(asked) if each.role == "system"]
    for step in steps:
        if step.get("step_number") is None:
            told = (("system", "system_prompt"), ("user", "task"), (AGENT, "plan"))
            said += [Entry(role=role, text=result_text(step[name])) for role, name in told if step.get(name)]
            continue
        text = "\n".join(each.text for each in parts(step.get("model_output")))
        code = text_of(step, "code_action")
        # The recorded call of the interpreter repeats the code, so drop it.
        calls = () if code else step.get("tool_calls")
        spoken = text if code in text else f"{text}\n{code}".strip()
        message = {"role": AGENT, "content": spoken, "tool_calls": calls, "usage": step.get("token_usage")}
        said += [replace(each, code=code or None) for each in entries([message])]
        observed = "\n".join(
            filter(None, [result_text(step.get("observations")), result_text(get_field(step.get("error"), "message"))])
        )
        if (code or said[-1].calls) and (observed or step.get("action_output") is not None):
            said.append(Entry(role="tool", text=observed or result_text(step.get("action_output"))))
    about = {} if isinstance(record, list) else record
    yield build_trace(said, about, reading)
