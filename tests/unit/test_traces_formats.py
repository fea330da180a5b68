"""The same small run in every dialect and format: one call, its result and a last word; nothing is lost silently."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draco_ray.errors import TraceError
from draco_ray.traces.load import Groups, load_traces

ASKED, SAID, DONE, RESULT = (
    "Book a room for Friday, please.",
    "I look it up.",
    "Room 4 is booked for you.",
    "room 4 is free",
)
ARGUMENTS = {"day": "Fri"}
TEXT = json.dumps(ARGUMENTS)
USER = {"role": "user", "content": ASKED}
LAST = {"role": "assistant", "content": DONE}
CALL = {"id": "c1", "type": "function", "function": {"name": "find_room", "arguments": TEXT}}
CALLING = {"role": "assistant", "content": SAID, "tool_calls": [CALL]}
ANSWER = {"role": "tool", "tool_call_id": "c1", "content": RESULT}


def typed(type_: str, **fields: Any) -> dict[str, Any]:
    return {"type": type_, **fields}


def constructed(name: str, **fields: Any) -> dict[str, Any]:
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", name], "kwargs": fields}


def claude(number: int, type_: str, content: Any, **more: Any) -> dict[str, Any]:
    parent = f"u{number - 1}" if number > 1 else None
    message = {"role": type_, "content": content, **({"id": f"m{number}"} if type_ == "assistant" else {})}
    return {"type": type_, "uuid": f"u{number}", "parentUuid": parent, "sessionId": "s1", "message": message, **more}


LC_CALL = {"name": "find_room", "args": ARGUMENTS, "id": "c1", "type": "tool_call"}
DOCUMENTS: dict[str, Any] = {
    "openai": {"messages": [USER, CALLING, ANSWER, LAST]},
    "langchain": {
        "messages": [
            typed("human", content=ASKED),
            typed("ai", content=SAID, tool_calls=[LC_CALL]),
            typed("tool", content=RESULT, tool_call_id="c1"),
            typed("AIMessageChunk", content=DONE),
        ]
    },
    "langchain dicts": {
        "messages": [
            typed("human", data={"content": ASKED}),
            typed("ai", data={"content": SAID, "tool_calls": [LC_CALL]}),
            typed("tool", data={"content": RESULT, "tool_call_id": "c1"}),
            typed("ai", data={"content": DONE}),
        ]
    },
    "langchain serialised": {
        "messages": [
            constructed("HumanMessage", content=ASKED),
            constructed("AIMessage", content=SAID, additional_kwargs={"tool_calls": [CALL]}),
            constructed("ToolMessage", content=RESULT, tool_call_id="c1"),
            constructed("AIMessage", content=DONE),
        ]
    },
    "autogen": {
        "messages": [
            typed("TextMessage", source="user", content=ASKED),
            typed("ThoughtEvent", source="clerk", content=SAID),
            typed(
                "ToolCallRequestEvent", source="clerk", content=[{"id": "c", "name": "find_room", "arguments": TEXT}]
            ),
            typed("ToolCallExecutionEvent", source="clerk", content=[{"call_id": "c", "content": RESULT}]),
            typed("TextMessage", source="clerk", content=DONE),
        ]
    },
    "bedrock": {
        "messages": [
            {"role": "user", "content": [{"text": ASKED}]},
            {
                "role": "assistant",
                "content": [{"text": SAID}, {"toolUse": {"toolUseId": "t", "name": "find_room", "input": ARGUMENTS}}],
            },
            {"role": "user", "content": [{"toolResult": {"toolUseId": "t", "content": [{"text": RESULT}]}}]},
            {"role": "assistant", "content": [{"text": DONE}]},
        ]
    },
    "gemini": {
        "systemInstruction": {"parts": [{"text": "You book rooms."}]},
        "contents": [
            {"role": "user", "parts": [{"text": ASKED}]},
            {"role": "model", "parts": [{"text": SAID}, {"functionCall": {"name": "find_room", "args": ARGUMENTS}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "find_room", "response": {"result": RESULT}}}]},
            {"role": "model", "parts": [{"text": DONE}]},
        ],
    },
    "ai sdk": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    typed("text", text=SAID),
                    typed("tool-call", toolCallId="c", toolName="find_room", input=ARGUMENTS),
                ],
            },
            {
                "role": "tool",
                "content": [typed("tool-result", toolCallId="c", output={"type": "text", "value": RESULT})],
            },
            LAST,
        ]
    },
    "ai sdk page": {
        "messages": [
            {"role": "user", "parts": [typed("text", text=ASKED)]},
            {
                "role": "assistant",
                "parts": [
                    typed("step-start"),
                    typed("text", text=SAID),
                    typed("tool-find_room", toolCallId="c", state="output-available", input=ARGUMENTS, output=RESULT),
                    typed("text", text=DONE),
                ],
            },
        ]
    },
    "ai sdk page, version 4": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": SAID,
                "toolInvocations": [
                    {"state": "result", "toolCallId": "c", "toolName": "find_room", "args": ARGUMENTS, "result": RESULT}
                ],
            },
            LAST,
        ]
    },
    "smolagents messages": {
        "messages": [
            USER,
            {"role": "assistant", "content": SAID},
            {"role": "tool-call", "content": [typed("text", text=f"Calling tools:\n{[CALL]}")]},
            {"role": "tool-response", "content": [typed("text", text=f"Observation:\n{RESULT}")]},
            LAST,
        ]
    },
    "smolagents": {
        "steps": [
            {"task": ASKED},
            {"step_number": 1, "model_output": SAID, "tool_calls": [CALL], "observations": RESULT},
            {"step_number": 2, "model_output": DONE},
        ]
    },
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": ASKED},
            {"from": "function_call", "value": json.dumps({"name": "find_room", "arguments": ARGUMENTS})},
            {"from": "observation", "value": RESULT},
            {"from": "gpt", "value": DONE},
        ]
    },
    "art": {"messages_and_choices": [USER, {"finish_reason": "stop", "index": 0, "message": CALLING}, ANSWER, LAST]},
    "verifiers": {"prompt": [USER], "completion": [CALLING | {"tool_calls": [json.dumps(CALL)]}, ANSWER, LAST]},
    "atif": {
        "schema_version": "ATIF-v1.5",
        "session_id": "s",
        "steps": [
            {"step_id": 1, "source": "user", "message": ASKED},
            {
                "step_id": 2,
                "source": "agent",
                "message": SAID,
                "tool_calls": [{"tool_call_id": "c", "function_name": "find_room", "arguments": ARGUMENTS}],
                "observation": {"results": [{"source_call_id": "c", "content": RESULT}]},
            },
            {"step_id": 3, "source": "agent", "message": DONE},
        ],
    },
    "openhands": [
        {"id": 0, "source": "user", "action": "message", "args": {"content": ASKED}},
        {"id": 1, "source": "agent", "action": "find_room", "args": {**ARGUMENTS, "thought": SAID}},
        {"id": 2, "source": "environment", "observation": "find_room", "content": RESULT, "cause": 1},
        {"id": 3, "source": "agent", "action": "finish", "args": {"final_thought": DONE}},
    ],
    "openhands sdk": [
        {"id": "a", "kind": "MessageEvent", "source": "user", "llm_message": USER},
        {
            "id": "b",
            "kind": "ActionEvent",
            "source": "agent",
            "thought": [typed("text", text=SAID)],
            "tool_name": "find_room",
            "tool_call_id": "c",
            "tool_call": {"id": "c", "name": "find_room", "arguments": TEXT},
        },
        {
            "id": "d",
            "kind": "ObservationEvent",
            "source": "environment",
            "tool_call_id": "c",
            "observation": {"content": [typed("text", text=RESULT)]},
        },
        {"id": "e", "kind": "MessageEvent", "source": "agent", "llm_message": LAST},
    ],
}
LINES: dict[str, list[dict[str, Any]]] = {
    "log of requests": [
        {"request": {"messages": [USER]}, "response": {"choices": [{"message": CALLING}]}},
        {"request": {"messages": [USER, CALLING, ANSWER]}, "response": {"choices": [{"message": LAST}]}},
    ],
    "claude code": [
        {"type": "summary", "summary": "Booking", "leafUuid": "u4"},
        claude(1, "user", ASKED),
        claude(2, "assistant", [typed("text", text=SAID)]),
        claude(3, "assistant", [typed("tool_use", id="t", name="find_room", input=ARGUMENTS)]),
        claude(4, "user", [typed("tool_result", tool_use_id="t", content=RESULT)], toolUseResult={"stdout": RESULT}),
        claude(5, "assistant", [typed("text", text=DONE)]),
    ],
    "codex": [
        {"type": "session_meta", "payload": {"id": "x"}},
        {"type": "response_item", "payload": typed("message", **USER)},
        {"type": "response_item", "payload": typed("reasoning", summary=[typed("summary_text", text=SAID)])},
        {"type": "response_item", "payload": typed("function_call", name="find_room", arguments=TEXT, call_id="c")},
        {"type": "response_item", "payload": typed("function_call_output", call_id="c", output=RESULT)},
        {"type": "event_msg", "payload": typed("agent_message", message=DONE)},
        {"type": "response_item", "payload": typed("message", **LAST)},
    ],
    "langsmith": [
        {"id": "r", "trace_id": "r", "run_type": "chain", "inputs": {"input": ASKED}, "outputs": {"output": DONE}},
        {
            "id": "a",
            "trace_id": "r",
            "parent_run_id": "r",
            "run_type": "llm",
            "dotted_order": "1",
            "inputs": {"messages": [[constructed("HumanMessage", content=ASKED)]]},
            "outputs": {
                "generations": [
                    [{"text": SAID, "message": constructed("AIMessage", content=SAID, tool_calls=[LC_CALL])}]
                ]
            },
        },
        {
            "id": "b",
            "trace_id": "r",
            "parent_run_id": "r",
            "run_type": "llm",
            "dotted_order": "2",
            "inputs": {
                "messages": [
                    [
                        constructed("HumanMessage", content=ASKED),
                        constructed("AIMessage", content=SAID, tool_calls=[LC_CALL]),
                        constructed("ToolMessage", content=RESULT, tool_call_id="c1"),
                    ]
                ]
            },
            "outputs": {"generations": [[{"text": DONE, "message": constructed("AIMessage", content=DONE)}]]},
        },
    ],
}
EVERY = {**{name: [each] for name, each in DOCUMENTS.items()}, **LINES}


def read(folder: Path, records: list[Any]) -> Groups:
    path = folder / "traces.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return load_traces(path)


@pytest.mark.parametrize("name", EVERY)
def test_a_run_is_the_same_in_every_format(name: str, tmp_path: Path) -> None:
    groups = read(tmp_path, EVERY[name])
    assert (list(groups.problems), list(groups.warnings), [len(group) for group in groups]) == ([], [], [1])
    trace = groups[0].traces[0]
    assert trace.notes == ()
    assert ASKED in [message.content for message in trace.prompt]
    calls = [(turn.action, turn.role) for turn in trace.judged_steps if not turn.message]
    assert calls == [('find_room({"day": "Fri"})', "assistant")]
    assert (trace.judged_steps[-1].text, trace.steps[-1].message) == (DONE, True)
    assert RESULT in (trace.steps[0].observation or "")
    assert trace.turns[-1].text == DONE
    if name != "sharegpt":
        assert SAID in "\n".join(turn.text for turn in trace.turns)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of everything in a JSON value that holds a word of the run."""
    text = json.dumps(value)
    if not any(word in text for word in (ASKED, SAID, DONE, RESULT, "find_room", "Fri")):
        return
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from paths(each, (*path, key))


