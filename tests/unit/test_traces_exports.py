"""One conversation in every shape in which Phoenix, Langfuse, MLflow, Tempo and logs of API calls export it.

The shapes are written by hand after those tools' own schemas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from draco_ray.errors import TraceError
from draco_ray.records import EpisodeEnd
from draco_ray.traces.load import groups_of, load_traces
from draco_ray.traces.model import Trace

Json = dict[str, Any]


def call(number: int, name: str, **arguments: Any) -> Json:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}]}


CHAT: list[Json] = [
    {"role": "system", "content": "You book."},
    {"role": "user", "content": "Book JFK to SFO."},
    call(1, "search", origin="JFK"),
    {"role": "tool", "tool_call_id": "c1", "content": "DL9 380 USD"},
    call(2, "book", flight="DL9"),
    {"role": "tool", "tool_call_id": "c2", "content": "ok"},
    {"role": "assistant", "content": "Done."},
]
TURNS = [(CHAT[:end], CHAT[end]) for end in (2, 4, 6)]
"""Input and output of each call of the model."""
TOKENS = (11, 12, 13)


def same(trace: Trace, tokens: Sequence[int | None] = TOKENS) -> None:
    assert [message.content for message in trace.prompt[:2]] == ["You book.", "Book JFK to SFO."]
    assert [turn.action for turn in trace.turns] == ['search({"origin": "JFK"})', 'book({"flight": "DL9"})', None]
    assert [turn.observation for turn in trace.turns] == ["DL9 380 USD", "ok", None]
    assert trace.turns[-1].text == "Done."
    assert [turn.tokens for turn in trace.turns] == list(tokens)


def open_inference(messages: Sequence[Json], prefix: str) -> Json:
    """OpenInference's attributes, flat."""
    found: Json = {}
    for place, message in enumerate(messages):
        name = f"{prefix}.{place}.message"
        found |= {f"{name}.{key}": value for key, value in message.items() if key != "tool_calls"}
        for number, each in enumerate(message.get("tool_calls", ())):
            inner = f"{name}.tool_calls.{number}.tool_call"
            found |= {f"{inner}.id": each["id"]}
            found |= {f"{inner}.function.{key}": value for key, value in each["function"].items()}
    return found


def nested(messages: Sequence[Json]) -> list[Json]:
    """The same as Phoenix's table has it: lists of objects with dotted names."""
    found = []
    for message in messages:
        row = {f"message.{key}": value for key, value in message.items() if key != "tool_calls"}
        if "tool_calls" in message:
            row["message.tool_calls"] = [
                {
                    "tool_call.id": each["id"],
                    **{f"tool_call.function.{key}": value for key, value in each["function"].items()},
                }
                for each in message["tool_calls"]
            ]
        found.append(row)
    return found


def phoenix() -> list[Json]:
    """As its API lists spans."""
    agent = {"openinference.span.kind": "AGENT", "input.value": "Book JFK to SFO.", "output.value": "Done."}
    spans: list[tuple[Json, str | None]] = [(agent, None)]
    for (said, reply), tokens in zip(TURNS, TOKENS, strict=True):
        messages = open_inference(said, "llm.input_messages") | open_inference([reply], "llm.output_messages")
        counted = {"openinference.span.kind": "LLM", "llm.token_count.completion": tokens}
        spans.append(({**counted, **messages}, "s0"))
    return [
        {
            "id": f"U3Bhbjox{place}",
            "name": "span",
            "context": {"trace_id": "t1", "span_id": f"s{place}"},
            "parent_id": parent,
            "start_time": f"2026-11-22T10:00:0{place}+00:00",
            "attributes": attributes,
            "events": [],
        }
        for place, (attributes, parent) in enumerate(spans)
    ]


def otlp(span: Mapping[str, Any]) -> Json:
    typed = {str: "stringValue", int: "intValue"}
    attributes = [{"key": k, "value": {typed[type(v)]: str(v)}} for k, v in span["attributes"].items()]
    return {
        "traceId": "0af7651916cd43dd8448eb211c80319c",
        "spanId": span["context"]["span_id"],
        "parentSpanId": span["parent_id"] or "",
        "name": "span",
        "startTimeUnixNano": f"100000000000000000{span['context']['span_id'][1:]}",
        "attributes": attributes,
    }


