"""The same small run in every dialect and format: one call, its result and a last word; nothing is lost silently."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draco_ray.errors import TraceError
from draco_ray.records import EpisodeEnd
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


def claude(number: int, type_: str, content: Any, *, reply: int | None = None, **more: Any) -> dict[str, Any]:
    parent = f"u{number - 1}" if number > 1 else None
    message = {"role": type_, "content": content, **({"id": f"m{reply or number}"} if type_ == "assistant" else {})}
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
        claude(3, "assistant", [typed("tool_use", id="t", name="find_room", input=ARGUMENTS)], reply=2),
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
STREAM = [
    typed("response.created", response={"id": "r1", "output": []}),
    typed("response.output_item.added", item=typed("function_call", name="find_room", arguments="", call_id="c1")),
    typed("response.function_call_arguments.delta", delta=TEXT),
    typed("response.output_item.done", item=typed("reasoning", summary=[typed("summary_text", text=SAID)])),
    typed("response.output_item.done", item=typed("function_call", name="find_room", arguments=TEXT, call_id="c1")),
]
CHUNKS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": DONE[:7]}}]},
    {"choices": [{"index": 0, "delta": {"content": DONE[7:]}}]},
    {"choices": [], "usage": {"completion_tokens": 5}},
]
TAGGED_CALL = f"{SAID}\n<tool_call>\n{json.dumps({'name': 'find_room', 'arguments': ARGUMENTS})}\n</tool_call>"
TAGGED_RESULT = f"<tool_response>\n{RESULT}\n</tool_response>"
CHATML = (
    f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n{TAGGED_CALL}<|im_end|>\n"
    f"<|im_start|>user\n{TAGGED_RESULT}<|im_end|>\n<|im_start|>assistant\n{DONE}<|im_end|>\n"
)
CONVERSE = DOCUMENTS["bedrock"]["messages"]
DOCUMENTS |= {
    "langchain, calls twice": {
        "messages": [
            typed("human", content=ASKED),
            typed(
                "ai",
                content=[typed("text", text=SAID), typed("tool_use", id="c1", name="find_room", input=ARGUMENTS)],
                tool_calls=[LC_CALL],
            ),
            typed("tool", content=RESULT, tool_call_id="c1"),
            typed("ai", content=DONE),
        ]
    },
    "langchain, responses": {
        "messages": [
            typed("human", content=ASKED),
            typed(
                "ai",
                content=[
                    typed("text", text=SAID),
                    typed("function_call", id="fc", call_id="c1", name="find_room", arguments=TEXT),
                ],
                tool_calls=[LC_CALL],
            ),
            typed("tool", content=RESULT, tool_call_id="c1"),
            typed("ai", content=DONE),
        ]
    },
    "hermes": {
        "conversations": [
            {"from": "human", "value": ASKED},
            {"from": "gpt", "value": TAGGED_CALL},
            {"from": "tool", "value": TAGGED_RESULT},
            {"from": "gpt", "value": DONE},
        ]
    },
    "chatml": {"text": CHATML},
    "chatml, prompt and completion": {
        "prompt": CHATML[: CHATML.index(SAID)],
        "completion": CHATML[CHATML.index(SAID) :],
    },
    "qwen coder": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": f"{SAID}\n<tool_call>\n<function=find_room>\n<parameter=day>\nFri\n</parameter>\n"
                "</function>\n</tool_call>",
            },
            {"role": "user", "content": TAGGED_RESULT},
            LAST,
        ]
    },
    "langgraph state": {
        "values": {"messages": [USER, CALLING, ANSWER, LAST]},
        "next": [],
        "config": {"configurable": {"thread_id": "t"}},
    },
    "art group": {"trajectories": [{"messages_and_choices": [USER, CALLING, ANSWER, LAST], "reward": 1.0}]},
    "gemini media": {
        "contents": [
            *DOCUMENTS["gemini"]["contents"][:2],
            {
                "role": "function",
                "parts": [
                    {"functionResponse": {"name": "find_room", "response": {"result": RESULT}}},
                    {"inlineData": {"mimeType": "image/png", "data": "iVBORw0KGgo="}},
                ],
            },
            {"role": "model", "parts": [{"text": DONE}]},
        ]
    },
    "gemini cli": {
        "sessionId": "s",
        "messages": [
            typed("user", id="1", content=ASKED),
            typed(
                "gemini",
                id="2",
                content=SAID,
                toolCalls=[
                    {
                        "id": "f1",
                        "name": "find_room",
                        "args": ARGUMENTS,
                        "result": [{"functionResponse": {"id": "f1", "response": {"output": RESULT}}}],
                    }
                ],
            ),
            typed("gemini", id="3", content=DONE),
        ],
    },
    "ai sdk result": {
        "prompt": ASKED,
        "steps": [
            {
                "content": [
                    typed("text", text=SAID),
                    typed("tool-call", toolCallId="c", toolName="find_room", input=ARGUMENTS),
                    typed("tool-result", toolCallId="c", toolName="find_room", output=RESULT),
                ],
                "finishReason": "tool-calls",
            },
            {"content": [typed("text", text=DONE)], "finishReason": "stop"},
        ],
    },
    "autogen code": {
        "messages": [
            typed("TextMessage", source="user", content=ASKED),
            typed(
                "CodeGenerationEvent",
                source="coder",
                content=f"{SAID}\nfind_room",
                code_blocks=[{"code": 'find_room({"day": "Fri"})', "language": "python"}],
            ),
            typed("CodeExecutionEvent", source="coder", result={"exit_code": 0, "output": RESULT}),
            typed("TextMessage", source="coder", content=DONE),
        ]
    },
    "mini-swe-agent, responses": {
        "trajectory_format": "mini-swe-agent-1.1",
        "messages": [
            USER,
            {
                "object": "response",
                "output": [
                    typed("message", role="assistant", content=[typed("output_text", text=SAID)]),
                    typed("function_call", name="find_room", arguments=TEXT, call_id="c1"),
                ],
            },
            typed("function_call_output", call_id="c1", output=RESULT),
            LAST,
        ],
    },
}
LINES |= {
    "responses, chained": [
        {
            "request": {"input": ASKED},
            "response": {
                "id": "r1",
                "object": "response",
                "instructions": "You book rooms.",
                "output": [
                    typed("reasoning", summary=[typed("summary_text", text=SAID)]),
                    typed("function_call", name="find_room", arguments=TEXT, call_id="c1"),
                ],
            },
        },
        {
            "request": {
                "previous_response_id": "r1",
                "input": [typed("function_call_output", call_id="c1", output=RESULT)],
            },
            "response": {
                "id": "r2",
                "object": "response",
                "instructions": "You book rooms.",
                "output": [typed("message", **LAST)],
            },
        },
    ],
    "responses, streamed": [
        {"request": {"input": ASKED}, "response": STREAM},
        {
            "request": {
                "previous_response_id": "r1",
                "input": [typed("function_call_output", call_id="c1", output=RESULT)],
            },
            "response": "".join(f"data: {json.dumps(each)}\n\n" for each in CHUNKS) + "data: [DONE]\n\n",
        },
    ],
    "batch": [
        {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [USER, CALLING, ANSWER]},
        },
        {"custom_id": "a", "response": {"status_code": 200, "body": {"choices": [{"message": LAST}]}}, "error": None},
    ],
    "helicone": [
        {"request_body": {"messages": [USER]}, "response_body": {"id": "1", "choices": [{"message": CALLING}]}},
        {"request_body": {"messages": [USER]}, "response_body": {"id": "1", "choices": [{"message": CALLING}]}},
        {
            "request_body": {"messages": [USER, CALLING, ANSWER]},
            "response_body": {"id": "2", "choices": [{"message": LAST}]},
        },
    ],
    "bedrock invocations": [
        {
            "schemaType": "ModelInvocationLog",
            "input": {"inputBodyJson": {"messages": CONVERSE[:place]}},
            "output": {"outputBodyJson": {"output": {"message": CONVERSE[place]}}},
        }
        for place in (1, 3)
    ],
    "a message a line": [USER, CALLING, ANSWER, LAST],
    "langgraph history": [
        {"values": {"messages": [USER, CALLING, ANSWER, LAST][:length]}, "config": {"configurable": {"thread_id": "t"}}}
        for length in (4, 3, 2, 1)
    ],
    "codex, first form": [
        {"id": "x", "timestamp": "2025-05-01", "instructions": None},
        typed("message", **USER),
        {"record_type": "state"},
        typed("reasoning", summary=[typed("summary_text", text=SAID)]),
        typed("function_call", name="find_room", arguments=TEXT, call_id="c"),
        typed("function_call_output", call_id="c", output=RESULT),
        typed("message", **LAST),
    ],
}
SSE = [
    typed("message_start", message={"id": "m1", "role": "assistant", "content": []}),
    typed("content_block_start", index=0, content_block=typed("text", text="")),
    typed("content_block_delta", index=0, delta=typed("text_delta", text=SAID)),
    typed("content_block_start", index=1, content_block=typed("tool_use", id="c1", name="find_room", input={})),
    typed("content_block_delta", index=1, delta=typed("input_json_delta", partial_json=TEXT[:5])),
    typed("content_block_delta", index=1, delta=typed("input_json_delta", partial_json=TEXT[5:])),
    typed("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 9}),
]
DOCUMENTS |= {
    "pydantic ai": [
        {"kind": "request", "parts": [{"part_kind": "user-prompt", "content": ASKED}]},
        {
            "kind": "response",
            "parts": [
                {"part_kind": "text", "content": SAID},
                {"part_kind": "tool-call", "tool_name": "find_room", "args": TEXT, "tool_call_id": "c"},
            ],
        },
        {
            "kind": "request",
            "parts": [
                {"part_kind": "tool-return", "tool_name": "find_room", "content": RESULT, "tool_call_id": "c"},
            ],
        },
        {"kind": "response", "parts": [{"part_kind": "text", "content": DONE}]},
    ],
    "google adk": {
        "id": "s",
        "events": [
            {"author": "user" if place % 2 == 0 else "clerk", "content": content}
            for place, content in enumerate(DOCUMENTS["gemini"]["contents"])
        ],
    },
    "opencode": {
        "info": {"id": "ses"},
        "messages": [
            {"info": {"role": "user"}, "parts": [typed("text", text=ASKED)]},
            {
                "info": {"role": "assistant"},
                "parts": [
                    typed("step-start"),
                    typed("text", text=SAID),
                    typed(
                        "tool",
                        tool="find_room",
                        callID="c",
                        state={"status": "completed", "input": ARGUMENTS, "output": RESULT},
                    ),
                    typed("step-finish"),
                ],
            },
            {"info": {"role": "assistant"}, "parts": [typed("text", text=DONE)]},
        ],
    },
    "haystack": {
        "messages": [
            {"role": "user", "content": [{"text": ASKED}]},
            {
                "role": "assistant",
                "content": [
                    {"text": SAID},
                    {"tool_call": {"id": "c", "tool_name": "find_room", "arguments": ARGUMENTS}},
                ],
            },
            {"role": "tool", "content": [{"tool_call_result": {"result": RESULT, "origin": {"id": "c"}}}]},
            {"role": "assistant", "content": [{"text": DONE}]},
        ]
    },
    "llamaindex": [
        {"role": "user", "blocks": [{"block_type": "text", "text": ASKED}]},
        {
            "role": "assistant",
            "additional_kwargs": {"tool_calls": [CALL]},
            "blocks": [{"block_type": "text", "text": SAID}],
        },
        {
            "role": "tool",
            "additional_kwargs": {"tool_call_id": "c1"},
            "blocks": [{"block_type": "text", "text": RESULT}],
        },
        {"role": "assistant", "blocks": [{"block_type": "text", "text": DONE}]},
    ],
    "agent executor": {
        "input": ASKED,
        "output": DONE,
        "intermediate_steps": [[{"tool": "find_room", "tool_input": ARGUMENTS, "log": SAID}, RESULT]],
    },
    "goose": {
        "messages": [
            {"role": "user", "content": [typed("text", text=ASKED)]},
            {
                "role": "assistant",
                "content": [
                    typed("text", text=SAID),
                    typed("toolRequest", id="c", toolCall={"value": {"name": "find_room", "arguments": ARGUMENTS}}),
                ],
            },
            {
                "role": "user",
                "content": [typed("toolResponse", id="c", toolResult={"value": [typed("text", text=RESULT)]})],
            },
            LAST,
        ]
    },
}
LINES |= {
    "anthropic, streamed": [
        {
            "request": {"body": {"messages": [USER]}},
            "response": {"body_raw": "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in SSE)},
        },
        {
            "request": {
                "body": {
                    "messages": [
                        USER,
                        {
                            "role": "assistant",
                            "content": [
                                typed("text", text=SAID),
                                typed("tool_use", id="c1", name="find_room", input=ARGUMENTS),
                            ],
                        },
                        {"role": "user", "content": [typed("tool_result", tool_use_id="c1", content=RESULT)]},
                    ]
                }
            },
            "response": {"role": "assistant", "content": [typed("text", text=DONE)]},
        },
    ],
    "ollama, streamed": [
        {
            "request": {"messages": [USER]},
            "response": [
                {"message": {"role": "assistant", "content": SAID[:4]}, "done": False},
                {
                    "message": {
                        "content": SAID[4:],
                        "tool_calls": [{"function": {"name": "find_room", "arguments": ARGUMENTS}}],
                    },
                    "done": True,
                },
            ],
        },
        {
            "request": {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": SAID,
                        "tool_calls": [{"function": {"name": "find_room", "arguments": ARGUMENTS}}],
                    },
                    {"role": "tool", "content": RESULT},
                ]
            },
            "response": {"message": LAST, "done": True},
        },
    ],
}


def shown(number: int, role: str, content: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A node of a tree that ChatGPT exports."""
    message = {"author": {"role": role, "name": None}, "content": content, "recipient": "all", **more}
    return {"id": str(number), "parent": str(number - 1), "children": [str(number + 1)], "message": message}