@pytest.mark.parametrize("name", [name for name in EVERY if name != "langsmith"])  # Its runs repeat each other.
def test_evidence_under_another_name_changes_the_trace_or_is_said(name: str, tmp_path: Path) -> None:
    """A field whose name no reader knows stands for every form that we have not seen."""
    whole = read(tmp_path, EVERY[name])[0].traces[0]
    silent = []
    for place in paths(EVERY[name]):
        if not place or not isinstance(place[-1], str):
            continue
        records = copy.deepcopy(EVERY[name])
        holder: Any = records
        for key in place[:-1]:
            holder = holder[key]
        holder[f"unheard_of_{place[-1]}"] = holder.pop(place[-1])
        try:
            groups = read(tmp_path, records)
        except TraceError:
            continue
        trace = groups[0].traces[0]
        same = (trace.prompt, trace.turns, len(groups[0])) == (whole.prompt, whole.turns, 1)
        if same and not (groups.problems or groups.warnings or trace.notes):
            silent.append(place)
    # What a format writes twice may be lost once.
    twice = {
        ("functionResponse", "name"),
        ("tool_call", "name"),
        (1, "tool_name"),
        ("toolUseResult", "stdout"),
        (4, "toolUseResult"),
        ("payload", "message"),
    }
    assert [place[-2:] for place in silent if place[-2:] not in twice] == []