def of_resource(spans: Sequence[Json]) -> list[Json]:
    return [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": [otlp(span) for span in spans]}]}]


def row(span: Mapping[str, Any], place: int) -> Json:
    """A row of `get_spans_dataframe().to_json(orient="records", lines=True)`."""
    messages: Json = {"attributes.llm.input_messages": None, "attributes.llm.token_count.completion": None}
    if place:
        said, reply = TURNS[place - 1]
        messages = {
            "attributes.llm.input_messages": nested(said),
            "attributes.llm.output_messages": nested([reply]),
            "attributes.llm.token_count.completion": float(TOKENS[place - 1]),
        }
    kind = span["attributes"]["openinference.span.kind"]
    context = {f"context.{key}": value for key, value in span["context"].items()}
    return {
        "name": "span",
        "parent_id": span["parent_id"],
        "start_time": 1_763_805_600_000 + place,
        **context,
        **messages,
        "attributes.openinference.span.kind": kind,
    }


def langfuse() -> list[Json]:
    """As its API lists observations."""
    found: list[tuple[str, Any, Any, int, str | None]] = [("SPAN", {"question": "Book?"}, "Done.", 0, None)]
    found += [("GENERATION", said, reply, n, "o0") for (said, reply), n in zip(TURNS, TOKENS, strict=True)]
    return [
        {
            "id": f"o{place}",
            "traceId": "t1",
            "type": kind,
            "startTime": f"2026-11-22T10:00:0{place}.000Z",
            "parentObservationId": parent,
            "input": given,
            "output": output,
            "metadata": {},
            "usageDetails": {"input": 100, "output": tokens},
        }
        for place, (kind, given, output, tokens, parent) in enumerate(found)
    ]


OF_TRACE = {"id": "t1", "name": "agent", "timestamp": "2026-11-22T10:00:00Z", "metadata": {"task_id": "flights"}}


def bucket(observation: Mapping[str, Any]) -> Json:
    """As its export to a bucket writes it."""
    names = {
        "traceId": "trace_id",
        "startTime": "start_time",
        "parentObservationId": "parent_observation_id",
        "usageDetails": "usage_details",
    }
    texts = {key: json.dumps(observation[key]) for key in ("input", "output", "metadata")}
    return {names.get(key, key): value for key, value in {**observation, **texts}.items()}


def mlflow() -> Json:
    """As `Trace.to_json` of version 3 writes it."""
    spans: list[tuple[str, Any, Any, str | None]] = [("AGENT", {"question": "Book JFK to SFO."}, "Done.", None)]
    for said, reply in TURNS:
        spans.append(("CHAT_MODEL", {"model": "m", "messages": said}, {"choices": [{"message": reply}]}, "s0="))
    return {
        "info": {"trace_id": "tr-1", "state": "OK"},
        "data": {
            "spans": [
                {
                    "trace_id": "dHI=",
                    "span_id": f"s{place}=",
                    "parent_span_id": parent,
                    "start_time_unix_nano": 1_763_805_600_000_000_000 + place,
                    "attributes": {
                        "mlflow.spanType": json.dumps(kind),
                        "mlflow.spanInputs": json.dumps(given),
                        "mlflow.spanOutputs": json.dumps(output),
                    },
                }
                for place, (kind, given, output, parent) in enumerate(spans)
            ]
        },
    }


def gemini(message: Json) -> Json:
    """A content of Gemini."""
    if "tool_calls" in message:
        calls = [each["function"] for each in message["tool_calls"]]
        parts = [{"functionCall": {"name": c["name"], "args": json.loads(c["arguments"])}} for c in calls]
        return {"role": "model", "parts": parts}
    if message["role"] == "tool":
        return {"role": "user", "parts": [{"functionResponse": {"response": {"result": message["content"]}}}]}
    return {"role": {"assistant": "model"}.get(message["role"], "user"), "parts": [{"text": message["content"]}]}


def asked_otherwise(asked: Any) -> list[Json]:
    """Langfuse's observations with other inputs: ``asked`` makes them of the messages."""
    return [{**each, "input": asked(each["input"])} if n else each for n, each in enumerate(langfuse())]


EXPORTS: dict[str, list[Any]] = {
    "Langfuse's decorator": asked_otherwise(lambda said: {"args": [], "kwargs": {"model": "m", "messages": said}}),
    "Langfuse, a request of Anthropic's": asked_otherwise(lambda said: {"system": "You book.", "messages": said[1:]}),
    "Phoenix's API": [{"data": phoenix(), "next_cursor": None}],
    "Phoenix's API in OTLP": [{"data": [otlp(span) for span in phoenix()], "next_cursor": None}],
    "Phoenix's table": [row(span, place) for place, span in enumerate(phoenix())],
    "a span a record": phoenix(),
    "OTLP": [{"resourceSpans": of_resource(phoenix())}],
    "OTLP, a batch a record": [{"resourceSpans": of_resource([span])} for span in phoenix()],
    "Tempo": [{"batches": of_resource(phoenix())}],
    "Tempo's API": [{"trace": {"resourceSpans": of_resource(phoenix())}}],
    "Langfuse's page": [{"trace": OF_TRACE, "observations": langfuse()}],
    "Langfuse's API, a trace": [{**OF_TRACE, "observations": langfuse()}],
    "Langfuse's API, observations": [{"data": langfuse(), "meta": {"page": 1}}],
    "Langfuse's observations": langfuse(),
    "Langfuse's bucket": [bucket(each) for each in langfuse()],
}
MLFLOW: dict[str, list[Any]] = {
    "a trace": [mlflow()],
    "traces": [{"traces": [mlflow()]}],
    "a row of its table, spans": [{"trace_id": "tr-1", "spans": mlflow()["data"]["spans"], "state": "OK"}],
    "a row of its table, text": [{"trace_id": "tr-1", "trace": json.dumps(mlflow()), "state": "OK"}],
}


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_what_tools_export_is_one_conversation_with_its_counted_tokens(name: str) -> None:
    groups = groups_of(EXPORTS[name])
    assert not groups.problems
    ((trace,),) = (group.traces for group in groups)
    assert trace.format == "otel"
    same(trace)
    if "trace" in EXPORTS[name][0] and "observations" in EXPORTS[name][0]:
        assert trace.task_id == "flights"


def spans_of(attributes: Sequence[Json]) -> Json:
    spans = [
        {"traceId": "t", "spanId": str(n), "startTimeUnixNano": str(n), **each} for n, each in enumerate(attributes)
    ]
    return {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}


def typed(message: Json) -> Json:
    """A message of LangChain."""
    calls = [
        {"name": c["function"]["name"], "args": json.loads(c["function"]["arguments"]), "id": c["id"]}
        for c in message.get("tool_calls", ())
    ]
    kinds = {"user": "human", "assistant": "ai"}
    kept = {key: message[key] for key in ("tool_call_id",) if key in message}
    kind = kinds.get(message["role"], message["role"])
    return {"type": kind, "content": message.get("content") or "", "tool_calls": calls, **kept}


PARTS = {"gen_ai.operation.name": "chat"}
FUNCTIONS = [
    {
        "function_call_name": c["function"]["name"],
        "function_call_arguments_json": c["function"]["arguments"],
        "role": "assistant",
    }
    if (c := next(iter(m.get("tool_calls", ())), None))
    else {**m, "role": "function", "name": "search" if m["content"] != "ok" else "book"}
    if m["role"] == "tool"
    else m
    for m in CHAT
]
MORE_SPANS: dict[str, Json] = {
    "OpenInference, older function calls": spans_of(
        [
            {
                "attributes": open_inference(FUNCTIONS[:end], "llm.input_messages")
                | open_inference([FUNCTIONS[end]], "llm.output_messages")
            }
            for end in (2, 4, 6)
        ]
    ),
    "Vercel's AI SDK 3": spans_of(
        [
            {
                "attributes": {
                    "ai.prompt.messages": json.dumps(asked),
                    "ai.result.text": said.get("content", ""),
                    "ai.result.toolCalls": json.dumps(
                        [
                            {
                                "toolCallType": "function",
                                "toolCallId": c["id"],
                                "toolName": c["function"]["name"],
                                "args": c["function"]["arguments"],
                            }
                            for c in said.get("tool_calls", ())
                        ]
                    ),
                }
            }
            for asked, said in TURNS
        ]
    ),
    "events of 2024": spans_of(
        [
            {
                "attributes": PARTS,
                "events": [
                    {"name": "gen_ai.content.prompt", "attributes": {"gen_ai.prompt": json.dumps(asked)}},
                    {"name": "gen_ai.content.completion", "attributes": {"gen_ai.completion": json.dumps([said])}},
                ],
            }
            for asked, said in TURNS
        ]
    ),
    "Vercel's AI SDK": spans_of(
        [
            {"attributes": {"ai.prompt": json.dumps({"prompt": "Book JFK to SFO."}), "ai.response.text": "Done."}},
            *[
                {
                    "attributes": {
                        "ai.prompt.messages": json.dumps(asked),
                        "ai.response.text": said.get("content", ""),
                        "ai.response.toolCalls": json.dumps(
                            [
                                {
                                    "toolCallId": c["id"],
                                    "toolName": c["function"]["name"],
                                    "input": c["function"]["arguments"],
                                }
                                for c in said.get("tool_calls", ())
                            ]
                        ),
                    }
                }
                for asked, said in TURNS
            ],
        ]
    ),
    "LangChain's list of one conversation": spans_of(
        [
            {
                "attributes": {
                    "mlflow.spanInputs": json.dumps([[typed(message) for message in asked]]),
                    "mlflow.spanOutputs": json.dumps({"generations": [[{"message": typed(said)}]]}),
                }
            }
            for asked, said in TURNS
        ]
    ),
    "OTLP logs": {
        "resourceLogs": [
            {
                "scopeLogs": [
                    {
                        "logRecords": [
                            {
                                "traceId": "t",
                                "spanId": str(number),
                                "timeUnixNano": str(number),
                                "attributes": {"gen_ai.input.messages": asked, "gen_ai.output.messages": [said]},
                            }
                            for number, (asked, said) in reversed([*enumerate(TURNS)])
                        ]
                    }
                ]
            }
        ]
    },
}


@pytest.mark.parametrize("name", sorted(MORE_SPANS))
def test_messages_in_other_attributes_and_events(name: str) -> None:
    ((trace,),) = (group.traces for group in groups_of([MORE_SPANS[name]]))
    same(trace, [None] * 3)


def generation(asked: Any, answered: Any, number: int = 1) -> Json:
    at = {"id": f"o{number}", "startTime": f"2026-11-22T10:00:0{number}.000Z", "parentObservationId": None}
    return {**at, "traceId": "t", "type": "GENERATION", "input": asked, "output": answered}


def test_contents_of_gemini_in_generations() -> None:
    contents = [gemini(message) for message in CHAT]
    found = [
        generation(
            {"contents": contents[1:end], "config": {"system_instruction": "You book."}},
            {"candidates": [{"content": contents[end]}]},
            end,
        )
        for end in (2, 4, 6)
    ]
    ((trace,),) = (group.traces for group in groups_of(found))
    assert [message.content for message in trace.prompt] == ["You book.", "Book JFK to SFO."]
    assert [turn.action for turn in trace.turns] == ['search({"origin": "JFK"})', 'book({"flight": "DL9"})', None]
    assert [turn.observation for turn in trace.turns] == ['{"result": "DL9 380 USD"}', '{"result": "ok"}', None]


@pytest.mark.parametrize(
    ("asked", "answered", "shown"),
    [
        ("Sort it.", {"label": "refund"}, ("Sort it.", '{"label": "refund"}')),
        ("Sort it.", '{"label": "refund"}', ("Sort it.", '{"label": "refund"}')),
        ([CHAT[1]], [{"city": "Oslo"}, {"city": "Rome"}], ("Book JFK to SFO.", '[{"city": "Oslo"}, {"city": "Rome"}]')),
        ([CHAT[1]], {"name": "Ann", "role": "clerk"}, ("Book JFK to SFO.", '{"name": "Ann", "role": "clerk"}')),
        ([CHAT[1]], ["Oslo", "Rome"], ("Book JFK to SFO.", '["Oslo", "Rome"]')),
        ([CHAT[1]], {"to": "Bo", "message": "Hi"}, ("Book JFK to SFO.", '{"to": "Bo", "message": "Hi"}')),
        ({"question": "Why?"}, "So.", ('{"question": "Why?"}', "So.")),
        ({"choices": ["A", "B"]}, "So.", ('{"choices": ["A", "B"]}', "So.")),
        ({"messages": ["Why?"]}, "So.", ("Why?", "So.")),
        ({"messages": [CHAT[1]], "system": True}, "So.", ("Book JFK to SFO.", "So.")),
        ({"messages": [CHAT[1]], "kwargs": {"prompt": "x"}}, "So.", ("Book JFK to SFO.", "So.")),
        ({"input": '{"a": 1}'}, "So.", ('{"a": 1}', "So.")),
        ([CHAT[1]], {"call_id": "1", "content": "So."}, ("Book JFK to SFO.", "So.")),
        ({"args": ["Why?"], "kwargs": {}}, "So.", ('{"args": ["Why?"], "kwargs": {}}', "So.")),
    ],
)
def test_an_object_that_is_no_message_is_what_was_asked_or_answered(
    asked: Any, answered: Any, shown: tuple[str, str]
) -> None:
    ((trace,),) = (group.traces for group in groups_of([generation(asked, answered)]))
    assert (trace.prompt[0].content, trace.turns[0].text, trace.turns[0].message) == (*shown, True)


def test_a_part_among_messages_leaves_them_messages() -> None:
    used = {"type": "tool_use", "name": "f", "input": {}}
    ((trace,),) = (group.traces for group in groups_of([generation([CHAT[1], used], CHAT[6])]))
    assert (trace.prompt[0].content, trace.turns[0].action) == ("Book JFK to SFO.", "f({})")


def test_calls_alone_are_an_answer_and_a_blocked_or_empty_one_is_none() -> None:
    calls = [{"toolCallId": f"c{n}", "toolName": "search", "args": "{}"} for n in (1, 2)]
    blocked = {"candidates": [{"finishReason": "SAFETY"}]}
    found = [generation([CHAT[1]], each, n) for n, each in enumerate((blocked, {}, calls))]
    ((trace,),) = (group.traces for group in groups_of(found))
    assert [turn.action for turn in trace.turns] == ["search({})\nsearch({})"]


def test_an_object_of_the_ai_sdk_and_the_span_around_it() -> None:
    around = {"ai.prompt": json.dumps({"system": "You book.", "prompt": "Book."}), "ai.response.object": '{"ok": 1}'}
    call = {
        "ai.prompt.messages": json.dumps([CHAT[0], {"role": "user", "content": "Book."}]),
        "ai.prompt.tools": [json.dumps({"type": "function", "name": "search", "description": "Finds flights."})],
        "ai.response.object": '{"ok": 1}',
        "ai.response.reasoning": "Easy.",
    }
    for several, said in (([around], ""), ([around, call], "<think>Easy.</think>\n")):
        ((trace,),) = (group.traces for group in groups_of([spans_of([{"attributes": each} for each in several])]))
        assert [message.content for message in trace.prompt[:2]] == ["You book.", "Book."]
        assert [turn.text for turn in trace.turns] == [f'{said}{{"ok": 1}}']
    assert trace.prompt[2].content == "search: Finds flights."


def test_the_spans_of_tools_are_the_steps_of_an_agent_whose_model_has_none() -> None:
    agent = generation({"question": "Book?"}, {"answer": "Done."}, 0) | {"type": "AGENT", "id": "a"}
    tools = [
        generation({"origin": "JFK"}, "DL9 380 USD", 1) | {"type": "TOOL", "name": "search"},
        generation({"flight": "DL9"}, None, 2) | {"type": "TOOL", "name": "book"},
        generation({"flight": "DL9"}, "ok", 3) | {"type": "TOOL", "name": "book"},
    ]
    found = [agent, *(each | {"parentObservationId": "a"} for each in tools)]
    ((trace,),) = (group.traces for group in groups_of(found))
    assert [(turn.action, turn.observation) for turn in trace.turns] == [
        ('search({"origin": "JFK"})', "DL9 380 USD"),
        ('book({"flight": "DL9"})', ""),
        ('book({"flight": "DL9"})', "ok"),
        (None, None),
    ]
    # A model's span with messages says itself what the agent did.
    ((trace,),) = (group.traces for group in groups_of([*found, generation([CHAT[1]], CHAT[6], 4)]))
    assert [turn.text for turn in trace.turns] == ["Done."]


def test_requests_of_langsmiths_runs() -> None:
    config = {"system_instruction": "You book."}
    for inputs in ({"system": "You book.", "messages": [CHAT[1]]}, {"contents": CHAT[1]["content"], "config": config}):
        run = {"id": "r", "trace_id": "r", "run_type": "llm", "inputs": inputs, "outputs": CHAT[6]}
        ((trace,),) = (group.traces for group in groups_of([run]))
        assert [message.content for message in trace.prompt] == ["You book.", "Book JFK to SFO."]


def test_an_image_of_openinference_has_its_address() -> None:
    about = {"type": "image", "image.image.url": "https://a.example/x.png"}
    content = {f"llm.input_messages.0.message.contents.0.message_content.{key}": about[key] for key in about}
    attributes = {"llm.input_messages.0.message.role": "user", **content}
    said = open_inference([CHAT[6]], "llm.output_messages")
    ((trace,),) = (group.traces for group in groups_of([spans_of([{"attributes": attributes | said}])]))
    assert trace.prompt[0].content == "[image: https://a.example/x.png]"


@pytest.mark.parametrize(
    "tool",
    [
        {"traceloop.span.kind": "tool", "traceloop.entity.name": "search", "traceloop.entity.output": "DL9"},
        {
            "ai.operationId": "ai.toolCall",
            "ai.toolCall.name": "search",
            "ai.toolCall.id": "c1",
            "ai.toolCall.result": '"DL9"',
        },
    ],
)
def test_a_result_that_only_the_span_of_a_tool_has(tool: Json) -> None:
    said = {f"gen_ai.{way}.messages": json.dumps(each) for way, each in (("input", CHAT[:2]), ("output", [CHAT[2]]))}
    ((trace,),) = (group.traces for group in groups_of([spans_of([{"attributes": said}, {"attributes": tool}])]))
    assert trace.steps[0].observation == "DL9"


def test_title_and_follow_up_calls_are_side_calls() -> None:
    def chat(asked: Sequence[Json], said: str) -> Json:
        messages = {"input": asked, "output": [{"role": "assistant", "content": said}]}
        return {"attributes": {f"gen_ai.{way}.messages": json.dumps(each) for way, each in messages.items()}}

    def system(text: str) -> list[Json]:
        return [{"role": "system", "content": text}, CHAT[1]]

    agent = chat(CHAT[:2], "Done, on DL9.")
    for beside in (
        [chat(system("Write a title."), "Flight"), agent],
        [
            agent,
            chat([*system("Suggest a question."), {"role": "assistant", "content": "Done, on DL9."}], "Which seat?"),
        ],
    ):
        ((trace,),) = (group.traces for group in groups_of([spans_of(beside)]))
        assert [message.content for message in trace.prompt] == ["You book.", "Book JFK to SFO."]
        assert [turn.role for turn in trace.turns] == ["assistant", "side call"]
        assert (trace.turns[0].text, trace.ended) == ("Done, on DL9.", EpisodeEnd.FINISHED)


@pytest.mark.parametrize("name", sorted(MLFLOW))
def test_what_mlflow_exports(name: str) -> None:
    ((trace,),) = (group.traces for group in groups_of(MLFLOW[name]))
    same(trace, [None] * 3)


def test_a_list_of_records_that_say_their_type_is_no_conversation(tmp_path: Path) -> None:
    observations, typed = tmp_path / "observations.json", tmp_path / "typed.json"
    observations.write_text(json.dumps(langfuse()), encoding="utf-8")
    typed.write_text(json.dumps([{"type": "episode", "messages": CHAT}] * 2), encoding="utf-8")
    same(load_traces(observations)[0].traces[0])
    assert [len(group) for group in load_traces(typed)] == [2]


def letta(message: Json) -> Json:
    """A message as Letta's API returns it."""
    if "tool_calls" in message:
        (called,) = message["tool_calls"]
        return {"message_type": "tool_call_message", "tool_call": {**called["function"], "tool_call_id": called["id"]}}
    if message["role"] == "tool":
        returned = {"tool_return": message["content"], "tool_call_id": message["tool_call_id"], "status": "success"}
        return {"message_type": "tool_return_message", **returned}
    return {"message_type": f"{message['role']}_message", "content": message["content"]}


def autogen(message: Json) -> Json:
    """A message in the history of AutoGen's user proxy, whose own role is ``assistant``."""
    if message["role"] == "tool":
        return {**message, "name": "user_proxy", "tool_responses": [message]}
    if message["role"] == "user":
        return {**message, "role": "assistant", "name": "user_proxy"}
    return {**message, "role": "user" if message is CHAT[-1] else message["role"], "name": "booker"}


LOGS = {
    "chat": {"request": {"messages": CHAT[:-1]}, "response": {"choices": [{"message": CHAT[-1]}]}},
    "a trace without its spans": {**OF_TRACE, "input": CHAT[:-1], "output": CHAT[-1]},
    "a batch's request": {"custom_id": "1", "body": {"messages": CHAT}},
    "responses": {
        "request": {"instructions": "You book.", "input": CHAT[1:-1]},
        "response": {"output": [{"type": "message", "role": "assistant", "content": "Done."}]},
    },
    "Ollama, with the answer as message": {"messages": CHAT[:-1], "message": CHAT[-1]},
    "several choices, of which the first counts": {
        "messages": CHAT[:-1],
        "choices": [{"message": CHAT[-1]}, {"message": {"role": "assistant", "content": "Or not."}}],
    },
    "rows of Hugging Face": {"features": [], "rows": [{"row_idx": 0, "row": {"messages": CHAT}}]},
    "a column of conversations": {"id": ["a"], "messages": [CHAT]},
    "Letta": {"messages": [letta(message) for message in CHAT]},
    "AutoGen 0.2": {"chat_history": [autogen(message) for message in CHAT]},
}


@pytest.mark.parametrize("name", sorted(LOGS))
def test_logs_of_api_calls_hold_a_conversation(name: str, tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps(LOGS[name]), encoding="utf-8")
    ((trace,),) = (group.traces for group in load_traces(file))
    same(trace, [None] * 3)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"data": {"data": [{"data": {"data": [[[[[[7]]]]]]}}]}}, "unknown format"),
        ({"data": [{"messages": 7}]}, "expected a list of messages, found a number"),
        ({"observations": 7}, "unknown format"),
        ({"resourceSpans": [{"scopeSpans": [{"spans": [7]}]}]}, "expected a span as an object, found a number"),
        ({"resourceSpans": [7]}, "expected spans, found a number"),
        ({"resourceSpans": [{"resource": {}}]}, ": the export contains no spans; expected OTLP"),
    ],
)
def test_what_only_looks_like_an_export_is_said(record: Json, said: str, tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    file.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(TraceError, match=said):
        load_traces(file)


def test_half_a_character_in_arguments_that_are_no_json_takes_nothing_else_with_it(tmp_path: Path) -> None:
    cut: Json = {"id": "c1", "function": {"name": "say", "arguments": '{"text": "\ud83d'}}
    file = tmp_path / "cut.jsonl"
    records = [{"messages": [CHAT[1], {"role": "assistant", "tool_calls": [cut]}]}, {"messages": CHAT}]
    file.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    first, second = (trace for group in load_traces(file) for trace in group.traces)
    assert first.steps[0].action == 'say({"text": "\\ud83d)'
    same(second, [None] * 3)