ROOMS = {"role": "tool", "name": "find_room"}
TREE = [
    {"id": "0", "message": None, "parent": None, "children": ["1"]},
    shown(1, "user", {"content_type": "text", "parts": [ASKED]}),
    shown(2, "assistant", {"content_type": "thoughts", "thoughts": [{"summary": "", "content": SAID}]}),
    shown(3, "assistant", {"content_type": "code", "text": TEXT}, recipient="find_room"),
    shown(4, "tool", {"content_type": "text", "parts": [""]}, author=ROOMS),
    shown(5, "tool", {"content_type": "execution_output", "text": RESULT}, author=ROOMS),
    shown(6, "assistant", {"content_type": "text", "parts": [DONE]}),
    {**shown(7, "assistant", {"content_type": "text", "parts": ["It was another answer."]}), "parent": "1"},
]


def said_in_app(number: int, sender: str, *content: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A message in an export of Claude.ai."""
    ids = {"uuid": str(number), "parent_message_uuid": str(number - 1)}
    return {**ids, "sender": sender, "text": "", "content": list(content), "attachments": [], "files": [], **more}


def exchange(messages: list[Any], reply: str) -> dict[str, Any]:
    """An entry of an HTTP archive."""
    request = {
        "method": "POST",
        "postData": {"mimeType": "application/json", "text": json.dumps({"messages": messages})},
    }
    return {
        "request": request,
        "response": {"status": 200, "content": {"mimeType": "text/event-stream", "text": reply}},
    }


def jaeger(number: int, messages: list[Any], reply: dict[str, Any]) -> dict[str, Any]:
    """A span as Jaeger exports it."""
    tags = {"gen_ai.input.messages": messages, "gen_ai.output.messages": [reply], "gen_ai.operation.name": "chat"}
    return {
        "traceID": "t",
        "spanID": str(number),
        "operationName": "chat",
        "references": [{"refType": "CHILD_OF", "traceID": "t", "spanID": "root"}],
        "startTime": 1_700_000_000_000_000 + number,
        "tags": [
            {"key": key, "type": "string", "value": each if isinstance(each, str) else json.dumps(each)}
            for key, each in tags.items()
        ],
        "logs": [],
    }


DOCUMENTS |= {
    "chatgpt": {"id": "c", "title": "Room", "mapping": {each["id"]: each for each in TREE}, "current_node": "6"},
    "claude.ai": {
        "uuid": "c",
        "chat_messages": [
            said_in_app(1, "human", typed("text", text=ASKED)),
            {**said_in_app(5, "assistant", typed("text", text="It was another answer.")), "parent_message_uuid": "1"},
            said_in_app(
                2,
                "assistant",
                typed("text", text=SAID),
                typed("tool_use", name="find_room", input=ARGUMENTS),
                typed("tool_result", name="find_room", content=[typed("text", text=RESULT)]),
            ),
            said_in_app(3, "assistant", text=DONE),
        ],
    },
    "open webui": {"id": "c", "chat": {"title": "Room", "messages": [USER, CALLING, ANSWER, LAST]}},
    "gemini, requests that leave the user's role out": {
        "contents": [
            {"parts": [{"text": ASKED}]},
            {"role": "model", "parts": [{"text": SAID}, {"functionCall": {"name": "find_room", "args": ARGUMENTS}}]},
            {"parts": [{"functionResponse": {"name": "find_room", "response": {"result": RESULT}}}]},
            {"role": "model", "parts": [{"text": DONE}]},
        ]
    },
    "autogen, an agent's state": {
        "type": "AssistantAgentState",
        "llm_context": {
            "messages": [
                typed("UserMessage", content=ASKED, source="user"),
                typed(
                    "AssistantMessage",
                    content=[{"id": "c1", "name": "find_room", "arguments": TEXT}],
                    thought=SAID,
                    source="booker",
                ),
                typed(
                    "FunctionExecutionResultMessage",
                    content=[{"content": RESULT, "name": "find_room", "call_id": "c1", "is_error": False}],
                ),
                typed("AssistantMessage", content=DONE, source="booker"),
            ]
        },
    },
    "dspy": {
        "messages": [USER, CALLING, ANSWER],
        "response": "ModelResponse(id='1')",
        "outputs": [DONE],
    },
    "http archive": {
        "log": {
            "entries": [
                exchange([USER], json.dumps({"choices": [{"message": CALLING}]})),
                exchange(
                    [USER, CALLING, ANSWER],
                    f"data: {json.dumps({'choices': [{'delta': {'content': DONE}}]})}\n\ndata: [DONE]\n",
                ),
            ]
        }
    },
    "jaeger": {
        "data": [{"traceID": "t", "spans": [jaeger(2, [USER, CALLING, ANSWER], LAST), jaeger(1, [USER], CALLING)]}]
    },
    "vapi": {
        "id": "1",
        "artifact": {
            "messages": [
                {"role": "user", "message": ASKED},
                {"role": "bot", "message": SAID, "secondsFromStart": 2.5},
                {"role": "tool_calls", "message": "", "toolCalls": [CALL]},
                {"role": "tool_call_result", "name": "find_room", "toolCallId": "c1", "result": RESULT},
                {"role": "bot", "message": DONE},
            ]
        },
    },
    "retell": {
        "call_id": "1",
        "transcript_object": [{"role": "user", "content": ASKED}, {"role": "agent", "content": SAID}],
        "transcript_with_tool_calls": [
            {"role": "user", "content": ASKED},
            {"role": "agent", "content": SAID},
            {"role": "tool_call_invocation", "tool_call_id": "c1", "name": "find_room", "arguments": TEXT},
            {"role": "tool_call_result", "tool_call_id": "c1", "content": RESULT},
            {"role": "agent", "content": DONE},
        ],
    },
    "elevenlabs": {
        "transcript": [
            {"role": "user", "message": ASKED, "tool_calls": [], "tool_results": []},
            {
                "role": "agent",
                "message": SAID,
                "tool_calls": [{"request_id": "r1", "tool_name": "find_room", "params_as_json": TEXT}],
            },
            {"role": "agent", "message": None, "tool_results": [{"request_id": "r1", "result_value": RESULT}]},
            {"role": "agent", "message": DONE, "tool_calls": []},
        ]
    },
    "coze": [
        {"role": "user", "type": "question", "content": ASKED},
        {"role": "assistant", "type": "verbose", "content": SAID},
        {"role": "assistant", "type": "function_call", "content": json.dumps({"name": "find_room", "args": ARGUMENTS})},
        {"role": "assistant", "type": "tool_response", "content": RESULT},
        {"role": "assistant", "type": "answer", "content": DONE},
    ],
    "sharegpt, function-response": {
        "conversations": [
            {"from": "human", "value": ASKED},
            {"from": "function-call", "value": json.dumps({"name": "find_room", "arguments": ARGUMENTS})},
            {"from": "function-response", "value": RESULT},
            {"from": "gpt", "value": DONE},
        ]
    },
    "adk, whose contents have no role": {
        "events": [
            {"author": "user", "content": {"parts": [{"text": ASKED}]}},
            {"author": "clerk", "content": {"parts": [{"text": SAID[:4]}]}, "partial": True},
            {
                "author": "clerk",
                "content": {
                    "parts": [{"text": SAID}, {"function_call": {"id": "1", "name": "find_room", "args": ARGUMENTS}}]
                },
            },
            {
                "author": "clerk",
                "content": {"parts": [{"function_response": {"id": "1", "response": {"result": RESULT}}}]},
            },
            {"author": "clerk", "content": {"role": "model"}, "finish_reason": "MAX_TOKENS"},
            {"author": "clerk", "content": {"role": None, "parts": [{"text": DONE}]}},
        ]
    },
    "mastra": {
        "messages": [
            {"role": "user", "content": {"format": 2, "parts": [typed("text", text=ASKED)]}},
            {
                "role": "assistant",
                "content": {
                    "format": 2,
                    "parts": [
                        typed("text", text=SAID),
                        typed(
                            "tool-invocation",
                            toolInvocation={"toolName": "find_room", "args": ARGUMENTS, "result": RESULT},
                        ),
                        typed("text", text=DONE),
                    ],
                },
            },
        ]
    },
    "mistral": {
        "messages": [
            USER,
            {"role": "assistant", "content": f'{SAID}[TOOL_CALLS] [{{"name": "find_room", "arguments": {TEXT}}}]</s>'},
            {"role": "tool", "content": RESULT},
            LAST,
        ]
    },
    "mistral, newer": {
        "messages": [
            USER,
            {"role": "assistant", "content": f"{SAID}[TOOL_CALLS]find_room[ARGS]{TEXT}"},
            {"role": "tool", "content": RESULT},
            LAST,
        ]
    },
    "gpt-oss": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": f"<|channel|>analysis<|message|>{SAID}<|end|><|start|>assistant<|channel|>commentary "
                f"to=functions.find_room <|constrain|>json<|message|>{TEXT}<|call|>",
            },
            {"role": "tool", "content": RESULT},
            {"role": "assistant", "content": f"<|channel|>final<|message|>{DONE}<|return|>"},
        ]
    },
    "microsoft.extensions.ai": {
        "messages": [
            {"role": "user", "contents": [{"$type": "text", "text": ASKED}]},
            {
                "role": "assistant",
                "contents": [
                    {"$type": "text", "text": SAID},
                    {"$type": "functionCall", "callId": "c1", "name": "find_room", "arguments": ARGUMENTS},
                ],
            },
            {"role": "tool", "contents": [{"$type": "functionResult", "callId": "c1", "result": RESULT}]},
            {"role": "assistant", "contents": [{"$type": "text", "text": DONE}]},
        ]
    },
    "llama 3": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": f'{SAID}<|python_tag|>{{"name": "find_room", "parameters": {TEXT}}}<|eom_id|>',
            },
            {"role": "ipython", "content": RESULT},
            LAST,
        ]
    },
    "tool calls as one text": {"messages": [USER, {**CALLING, "tool_calls": json.dumps([CALL])}, ANSWER, LAST]},
}
LINES["cursor"] = [
    {"type": "system", "subtype": "init", "session_id": "s"},
    typed("user", session_id="s", message={"role": "user", "content": [typed("text", text=ASKED)]}),
    typed("assistant", session_id="s", message={"role": "assistant", "content": [typed("text", text=SAID)]}),
    *(
        typed(
            "tool_call",
            subtype=state,
            call_id="c1",
            session_id="s",
            tool_call={"find_roomToolCall": {"args": ARGUMENTS, **result}},
        )
        for state, result in (("started", {}), ("completed", {"result": {"success": {"content": RESULT}}}))
    ),
    typed("assistant", session_id="s", message={"role": "assistant", "content": [typed("text", text=DONE)]}),
]
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
    # In version 4 of the AI SDK the text of a message is always the last step of it.
    said = 2 if name == "ai sdk page, version 4" else 1
    assert [turn.action for turn in trace.steps] == ['find_room({"day": "Fri"})', *[None] * said]
    assert (trace.steps[-1].text, trace.ended) == (DONE, EpisodeEnd.FINISHED)
    assert RESULT in (trace.steps[0].observation or "")
    assert trace.turns[-1].text == DONE
    if not name.startswith("sharegpt"):
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


REPEATED: dict[str, tuple[tuple[Any, ...], ...]] = {
    "langchain, calls twice": ((0, "messages", 1, "tool_calls"),),
    "langchain, responses": ((0, "messages", 1, "tool_calls"),),
    "log of requests": ((0, "response"),),
    "helicone": ((0, "response_body"), (1, "response_body")),
    "bedrock invocations": ((0, "output"),),
    "responses, streamed": ((0, "response", 1), (0, "response", 2)),
    "anthropic, streamed": ((0, "response"), (1, "request", "body", "messages", 1)),
    "ollama, streamed": ((0, "response"), (1, "request", "messages", 1)),
    "jaeger": ((0, "data", 0, "spans", 1, "tags"),),
    "cursor": ((3,),),
    "vapi": ((0, "artifact", "messages", 3, "name"),),
    "retell": ((0, "transcript_object"),),
    "chatgpt": ((0, "mapping", "4"), (0, "mapping", "5", "message", "author", "name")),
    "claude.ai": ((0, "chat_messages", 2, "content", 2, "name"),),
    "autogen, an agent's state": ((0, "llm_context", "messages", 2, "content", 0, "name"),),
}
"""Places whose text stands in the record once more: in the content, in the next request, at the end of a stream."""


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
        moved = holder.pop(place[-1])
        holder[f"unheard_of_{place[-1]}"] = moved
        try:
            groups = read(tmp_path, records)
        except TraceError:
            continue
        trace = groups[0].traces[0]
        same = (trace.prompt, trace.turns, len(groups[0])) == (whole.prompt, whole.turns, 1)
        # A list of messages is found under any name.
        found = (
            isinstance(moved, list)
            and isinstance(moved[0], dict)
            and bool({"role", "messages_and_choices", "author", "info", "parts", "request", "traceID"} & set(moved[0]))
        )
        found = found or any(place[: len(each)] == each for each in REPEATED.get(name, ()))
        if same and not found and not (groups.problems or groups.warnings or trace.notes):
            silent.append(place)
    # What a format writes twice may be lost once.
    twice = {
        ("functionResponse", "name"),
        ("tool_call", "name"),
        (1, "tool_name"),
        ("toolUseResult", "stdout"),
        (4, "toolUseResult"),
        ("payload", "message"),
        (5, "payload"),
        (2, "toolName"),
    }
    assert [place[-2:] for place in silent if place[-2:] not in twice] == []


def event(number: int, name: str, **metadata: Any) -> list[dict[str, Any]]:
    """A call and its result as OpenHands' events."""
    about = {"tool_call_metadata": {"tool_call_id": f"c{number}", **metadata}}
    action = {"id": number, "source": "agent", "action": name, "args": {"thought": SAID if number == 1 else ""}}
    result = {"id": 10 + number, "source": "environment", "observation": name, "content": f"{name} done"}
    return [{**action, **about}, {**result, **about}]


def sdk_event(number: int, name: str) -> list[dict[str, Any]]:
    """The same conversation, as events of the OpenHands SDK."""
    called = {"tool_name": name, "tool_call_id": f"c{number}"}
    action = {"tool_call": {"id": f"c{number}", "name": name, "arguments": "{}"}, "llm_response_id": f"r{number // 3}"}
    thought = [typed("text", text=SAID)] if number == 1 else []
    return [
        {"id": f"a{number}", "kind": "ActionEvent", "source": "agent", "thought": thought, **called, **action},
        {
            "id": f"o{number}",
            "kind": "ObservationEvent",
            "source": "environment",
            **called,
            "observation": f"{name} done",
        },
    ]


def page_call(number: int, name: str) -> dict[str, Any]:
    return typed(f"tool-{name}", toolCallId=f"c{number}", state="output-available", input={}, output=f"{name} done")


PARALLEL: dict[str, list[Any]] = {
    "openhands": [
        {"id": 0, "source": "user", "action": "message", "args": {"content": ASKED}},
        *event(1, "find_room", model_response={"id": "r0"}),
        *event(2, "find_lunch", model_response={"id": "r0"}),
        *event(3, "book", model_response={"id": "r1"}),
        {"id": 9, "source": "agent", "action": "finish", "args": {"final_thought": DONE}},
    ],
    "openhands sdk": [
        {"id": "a", "kind": "MessageEvent", "source": "user", "llm_message": USER},
        *(
            each
            for number, name in enumerate(("find_room", "find_lunch", "book"), 1)
            for each in sdk_event(number, name)
        ),
        {"id": "e", "kind": "MessageEvent", "source": "agent", "llm_message": LAST},
    ],
    "ai sdk page": [
        {"role": "user", "parts": [typed("text", text=ASKED)]},
        {
            "role": "assistant",
            "parts": [
                *(typed("step-start"), typed("text", text=SAID), page_call(1, "find_room"), page_call(2, "find_lunch")),
                *(typed("step-start"), page_call(3, "book"), typed("step-start"), typed("text", text=DONE)),
            ],
        },
    ],
}


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_calls_are_one_step_where_each_is_logged_with_its_result(name: str, tmp_path: Path) -> None:
    trace = read(tmp_path, [PARALLEL[name]])[0].traces[0]
    assert [turn.action for turn in trace.turns] == ["find_room({})\nfind_lunch({})", "book({})", None]
    assert [turn.text for turn in trace.turns[::2]] == [f"{SAID}\n\nfind_room({{}})\nfind_lunch({{}})", DONE]
    results = "(result 1 of 2, find_room)\nfind_room done\n\n(result 2 of 2, find_lunch)\nfind_lunch done"
    assert [turn.observation for turn in trace.turns] == [results, "book done", None]
    assert len(trace.steps) == 3


@pytest.mark.parametrize(
    ("said", "action", "message"),
    [
        ([typed("redacted_thinking", data="x")], None, False),
        ([typed("redacted_thinking", data="x"), typed("text", text=DONE)], None, True),
        ("Which room?</think>\n\n", None, False),
        (f"Which room?</think>\n\n{DONE}", None, True),
        ("<think>Perhaps <code>find_room()</code></think>", None, False),
        (
            "<think>Perhaps <code>look()</code></think><code>find_room()</code>, then <code>x</code>",
            "find_room()",
            False,
        ),
    ],
)
def test_reasoning_is_nothing_that_anybody_receives(
    said: Any, action: str | None, message: bool, tmp_path: Path
) -> None:
    (turn,) = read(tmp_path, [{"messages": [USER, {"role": "assistant", "content": said}]}])[0].traces[0].turns
    assert (turn.action, turn.message) == (action, message)


def test_an_assistants_messages_before_the_sampled_ones_are_no_steps(tmp_path: Path) -> None:
    shots: list[dict[str, Any]] = [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Nothing."}]
    old = {"prompt": [*shots, USER], "completion": [CALLING, ANSWER, LAST]}
    nodes = [
        {
            "parent": place - 1 if place else None,
            "message": message,
            "sampled": place > 2 and message["role"] == "assistant",
        }
        for place, message in enumerate([*shots, USER, CALLING, ANSWER, LAST])
    ]
    for record in (old, {"task": {"data": {"id": "t"}}, "nodes": nodes}):
        trace = read(tmp_path, [record])[0].traces[0]
        assert ("earlier assistant", "Nothing.") in [(each.role, each.content) for each in trace.prompt]
        assert [turn.text for turn in trace.steps] == [f'{SAID}\n\nfind_room({{"day": "Fri"}})', DONE]


def test_a_log_whose_histories_leave_hidden_reasoning_out_is_one_conversation(tmp_path: Path) -> None:
    asks = {"role": "assistant", "content": [typed("redacted_thinking", data="x"), typed("text", text=SAID)]}
    again = [USER, {"role": "assistant", "content": [typed("text", text=SAID)]}, USER]
    calls = [{"request": {"messages": each}, "response": asks} for each in ([USER], again)]
    (trace,) = read(tmp_path, calls)[0].traces
    assert [turn.is_step for turn in trace.turns] == [True, False, True]


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


def test_claude_codes_files_of_sub_agents_summaries_and_what_is_nobodys_word(tmp_path: Path) -> None:
    session = [
        claude(1, "user", "Caveat: the messages below are local commands.", isMeta=True),
        claude(2, "user", ASKED),
        claude(3, "assistant", [typed("tool_use", id="t1", name="Task", input={"prompt": "look"})]),
        claude(4, "user", [typed("tool_result", tool_use_id="t1", content=RESULT)], toolUseResult={"agentId": "a7"}),
        {
            **claude(5, "user", "This session is being continued from a previous conversation. A summary."),
            "parentUuid": None,
        },
        claude(6, "assistant", [typed("text", text="API Error: overloaded")], isApiErrorMessage=True),
        claude(7, "assistant", [typed("text", text=DONE)]),
    ]
    session[1]["parentUuid"] = None
    agent = [
        claude(8, "user", "look", isSidechain=True, agentId="a7"),
        claude(
            9, "assistant", [typed("tool_use", id="t9", name="Grep", input=ARGUMENTS)], isSidechain=True, agentId="a7"
        ),
        claude(10, "user", [typed("tool_result", tool_use_id="t9", content="3 lines")], isSidechain=True, agentId="a7"),
    ]
    for name, lines in (("agent-a7.jsonl", agent), ("s1.jsonl", session)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (group,) = load_traces(tmp_path)
    (trace,) = group.traces
    assert [(message.role, message.content) for message in trace.prompt][1:] == [("user", ASKED)]
    assert [turn.role for turn in trace.turns] == [
        "assistant",
        "sub-agent",
        "sub-agent's tool",
        "user",
        "system",
        "assistant",
    ]
    assert trace.turns[0].observation == RESULT
    assert "3 lines" in trace.turns[2].text
    assert trace.turns[-1].text == DONE


def test_two_messages_of_claude_code_are_two_steps_and_those_of_the_program_none(tmp_path: Path) -> None:
    lines = [
        claude(1, "user", ASKED),
        claude(2, "assistant", [typed("text", text=SAID)]),
        claude(3, "assistant", [typed("text", text=DONE)]),
        claude(4, "assistant", [typed("text", text="No response requested.")]),
    ]
    lines[3]["message"]["model"] = "<synthetic>"
    trace = read(tmp_path, lines)[0].traces[0]
    assert [(turn.role, turn.text) for turn in trace.turns] == [
        ("assistant", SAID),
        ("assistant", DONE),
        ("system", "No response requested."),
    ]
    assert [turn.is_step for turn in trace.turns] == [True, True, False]


def test_openhands_own_actions_are_no_steps(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"source": "user", "action": "message", "args": {"content": ASKED}},
        {"source": "agent", "action": "run", "args": {"command": "ls", "thought": SAID}},
        {"source": "agent", "action": "condensation_request", "args": {}},
        {"source": "agent", "action": "condensation", "args": {"forgotten_event_ids": [1], "summary": "It ran ls."}},
        {"source": "agent", "action": "null", "args": {}},
        {"source": "agent", "action": "change_agent_state", "args": {"agent_state": "finished"}},
        {"source": "agent", "action": "finish", "args": {"final_thought": DONE}},
    ]
    (trace,) = read(tmp_path, [{"instance_id": "a", "history": events}])[0].traces
    assert [(turn.role, turn.is_step) for turn in trace.turns] == [
        ("assistant", True),
        ("side call", False),
        ("assistant", True),
    ]
    assert trace.turns[1].text == "It ran ls."


def test_what_a_benchmark_lets_the_agent_say_is_no_step(tmp_path: Path) -> None:
    greeting = {"role": "assistant", "content": "Hi! How can I help you today?"}
    simulated = {"task_id": "1", "termination_reason": "user_stop", "messages": [greeting, USER, LAST]}
    (trace,) = read(tmp_path, [simulated])[0].traces
    assert [(turn.role, turn.is_step) for turn in trace.turns] == [
        ("earlier assistant", False),
        ("user", False),
        ("assistant", True),
    ]
    given = [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Nothing.", "source": "input"}]
    sample = {"id": "a", "messages": [*given, USER, {**LAST, "source": "generate"}]}
    for record in ({"eval": {"task": "t"}, "status": "success", "samples": [sample]}, sample):
        (trace,) = read(tmp_path, [record])[0].traces
        assert [turn.text for turn in trace.turns] == [DONE]
        assert [message.role for message in trace.prompt] == ["user", "earlier assistant", "user"]
    # If agents run one after another, the later one is given the messages of the earlier one.
    written = {"role": "assistant", "content": "First.", "source": "input", "model": "m"}
    (trace,) = read(tmp_path, [{"id": "a", "messages": [USER, written, {**LAST, "source": "generate"}]}])[0].traces
    assert [(turn.text, turn.is_step) for turn in trace.turns] == [("First.", True), (DONE, True)]


def test_what_claude_code_and_codex_print(tmp_path: Path) -> None:
    """Neither says what was asked; the prompt was on the command line."""
    claude_lines = [
        typed("system", subtype="init", session_id="s", tools=["find_room"]),
        typed(
            "assistant",
            session_id="s",
            message={
                "id": "m",
                "role": "assistant",
                "content": [typed("tool_use", id="t", name="find_room", input=ARGUMENTS)],
            },
        ),
        typed(
            "user",
            session_id="s",
            message={"role": "user", "content": [typed("tool_result", tool_use_id="t", content=RESULT)]},
        ),
        typed(
            "assistant", session_id="s", message={"id": "n", "role": "assistant", "content": [typed("text", text=DONE)]}
        ),
        typed("result", session_id="s", result=DONE),
    ]
    codex_lines = [
        typed("thread.started", thread_id="t"),
        typed("item.completed", item=typed("reasoning", id="0", text=SAID)),
        typed("item.started", item=typed("command_execution", id="1", command="ls")),
        typed(
            "item.completed",
            item=typed("command_execution", id="1", command="ls", aggregated_output=RESULT, exit_code=0),
        ),
        typed("item.completed", item=typed("agent_message", id="2", text=DONE)),
    ]
    for lines, action in (
        (claude_lines, 'find_room({"day": "Fri"})'),
        (codex_lines, 'command_execution({"command": "ls"})'),
    ):
        groups = read(tmp_path, lines)
        (trace,) = groups[0].traces
        assert (trace.steps[0].action, trace.steps[0].observation) == (action, RESULT)
        assert trace.turns[-1].text == DONE
        assert trace.notes == ("the trace does not contain the agent's task",)
        assert not groups.warnings


def span(number: int, parent: int, operation: str, trace: str = "t", **attributes: Any) -> dict[str, Any]:
    named = {"gen_ai.operation.name": operation} | {
        f"gen_ai.{key.replace('_', '.')}": value if isinstance(value, str) else json.dumps(value)
        for key, value in attributes.items()
    }
    return {
        "traceId": trace,
        "spanId": f"s{number}",
        "parentSpanId": f"s{parent}",
        "startTimeUnixNano": str(number),
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in named.items()],
    }


OTEL_USER = {"role": "user", "parts": [typed("text", content=ASKED)]}
OTEL_CALL = {"role": "assistant", "parts": [typed("tool_call", id="c", name="find_room", arguments=ARGUMENTS)]}
OTEL_RESULT = {"role": "tool", "parts": [typed("tool_call_response", id="c", response=RESULT)]}
OTEL_LAST = {"role": "assistant", "parts": [typed("text", content=DONE)]}


def test_spans_without_a_conversations_name_belong_to_that_of_their_trace(tmp_path: Path) -> None:
    calls = [
        each
        for number, name in ((1, "one"), (11, "two"))
        for each in (
            span(number, 0, "invoke_agent"),
            span(
                number + 1,
                number,
                "chat",
                conversation_id=name,
                input_messages=[OTEL_USER],
                output_messages=[OTEL_CALL],
            ),
            span(
                number + 2,
                number,
                "execute_tool",
                tool_name="find_room",
                tool_call_id="c",
                tool_call_result=f"{name}: free",
            ),
        )
    ]
    for spans in (calls[:3], calls):
        groups = read(tmp_path, [{"resourceSpans": [{"scopeSpans": [{"spans": [each]}]}]} for each in spans])
        assert (list(groups.problems), list(groups.warnings)) == ([], [])
        observed = [trace.steps[0].observation for group in groups for trace in group.traces]
        assert observed == ["one: free", "two: free"][: len(spans) // 3]


@pytest.mark.parametrize(("above", "last"), [(0, ("assistant", True)), (1, ("sub-agent", False))])
def test_an_agent_that_takes_over_the_conversation_is_no_sub_agent(
    above: int, last: tuple[str, bool], tmp_path: Path
) -> None:
    """In a handoff the second agent's span is beside that of the first; a sub-agent's is below it."""
    later = [OTEL_USER, OTEL_CALL, OTEL_RESULT, OTEL_LAST, OTEL_USER]
    spans = [
        span(1, 0, "invoke_agent"),
        span(2, 1, "chat", input_messages=[OTEL_USER], output_messages=[OTEL_CALL]),
        span(3, above, "invoke_agent"),
        span(4, 3, "chat", input_messages=[OTEL_USER, OTEL_CALL, OTEL_RESULT], output_messages=[OTEL_LAST]),
        span(5, 1, "chat", input_messages=later, output_messages=[OTEL_CALL]),
    ]
    turns = read(tmp_path, [{"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}])[0].traces[0].turns
    said = [(turn.role, turn.is_step) for turn in turns if turn.role != "user"]
    assert [*said[:2], said[-1]] == [("assistant", True), last, ("assistant", True)]


@pytest.mark.parametrize("between", ["invoke_agent", "execute_tool"])
def test_no_agent_takes_over_in_a_call_outside_all_agents_or_below_a_tool(between: str, tmp_path: Path) -> None:
    """A title is asked for outside the agent's span; a tool's agent may be given the conversation."""
    title = {"role": "user", "parts": [{"type": "text", "content": "Now a title."}]}
    first, second = (1, 0) if between == "invoke_agent" else (0, 3)
    spans = [
        span(1, 0, between),
        span(2, first, "chat", input_messages=[OTEL_USER], output_messages=[OTEL_CALL]),
        span(3, 1, "invoke_agent"),
        span(4, second, "chat", input_messages=[OTEL_USER, OTEL_CALL, title], output_messages=[OTEL_LAST]),
    ]
    turns = read(tmp_path, [{"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}])[0].traces[0].turns
    assert [turn.role for turn in turns] == ["assistant", "sub-agent"]


def test_an_agents_span_alone_holds_its_conversation(tmp_path: Path) -> None:
    said = [OTEL_CALL, OTEL_RESULT, OTEL_LAST]
    spans = [span(1, 0, "invoke_agent", input_messages=[OTEL_USER], output_messages=said)]
    trace = read(tmp_path, [{"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}])[0].traces[0]
    assert [(turn.action, turn.observation) for turn in trace.steps][:1] == [('find_room({"day": "Fri"})', RESULT)]
    assert trace.turns[-1].text == DONE


def test_a_file_a_call_is_one_conversation_and_a_bad_one_takes_no_other(tmp_path: Path) -> None:
    log = [
        {"request": {"messages": [USER]}, "response": CALLING},
        {"request": {"messages": [USER, CALLING, ANSWER]}, "response": LAST},
        {"request": {"messages": [USER]}, "response": {"role": "assistant", "tool_calls": [7]}},
    ]
    for number, record in enumerate(reversed(log)):
        (tmp_path / f"{number}.json").write_text(json.dumps(record), encoding="utf-8")
    groups = load_traces(tmp_path)
    (trace,) = groups[0].traces
    assert (trace.steps[0].observation, trace.turns[-1].text) == (RESULT, DONE)
    assert ["0.json" in problem for problem in groups.problems] == [True]


def test_equal_rollouts_stay_two_and_a_call_that_is_logged_twice_is_one(tmp_path: Path) -> None:
    prompt, completion = DOCUMENTS["chatml, prompt and completion"].values()
    (group,) = read(tmp_path, [{"input": prompt, "output": completion, "score": score} for score in (0, 1)])
    assert [len(trace.turns) for trace in group.traces] == [2, 2]
    first = {"request": {"messages": [USER]}, "response": {"id": "x1", "choices": [{"message": CALLING}]}}
    then = {"request": {"messages": [USER, CALLING, ANSWER]}, "response": {"id": "x2", "choices": [{"message": LAST}]}}
    (group,) = read(tmp_path, [first, first, then])
    assert [trace.turns[-1].text for trace in group.traces] == [DONE]


def test_json_text_is_decoded_where_it_is_a_request_or_response_and_stays_an_answer(tmp_path: Path) -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "find_room", "description": "Rooms by day."}}])
    log = [
        {
            "request": {"body": json.dumps({"messages": messages, "tools": tools})},
            "response": {"status": 200, "body": json.dumps({"choices": [{"message": reply}]})},
        }
        for messages, reply in (([USER], CALLING), ([USER, CALLING, ANSWER], LAST))
    ]
    trace = read(tmp_path, log)[0].traces[0]
    assert "Rooms by day." in trace.prompt[-1].content
    assert (trace.steps[0].observation, trace.turns[-1].text) == (RESULT, DONE)
    answer = json.dumps({"room": 4, "content": "booked"})
    trace = read(tmp_path, [{"prompt": ASKED, "completion": answer}])[0].traces[0]
    assert trace.turns[-1].text == answer


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
    for name, problem in (("bomb.jsonl.gz", "decompress it first"), ("pipe.jsonl", "not a file or a folder")):
        with pytest.raises(TraceError, match=problem):
            load_traces(tmp_path / name)
    with pytest.raises(TraceError, match="not a file or a folder"):
        load_traces("/dev/zero")


def test_text_of_the_ai_sdk_4_follows_the_calls_of_its_message_unless_one_is_open(tmp_path: Path) -> None:
    def invoked(number: int, step: int, **result: Any) -> dict[str, Any]:
        named = {"toolCallId": f"c{number}", "toolName": f"tool{number}", "args": {}, "step": step}
        return {**named, "state": "result" if result else "call", **result}

    calls = [invoked(1, 0, result="r1"), invoked(2, 0, result="r2"), invoked(3, 1, result="r3")]
    (trace,) = read(tmp_path, [[USER, {**LAST, "toolInvocations": calls}]])[0].traces
    assert [turn.text for turn in trace.turns] == ["tool1({})\ntool2({})", "tool3({})", DONE]
    assert trace.turns[1].observation == "r3"
    (trace,) = read(tmp_path, [[USER, {**LAST, "toolInvocations": [invoked(1, 0)]}]])[0].traces
    assert [turn.text for turn in trace.turns] == [f"{DONE}\n\ntool1({{}})"]
    twice = {**LAST, "reasoning": "Hm.", "parts": [typed("text", text=SAID), typed("reasoning", reasoning="Hm.")]}
    (trace,) = read(tmp_path, [[USER, twice]])[0].traces
    assert trace.turns[0].text == f"{SAID}\n<think>Hm.</think>"
    refused = typed("tool-book", toolCallId="c", state="output-denied", input={}, approval={"reason": "not today"})
    (trace,) = read(tmp_path, [[USER, {"role": "assistant", "parts": [refused, typed("text", text=DONE)]}]])[0].traces
    assert [(turn.text, turn.observation) for turn in trace.turns] == [("book({})", "[error] not today"), (DONE, None)]


def test_instructions_and_the_providers_own_results_of_pydantic_ai(tmp_path: Path) -> None:
    said = [
        {"kind": "request", "instructions": "Be brief.", "parts": [{"part_kind": "user-prompt", "content": ASKED}]},
        {
            "kind": "response",
            "parts": [
                {"part_kind": "builtin-tool-call", "tool_name": "search", "args": {}, "tool_call_id": "c"},
                {"part_kind": "builtin-tool-return", "tool_name": "search", "content": RESULT, "tool_call_id": "c"},
                {"part_kind": "text", "content": DONE},
            ],
        },
    ]
    (trace,) = read(tmp_path, [said])[0].traces
    assert [(each.role, each.content) for each in trace.prompt] == [("system", "Be brief."), ("user", ASKED)]
    assert [(turn.text, turn.observation) for turn in trace.turns] == [("search({})", RESULT), (DONE, None)]


def test_requests_whose_answers_failed_or_were_not_logged_are_no_further_traces(tmp_path: Path) -> None:
    histories: list[list[Any]] = [[USER], [USER, CALLING, ANSWER]]
    answered = [
        {"request": {"messages": each}, "response": reply}
        for each, reply in zip(histories, (CALLING, LAST), strict=True)
    ]
    failed = {"request": {"messages": histories[1]}, "response": None}
    logs: list[list[dict[str, Any]]] = [
        [answered[0], failed, answered[1]],
        [{"request": {"messages": each}} for each in [*histories, [*histories[1], LAST]]],
    ]
    for log in logs:
        groups = read(tmp_path, log)
        assert [[turn.text for turn in trace.turns][-1] for group in groups for trace in group.traces] == [DONE]


def test_a_log_whose_histories_lose_their_beginning_is_one_conversation(tmp_path: Path) -> None:
    again = {"role": "assistant", "content": "Once more.", "tool_calls": [{**CALL, "id": "c2"}]}
    histories = [[USER], [USER, CALLING, ANSWER], [again, {**ANSWER, "tool_call_id": "c2"}]]
    replies = (CALLING, again, LAST)
    log = [{"request": {"messages": h}, "response": reply} for h, reply in zip(histories, replies, strict=True)]
    (trace,) = (trace for group in read(tmp_path, log) for trace in group.traces)
    assert [turn.observation for turn in trace.turns] == [RESULT, RESULT, None]


def test_conversations_by_name_are_a_trace_each(tmp_path: Path) -> None:
    groups = read(tmp_path, [{"chosen": [USER, LAST], "rejected": [USER, {**LAST, "content": "No."}]}])
    assert [trace.turns[0].text for group in groups for trace in group.traces] == [DONE, "No."]


def test_an_answer_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    stream = [{"messageStart": {"role": "assistant"}}, {"contentBlockDelta": {"delta": {"text": "Room"}}}]
    with pytest.raises(TraceError, match="the model's answer is a list of an unknown form"):
        read(tmp_path, [{"messages": [USER], "response": stream}])
    (tmp_path / "traces.json").write_text('data: {"choices": []}\n\n', encoding="utf-8")
    with pytest.raises(TraceError, match="server-sent events without their request"):
        load_traces(tmp_path / "traces.json")
    (trace,) = read(tmp_path, [{"messages": [USER, CALLING, ANSWER], "unheard_of": "Done."}])[0].traces
    assert trace.notes == ("the trace ends without an answer of the agent",)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_streamed_answer_may_contain_other_line_separators(tmp_path: Path, end: str) -> None:
    stream = f'data: {{"choices": [{{"delta": {{"content": "one\u2028two"}}}}]}}{end}{end}data: [DONE]{end}'
    (trace,) = read(tmp_path, [{"request": {"messages": [USER]}, "response": stream}])[0].traces
    assert trace.turns[0].text == "one\u2028two"


def test_base64_within_a_text_is_described(tmp_path: Path) -> None:
    data = "iVBORw0KGgo" + "AbC1" * 200
    results = [f"![a](data:image/png;base64,{data}) end", json.dumps({"image": data, "n": 1})]
    said = [each for result in results for each in (CALLING, {**ANSWER, "content": result})]
    (trace,) = read(tmp_path, [[USER, *said, {**LAST, "content": f"{DONE} {results[0]}"}]])[0].traces
    assert [turn.observation for turn in trace.steps] == [
        "![a]([image/png, 608 bytes]) end",
        '{"image": "[base64, 608 bytes]", "n": 1}',
        None,
    ]
    assert trace.turns[-1].text == f"{DONE} ![a]([image/png, 608 bytes]) end"


def test_messages_of_assistants_are_sorted_and_answers_alone_are_no_codex_session(tmp_path: Path) -> None:
    thread = [
        {"object": "thread.message", "created_at": at, "role": role, "content": [typed("text", text={"value": said})]}
        for at, role, said in ((2, "assistant", DONE), (1, "user", ASKED))
    ]
    (trace,) = read(tmp_path, [{"object": "list", "data": thread}])[0].traces
    assert (trace.prompt[0].content, trace.turns[0].text) == (ASKED, DONE)
    answer = typed("message", id="m", role="assistant", model="x", content=[typed("text", text=DONE)])
    (trace,) = read(tmp_path, [USER, answer])[0].traces
    assert (trace.format, trace.prompt[0].content, trace.turns[0].text) == ("openai-chat", ASKED, DONE)


def test_a_code_agents_call_of_its_interpreter_is_the_code_before_it(tmp_path: Path) -> None:
    called = [{"id": "c", "type": "function", "function": {"name": "python_interpreter", "arguments": "find_room()"}}]
    said = [
        {"role": "assistant", "content": f"{SAID}\n<code>\nfind_room()\n</code>"},
        {"role": "tool-call", "content": f"Calling tools:\n{called}"},
        {"role": "tool-response", "content": f"Observation:\n{RESULT}"},
    ]
    (trace,) = read(tmp_path, [[USER, *said, LAST]])[0].traces
    assert [(turn.action, turn.observation) for turn in trace.turns] == [("find_room()", RESULT), (None, None)]


def test_parts_that_a_database_keeps_as_text_are_parts_and_a_models_json_stays(tmp_path: Path) -> None:
    parts_ = [
        [typed("text", text=SAID), typed("tool_use", id="c", name="find_room", input=ARGUMENTS)],
        [typed("tool_result", tool_use_id="c", content=RESULT)],
    ]
    said = [
        {"role": role, "content": json.dumps(each)} for role, each in zip(("assistant", "user"), parts_, strict=True)
    ]
    answers = ['[{"type": "file", "name": "a.txt"}]', '[{"text": "Paris", "label": "LOC"}]', "[]"]
    for answer in answers:
        (trace,) = read(tmp_path, [[USER, *said, {"role": "assistant", "content": answer}]])[0].traces
        assert [(turn.action, turn.observation) for turn in trace.turns] == [
            ('find_room({"day": "Fri"})', RESULT),
            (None, None),
        ]
        assert trace.turns[-1].text == answer


def test_fields_that_tables_fill_with_null_change_nothing(tmp_path: Path) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(each) for key, each in value.items()}
        if not isinstance(value, list):
            return value
        rows = [filled(each) for each in value]
        keys = sorted({key for row in rows if isinstance(row, dict) for key in row})
        return [{**dict.fromkeys(keys), **row} if isinstance(row, dict) else row for row in rows]

    for name, document in DOCUMENTS.items():
        (trace,), (table,) = (read(tmp_path, [each])[0].traces for each in (document, filled(document)))
        assert (name, table.prompt, table.turns) == (name, trace.prompt, trace.turns)


def test_answers_that_are_blocks_or_whose_calls_have_no_type(tmp_path: Path) -> None:
    called = {"toolCallId": "c", "toolName": "find_room", "args": ARGUMENTS}
    blocks = [typed("text", text=SAID), typed("tool_use", id="c", name="find_room", input=ARGUMENTS)]
    step = {"text": SAID, "finishReason": "tool-calls", "toolCalls": [called]}
    for reply, observed in (
        (blocks, None),
        (step, None),
        ({**step, "toolResults": [{**called, "result": RESULT}]}, RESULT),
        ({"parts": [{"text": SAID}, {"functionCall": {"name": "find_room", "args": ARGUMENTS}}]}, None),
    ):
        (trace,) = read(tmp_path, [{"messages": [USER], "response": reply}])[0].traces
        expected = (f'{SAID}\n\nfind_room({{"day": "Fri"}})', observed)
        assert [(turn.text, turn.observation) for turn in trace.turns] == [expected]


def test_fields_of_another_dialect_beside_a_role_take_no_content(tmp_path: Path) -> None:
    said = [{**USER, "from": "Ann"}, {**LAST, "from": "desk", "data": {"role": "user"}, "code_blocks": [{"code": "x"}]}]
    (trace,) = read(tmp_path, [{"messages": said}])[0].traces
    assert ([each.content for each in trace.prompt], trace.turns[0].text) == ([ASKED], DONE)
    assert trace.turns[0].action is None


def test_names_with_dots_within_a_spans_values_stay(tmp_path: Path) -> None:
    def listed(*values: Any) -> dict[str, Any]:
        return {"arrayValue": {"values": list(values)}}

    def keyed(**values: Any) -> dict[str, Any]:
        return {"kvlistValue": {"values": [{"key": key, "value": value} for key, value in values.items()]}}

    def text(value: str) -> dict[str, str]:
        return {"stringValue": value}

    arguments = keyed(**{"room.day": text("Fri"), "0": text("x")})
    call = keyed(type=text("tool_call"), id=text("c"), name=text("find_room"), arguments=arguments)
    one = span(1, 0, "chat", input_messages=[OTEL_USER])
    said = listed(keyed(role=text("assistant"), parts=listed(call)))
    one["attributes"].append({"key": "gen_ai.output.messages", "value": said})
    (trace,) = read(tmp_path, [{"resourceSpans": [{"scopeSpans": [{"spans": [one]}]}]}])[0].traces
    assert trace.steps[0].action == 'find_room({"room.day": "Fri", "0": "x"})'


def in_short(groups: Groups) -> list[Any]:
    """Of the only trace: what was asked, then text and observation of each turn."""
    (trace,) = groups[0].traces
    return [trace.task, *((turn.text, turn.observation) for turn in trace.turns)]


CALLED = 'find_room({"day": "Fri"})'
IN_SHORT = [ASKED, (f"{SAID}\n\n{CALLED}", RESULT), (DONE, None)]


def test_langchains_class_names_with_contents_in_parts_are_no_agents(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"HumanMessage": {"content": [typed("text", text=ASKED)]}}
    fields["AIMessage"] = {"content": [typed("text", text=SAID)], "tool_calls": [LC_CALL]}
    fields["ToolMessage"] = {"content": [typed("text", text=RESULT)], "tool_call_id": "c1"}
    for made in (constructed, typed):
        messages = [made(name, **each) for name, each in fields.items()]
        assert in_short(read(tmp_path, [{"messages": [*messages, made("AIMessage", content=DONE)]}])) == IN_SHORT


def test_the_id_of_a_langchain_message_is_not_that_of_its_call(tmp_path: Path) -> None:
    messages = [
        typed("human", content=ASKED, id="m1"),
        typed("ai", content=SAID, tool_calls=[LC_CALL], id="m2"),
        typed("tool", content=RESULT, tool_call_id="", name="find_room", id="m3"),
        typed("ai", content=DONE, id="m4"),
    ]
    assert in_short(read(tmp_path, [{"messages": messages}])) == IN_SHORT


def test_autogens_summary_repeats_calls(tmp_path: Path) -> None:
    call, result = {"id": "c", "name": "find_room", "arguments": TEXT}, {"call_id": "c", "content": RESULT}
    messages = [
        typed("TextMessage", source="user", content=ASKED),
        typed("ToolCallRequestEvent", source="clerk", content=[call]),
        typed("ToolCallExecutionEvent", source="clerk", content=[result]),
        typed("ToolCallSummaryMessage", source="clerk", content=DONE, tool_calls=[call], results=[result]),
    ]
    assert in_short(read(tmp_path, [{"messages": messages}])) == [ASKED, (CALLED, RESULT), (DONE, None)]


@pytest.mark.parametrize("output", [[], False, 0, "", {}])
def test_an_empty_result_is_a_result(output: object, tmp_path: Path) -> None:
    called = typed("tool-find_room", toolCallId="c", state="output-available", input=ARGUMENTS, output=output)
    page = {"role": "assistant", "parts": [called, typed("text", text=DONE)]}
    empty = output if isinstance(output, str) else json.dumps(output)
    assert in_short(read(tmp_path, [{"messages": [USER, page]}])) == [ASKED, (CALLED, empty), (DONE, None)]


def test_results_whose_fields_have_names_of_calls_and_results_are_complete(tmp_path: Path) -> None:
    phoned = [{"call_id": "7", "caller": "Ann"}, {"call_id": "8", "caller": "Bob"}]
    logged = json.dumps([typed("phone_call", id="7", text="Ann", result="voicemail")])
    for result in (phoned, logged, {"tool_result": {"rows": 3, "content": "x"}}, json.dumps([{"call_id": "7"}])):
        text = result if isinstance(result, str) else json.dumps(result)
        (trace,) = read(tmp_path, [{"messages": [USER, CALLING, {**ANSWER, "content": result}, LAST]}])[0].traces
        assert (trace.turns[0].observation, trace.notes) == (text, ())
    assert in_short(read(tmp_path, [{"messages": [USER, {**LAST, "content": logged}]}])) == [ASKED, (logged, None)]
    measured = typed("temperature", value=21, unit="C")
    item = typed("mcp_call", id="c", name="find_room", arguments=TEXT, output=measured)
    found = in_short(read(tmp_path, [{"input": ASKED, "output": [item]}]))
    assert found == [ASKED, (CALLED, json.dumps(measured))]


def test_fields_of_gemini_cli_in_other_forms_leave_a_message_readable(tmp_path: Path) -> None:
    for thoughts in ("Look first.", ["Look first."], {"text": "Look first."}):
        (trace,) = read(tmp_path, [{"messages": [USER, {**CALLING, "thoughts": thoughts}, ANSWER, LAST]}])[0].traces
        assert trace.turns[0].text.endswith(f"{SAID}\n\n{CALLED}")
    written = {**CALLING, "tool_calls": None, "toolCalls": [json.dumps(CALL)]}
    assert in_short(read(tmp_path, [{"messages": [USER, written, ANSWER, LAST]}])) == IN_SHORT
    value = [{"role": "user", "from": "human", "value": ASKED}, {"role": "assistant", "from": "gpt", "value": DONE}]
    assert in_short(read(tmp_path, [{"messages": value}])) == [ASKED, (DONE, None)]


def test_events_with_messages_and_choices_are_no_conversation(tmp_path: Path) -> None:
    path = tmp_path / "events.json"
    path.write_text(json.dumps([claude(1, "user", ASKED), claude(2, "assistant", DONE)]))
    assert load_traces(path)[0].traces[0].format == "claude-code"
    answer = {"choices": [{"index": 0, "message": LAST}]}
    assert in_short(read(tmp_path, [{"messages": [USER], "body": answer, "response": answer}])) == [ASKED, (DONE, None)]


def attributed(**attributes: Any) -> dict[str, Any]:
    """A span of a model call with these attributes; ``__`` stands for a dot."""
    named = {key.replace("__", "."): value for key, value in attributes.items()}
    return {"traceId": "t", "spanId": "s", "startTimeUnixNano": "1", "attributes": named}


PROMPTED = {"gen_ai__prompt__0__role": "user", "gen_ai__prompt__0__content": ASKED}
COMPLETED = {"gen_ai__completion__0__role": "assistant", "gen_ai__completion__0__content": DONE}


def test_attributes_beside_flattened_messages_are_no_messages(tmp_path: Path) -> None:
    for more in (
        {"gen_ai__prompt__prompt_filter_results": "[]", "gen_ai__completion__content_filter_results": "[]"},
        {"input__value": '{"kwargs": {}}', "output__value": "other"},
        {"gen_ai__prompt": "other"},
    ):
        assert in_short(read(tmp_path, [attributed(**PROMPTED, **COMPLETED, **more)])) == [ASKED, (DONE, None)]
    named = [{"gen_ai__prompt__0__user": ASKED}, {"gen_ai__input__messages": json.dumps([OTEL_USER])}]
    beside: dict[str, Any] = {"gen_ai__prompt__name": "booking", "gen_ai__output__messages__count": 1}
    for prompt in (*named, {**named[1], **beside}):
        assert in_short(read(tmp_path, [attributed(**prompt, **COMPLETED)])) == [ASKED, (DONE, None)]


def test_an_attribute_keeps_its_value_where_others_are_below_its_name(tmp_path: Path) -> None:
    said = {"gen_ai.input.messages": json.dumps([OTEL_USER]), "gen_ai.output.messages": json.dumps([OTEL_LAST])}
    counts = {"gen_ai.usage.output_tokens": 6, "gen_ai.usage.output_tokens.reasoning": 2, "gen_ai.input.messages.n": 1}
    for attributes in ({**said, **counts}, dict(reversed([*said.items(), *counts.items()]))):
        (trace,) = read(tmp_path, [attributed(**attributes)])[0].traces
        assert (trace.task, trace.turns[0].text, trace.turns[0].tokens) == (ASKED, DONE, 6)


@pytest.mark.parametrize("output", [{"2024": 7, "2023": 5}, {"report.pdf": "found"}, [{"tool.name": "x"}]])
def test_names_in_the_output_of_an_observation_are_its_own(output: object, tmp_path: Path) -> None:
    def observed(number: int, type_: str, given: object, output: object) -> dict[str, Any]:
        about = {"id": str(number), "traceId": "t", "type": type_, "name": "find_room", "startTime": str(number)}
        return {**about, "parentObservationId": None, "input": given, "output": output}

    observations = [observed(1, "GENERATION", [USER], CALLING), observed(2, "TOOL", ARGUMENTS, output)]
    found = in_short(read(tmp_path, [{"id": "t", "observations": observations}]))
    assert found == [ASKED, (f"{SAID}\n\n{CALLED}", json.dumps(output))]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"model": "m", "message": LAST, "done": True}, DONE),
        ({"model": "m", "response": DONE, "done": True}, DONE),
        ({"object": "chat.completion", "choices": [{"index": 0, "message": LAST}]}, DONE),
        ({"candidates": [{"content": {"role": "model", "parts": [{"text": DONE}]}}]}, DONE),
    ],
)
def test_an_answer_whose_request_was_not_logged_is_a_trace(answer: dict[str, Any], said: str, tmp_path: Path) -> None:
    traces = [trace for group in read(tmp_path, [answer, answer]) for trace in group.traces]
    assert [(trace.turns[0].text, trace.notes) for trace in traces] == [
        (said, ("the trace does not contain the agent's task",))
    ] * 2


@pytest.mark.parametrize(
    "record",
    [
        {"question": ASKED, "choices": ["A", "B"]},
        {"id": 1, "done": True, "response": "ok"},
        {"model": "m", "message": LAST, "done": False},
    ],
)
def test_choices_jobs_and_pieces_of_a_stream_are_no_answers(record: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="unknown format"):
        read(tmp_path, [record])
    # The format of the lines before does not make them answers, either.
    assert [len(group) for group in read(tmp_path, [DOCUMENTS["openai"], record])] == [1]


def test_of_two_conversations_the_fuller_one_is_read_if_it_is_the_same(tmp_path: Path) -> None:
    judged = [LAST, {"role": "user", "content": "Was it good?"}, {"role": "assistant", "content": "Yes."}]
    trace = read(tmp_path, [{"history": [USER, LAST], "grading": judged}])[0].traces[0]
    assert [turn.text for turn in trace.turns] == [DONE]


def test_a_retry_after_an_empty_answer_continues_the_conversation(tmp_path: Path) -> None:
    empty, said = {"role": "assistant", "content": ""}, {"role": "assistant", "message": LAST}
    asked = {"messages": [USER, CALLING, ANSWER]}
    ((trace,),) = (g.traces for g in read(tmp_path, [{"request": asked, "response": each} for each in (empty, said)]))
    assert [turn.text for turn in trace.turns[1:]] == [DONE]


def chunk(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta}]}


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([chunk(refusal="I will "), chunk(refusal="not.")], "[refusal] I will not."),
        (
            [
                chunk(function_call={"name": "find_room", "arguments": TEXT[:5]}),
                chunk(function_call={"arguments": TEXT[5:]}),
            ],
            'find_room({"day": "Fri"})',
        ),
        (
            [{"response": "Yes", "done": False}, {"response": ".", "thinking": "Hm.", "done": True}],
            "<think>Hm.</think>\nYes.",
        ),
        ([chunk(content="Y"), {"choices": [{"index": 1, "delta": {"content": "N"}}]}, chunk(content="es.")], "Yes."),
        (
            [
                chunk(tool_calls=[{"index": 0, "id": each, "function": {"name": each, "arguments": "{}"}}])
                for each in ("a", "b")
            ],
            "a({})\nb({})",
        ),
        ([{"choices": [{"index": 0, "text": "Ye"}]}, {"choices": [{"index": 0, "text": "s."}]}], "Yes."),
        ([{"choices": [{"index": 1, "delta": {"content": each}}]} for each in ("Ye", "s.")], "Yes."),
        (
            [
                chunk(tool_calls=[{"index": 0, "id": id_, "function": function}])
                for id_, function in (
                    ("a", {"name": "f", "arguments": ""}),
                    (None, {"arguments": '{"x": 1}'}),
                    ("b", {"name": "g", "arguments": ""}),
                    (None, {"arguments": '{"y": 2}'}),
                )
            ],
            'f({"x": 1})\ng({"y": 2})',
        ),
        (
            # Each piece has an id of its own.
            [
                chunk(tool_calls=[{"index": 0, "id": "r1", "function": {"name": "f", "arguments": ""}}]),
                chunk(tool_calls=[{"index": 0, "id": "r2", "function": {"arguments": '{"x": '}}]),
                chunk(tool_calls=[{"index": 0, "id": "r3", "function": {"arguments": "1}"}}]),
            ],
            'f({"x": 1})',
        ),
    ],
)
def test_pieces_of_streams_are_joined_whatever_they_hold(pieces: list[Any], said: str, tmp_path: Path) -> None:
    trace = read(tmp_path, [{"request": {"messages": [USER]}, "response": pieces}])[0].traces[0]
    assert [turn.text for turn in trace.turns] == [said]