def test_claude_codes_sub_agents_and_rewound_prompts(tmp_path: Path) -> None:
    lines = [
        claude(1, "user", "Delete everything."),
        claude(2, "assistant", [typed("text", text="Deleting.")]),
        {**claude(3, "user", ASKED), "parentUuid": None},
        claude(4, "assistant", [typed("tool_use", id="t1", name="Task", input={"prompt": "look"})]),
        claude(5, "assistant", [typed("text", text="I am the other one.")], isSidechain=True),
        claude(6, "assistant", [typed("tool_use", id="t2", name="find_room", input=ARGUMENTS)]),
        claude(7, "user", [typed("tool_result", tool_use_id="t2", content=RESULT)]),
        claude(8, "user", [typed("tool_result", tool_use_id="t1", content="nothing found")]),
    ]
    lines[5]["message"]["id"] = lines[3]["message"]["id"]
    trace = read(tmp_path, lines)[0].traces[0]
    assert [message.content for message in trace.prompt] == [ASKED]
    assert [(turn.role, turn.action) for turn in trace.turns] == [
        ("assistant", 'Task({"prompt": "look"})\nfind_room({"day": "Fri"})'),
        ("sub-agent", None),
    ]
    observation = trace.turns[0].observation or ""
    assert observation.index("nothing found") < observation.index(RESULT)