@pytest.mark.parametrize(
    ("reply", "ended", "steps"),
    [
        ({"choices": [{"message": LAST, "finish_reason": "length"}]}, EpisodeEnd.RESPONSE_LIMIT, 2),
        (
            {"candidates": [{"content": {"role": "model", "parts": [{"text": "R"}]}, "finishReason": "MAX_TOKENS"}]},
            EpisodeEnd.RESPONSE_LIMIT,
            2,
        ),
        ({"role": "assistant", "content": "R", "stop_reason": "max_tokens"}, EpisodeEnd.RESPONSE_LIMIT, 2),
        ({"choices": [{"message": LAST, "finish_reason": "stop"}]}, EpisodeEnd.FINISHED, 2),
        (
            {"choices": [{"message": {**LAST, "content": ""}, "finish_reason": "content_filter"}]},
            EpisodeEnd.UNSTATED,
            1,
        ),
    ],
)
def test_an_answer_that_is_truncated_or_empty_has_not_finished(
    reply: dict[str, Any], ended: EpisodeEnd, steps: int, tmp_path: Path
) -> None:
    trace = read(tmp_path, [{"request": {"messages": [USER, CALLING, ANSWER]}, "response": reply}])[0].traces[0]
    assert (trace.ended, len(trace.steps)) == (ended, steps)


@pytest.mark.parametrize(
    ("message", "turns"),
    [
        ({"content": None, "audio": {"id": "a", "transcript": DONE}}, [DONE]),
        ({"content": [typed("output_audio", transcript=DONE)]}, [DONE]),
        ({"content": "Write [TOOL_CALLS][{...}] before it."}, ["Write [TOOL_CALLS][{...}] before it."]),
        (
            {"content": '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": b}</tool_call>'},
            ['<tool_call>{"name": b}</tool_call>\n\na({})'],
        ),
        (
            {"type": "tool_use", "content": [typed("text", text=SAID), typed("tool_use", name="f", input={})]},
            [f"{SAID}\n\nf({{}})"],
        ),
        (
            {"type": "tool_calls", "reasoning_content": "Hm.", "content": SAID, "tool_calls": [CALL]},
            [f'<think>Hm.</think>\n{SAID}\n\nfind_room({{"day": "Fri"}})'],
        ),
        ({"content": DONE, "audio": {"id": "a", "transcript": DONE}}, [DONE]),
        ({"content": DONE, "message": LAST | {"content": "Yes."}}, [DONE]),
        ({"content": DONE, "tool_results": 3}, [DONE]),
        ({"content": 'See [tool_calls] {"name": "a"}'}, ['See [tool_calls] {"name": "a"}']),
        ({"role": "tool_use", "name": "find_room", "input": ARGUMENTS}, ['find_room({"day": "Fri"})']),
        ({"type": "tool_calls", "content": SAID, "tool_calls": [CALL]}, [f'{SAID}\n\nfind_room({{"day": "Fri"}})']),
        ({"content": '<TOOLCALL>[{"name": "a"}, {"name": "b", "arguments": {}}]</TOOLCALL>'}, ["a({})\nb({})"]),
    ],
)
def test_what_an_agent_said_aloud_and_calls_within_text(
    message: dict[str, Any], turns: list[str], tmp_path: Path
) -> None:
    trace = read(tmp_path, [{"messages": [USER, {"role": "assistant", **message}]}])[0].traces[0]
    assert [turn.text for turn in trace.turns] == turns


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_type_beside_a_role_makes_no_other_speaker_the_agent(role: str, tmp_path: Path) -> None:
    said = {"role": role, "type": "tool_call", "content": "Hurry."}
    trace = read(tmp_path, [{"messages": [USER, CALLING, ANSWER, said, LAST]}])[0].traces[0]
    assert [(turn.role, turn.text) for turn in trace.turns[1:]] == [(role, "Hurry."), ("assistant", DONE)]