def test_swe_agent_and_mini_swe_agent(tmp_path: Path) -> None:
    swe = {
        "trajectory": [{"action": "ls\n", "observation": "a.py", "response": "I look.\nls", "thought": "I look."}],
        "history": [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "I look.\nls"}],
        "info": {"exit_status": "submitted"},
    }
    mini = {
        "trajectory_format": "mini-swe-agent-1",
        "messages": [
            USER,
            {"role": "assistant", "content": "I look.\n```bash\nls\n```"},
            {"role": "user", "content": "a.py"},
        ],
        "info": {"exit_status": "LimitsExceeded"},
    }
    for record, ended in ((swe, "finished"), (mini, "turn_limit")):
        trace = read(tmp_path, [record])[0].traces[0]
        assert [(turn.action, turn.observation) for turn in trace.turns] == [("ls", "a.py")]
        assert trace.ended.value == ended


def test_rollouts_with_equal_beginnings_in_a_log_stay_apart(tmp_path: Path) -> None:
    other = {"role": "tool", "tool_call_id": "c1", "content": "all rooms are taken"}
    first = {"request": {"messages": [USER]}, "response": CALLING}
    log = [first, first]
    log += [{"request": {"messages": [USER, CALLING, each]}, "response": LAST} for each in (ANSWER, other)]
    (group,) = read(tmp_path, log)
    observed = [trace.steps[0].observation for trace in group.traces]
    assert sorted(map(str, observed)) == ["all rooms are taken", RESULT]


def test_files_that_are_packed_or_without_end(tmp_path: Path) -> None:
    import gzip
    import os
    import zipfile

    import pyarrow
    import pyarrow.parquet

    line = json.dumps(DOCUMENTS["openai"]).encode() + b"\n"
    with pyarrow.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as file:
        file.write(line)
    table = pyarrow.table({"messages": [json.dumps(DOCUMENTS["openai"]["messages"])]})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("deep/c.jsonl", line)
    (tmp_path / "d.chatml.txt").write_text(
        f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n{DONE}<|im_end|>"
    )
    for name in ("a.jsonl.zst", "b.parquet", "c.zip", "d.chatml.txt"):
        trace = load_traces(tmp_path / name)[0].traces[0]
        assert trace.turns[-1].text == DONE, name
    with gzip.open(tmp_path / "bomb.jsonl.gz", "wb", compresslevel=9) as file:
        for _ in range(100):
            file.write(b" " * 2**20)
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, problem in (("bomb.jsonl.gz", "decompress it first"), ("pipe.jsonl", "neither a file nor a folder")):
        with pytest.raises(TraceError, match=problem):
            load_traces(tmp_path / name)
    with pytest.raises(TraceError, match="neither a file nor a folder"):
        load_traces("/dev/zero")