def test_a_result_whose_request_has_an_id_belongs_to_its_call(tmp_path: Path) -> None:
    result = {"role": "tool", "content": RESULT, "request_id": "r9"}
    trace = read(tmp_path, [{"messages": [USER, CALLING, result, LAST]}])[0].traces[0]
    assert trace.turns[0].observation == RESULT


@pytest.mark.parametrize("name", ["kwargs", "artifact", "channel_values"])
def test_messages_of_a_record_come_before_those_of_what_it_contains(name: str, tmp_path: Path) -> None:
    trace = read(tmp_path, [{"messages": [USER, LAST], name: {"prompt": "Other."}}])[0].traces[0]
    assert [message.content for message in trace.prompt] == [ASKED]
    assert [turn.text for turn in trace.turns] == [DONE]


def test_conversations_in_parts_are_compared_too(tmp_path: Path) -> None:
    ours, judged = (
        [{"role": role, "parts": [{"text": text}]} for role, text in zip(("user", "model") * 2, texts, strict=False)]
        for texts in ((ASKED, DONE), ("Judge.", "Good.", "Sure?", "Yes."))
    )
    trace = read(tmp_path, [{"seed": 1, "history": ours, "grading": judged}])[0].traces[0]
    assert [turn.text for turn in trace.turns] == [DONE]


@pytest.mark.parametrize("mark", ["<|start|>", "<|channel|>"])
def test_marks_without_a_message_cost_no_time(mark: str, tmp_path: Path) -> None:
    text = f"{mark}a " * 20_000
    trace = read(tmp_path, [{"messages": [USER, LAST | {"content": text}]}])[0].traces[0]
    assert trace.turns[0].text.startswith(f"{mark}a {mark}a")
