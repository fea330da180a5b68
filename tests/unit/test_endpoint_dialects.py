"""The endpoint under Anthropic's own client, and Responses with custom tools and namespaces."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from draco_ray.records import SIDE_CALL
from tests.support.endpoint_episode import CHAT, END, TOKENIZER, ServedEpisode, call, serve_episode

TOOL: dict[str, Any] = {"name": "refund", "input_schema": {"type": "object", "properties": {"order": {}}}}
SYSTEM = [{"type": "text", "text": "You serve.", "cache_control": {"type": "ephemeral"}}]
USER = {"role": "user", "content": [{"type": "text", "text": "Refund A1."}]}


def client_of(at: ServedEpisode) -> Any:
    """Anthropic's client, pointed at the endpoint; its types know no plain dictionaries."""
    return anthropic.AsyncAnthropic(
        base_url=at.base_url.removesuffix("/v1"), api_key=at.episode.key, auth_token=None, max_retries=0
    )


def result(block: Any, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": block.id, "content": content}


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_are_answered_and_continued_on_the_recorded_tokens(stream: bool) -> None:
    two = call(order="A1").removesuffix(END) + "\n" + call(order="A2")
    async with (
        serve_episode([f"<think>\nLook.\n</think>\nLet us see. {two}", f"Done.{END}"]) as at,
        client_of(at) as client,
    ):
        messages: list[Any] = [USER]
        asked: dict[str, Any] = {"model": "m", "max_tokens": 999, "system": SYSTEM, "tools": [TOOL]}
        asked |= {"thinking": {"type": "adaptive"}, "metadata": {"user_id": "a"}}

        async def ask() -> Any:
            if not stream:
                return await client.messages.create(messages=messages, **asked)
            async with client.messages.stream(messages=messages, **asked) as events:
                return await events.get_final_message()

        first = await ask()
        thought, said, *calls = first.content
        assert (thought.thinking, said.text, first.stop_reason) == ("Look.", "Let us see.", "tool_use")
        assert [(each.name, each.input) for each in calls] == [("refund", {"order": "A1"}), ("refund", {"order": "A2"})]
        # Results in the wrong order, one as blocks, and a text after them.
        told = [result(calls[1], "two"), result(calls[0], [{"type": "text", "text": "one"}])]
        told.append({"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}})
        messages += [{"role": "assistant", "content": [each.model_dump() for each in first.content]}]
        messages += [{"role": "user", "content": told}]
        second = await ask()
        assert [each.text for each in second.content] == ["Done."]
        assert (second.stop_reason, second.usage.cache_read_input_tokens > 0) == ("end_turn", True)
        counted = await client.messages.count_tokens(model="m", messages=messages, system=SYSTEM, tools=[TOOL])
        assert counted.input_tokens == len(at.sampler.asked[1])
        played = at.trajectory()
    assert played.branches == (0,)
    assert [step.observation for step in played.steps] == ["(1) refund: one\n(2) refund: two", None]
    assert [turn.text for turn in played.turns if turn.role == "user"] == ["Refund A1.", "Go on."]
    assert at.sampler.asked[1][: len(at.sampler.asked[0])] == at.sampler.asked[0]


async def test_what_messages_say_of_their_end() -> None:
    async with serve_episode(["Long answer", f"One. Stop. Two.{END}", f"<think>\nHm.\n</think>\nYes.{END}"]) as at:
        async with client_of(at) as client:
            cut = await client.messages.create(model="m", max_tokens=3, messages=[{"role": "user", "content": "a"}])
            stopped = await client.messages.create(model="m", max_tokens=99, messages=[USER], stop_sequences=["Stop."])
            unthought = await client.messages.create(model="m", max_tokens=99, messages=[USER])
        at.trajectory()
    assert cut.stop_reason == "max_tokens"
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "Stop.", "One. ")
    # Reasoning is only sent to clients that ask for it.
    assert [block.type for block in unthought.content] == ["text"]


async def test_a_late_system_message_becomes_a_users_and_leading_ones_are_joined() -> None:
    async with serve_episode([f"Yes.{END}"] * 2) as at, client_of(at) as client:
        late = {"role": "system", "content": "Agents: none."}
        await client.messages.create(model="m", max_tokens=9, system=SYSTEM, messages=[USER, late])
        said = [{"role": "developer", "content": "You code."}, {"role": "user", "content": "Fix it."}]
        await at.openai.responses.create(model="m", instructions="You serve.", input=said)
        at.trajectory()
    first, second = (TOKENIZER.decode(each) for each in at.sampler.asked)
    assert "<|im_start|>user\nAgents: none.<|im_end|>" in first
    assert "<|im_start|>system\nYou serve.\n\nYou code.<|im_end|>\n<|im_start|>user\nFix it." in second


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": []}, "messages: expected a list"),
        ({"messages": [{"role": "judge"}]}, "messages[0]: expected an object with a role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: expected a text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            'messages[0].content: a part of type "image": only texts are supported',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
            "messages[0].content[0].tool_use_id: expected a text",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 'a tool of type "web_search_20250305"'),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"thinking": [1]}, "thinking: expected an object"),
        ({"mcp_servers": [{}]}, "mcp_servers="),
        ({"odd": 1}, "odd: not a parameter"),
    ],
)
async def test_refusals_are_one_line_in_anthropics_form(change: dict[str, Any], said: str) -> None:
    async with serve_episode([]) as at:
        answer = await at.post("/messages", json.dumps({"messages": [USER], "max_tokens": 9} | change))
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error")
    assert said in told["error"]["message"]
    assert "\n" not in told["error"]["message"]
    assert at.episode.complaint == told["error"]["message"]


async def test_errors_that_anthropics_clients_know() -> None:
    async with serve_episode([], max_prompt_length=60, max_response_length=40) as at, client_of(at) as client:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: .*100 tokens"):
            await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "many " * 200}])
        client.api_key = "no"
        with pytest.raises(anthropic.AuthenticationError, match="wrong key"):
            await client.messages.create(model="m", max_tokens=9, messages=[USER])


async def test_custom_tools_and_namespaces_of_responses() -> None:
    patch: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
    patch["format"] = {"type": "grammar", "syntax": "lark", "definition": "start: line+"}
    spawn = {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {"task": {}}}}
    tools: list[Any] = [patch, {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [spawn]}]
    lines = [call("apply_patch", input="*** Begin\n+a"), call("agents__spawn", task="look"), f"Done.{END}"]
    async with serve_episode(lines, chat=CHAT) as at:
        client = at.openai.responses
        items: list[Any] = [{"role": "user", "content": "Fix it."}]
        async with client.stream(model="m", input=items, tools=tools) as stream:
            first = await stream.get_final_response()
        (made,) = first.output
        assert (made.type, made.name, made.input) == ("custom_tool_call", "apply_patch", "*** Begin\n+a")
        items += [made.model_dump(), {"type": "custom_tool_call_output", "call_id": made.call_id, "output": "ok"}]
        second = await client.create(model="m", input=items, tools=tools)
        (made,) = second.output
        assert (made.type, made.namespace, made.name) == ("function_call", "agents", "spawn")
        items += [made.model_dump(), {"type": "function_call_output", "call_id": made.call_id, "output": "seen"}]
        await client.create(model="m", input=items, tools=tools)
        played = at.trajectory()
    assert played.branches == (0,)
    assert [step.observation for step in played.steps] == ["ok", "seen", None]
    shown = TOKENIZER.decode(at.sampler.asked[0])
    assert "start: line+" in shown
    assert '"name": "agents__spawn"' in shown


async def test_requests_that_a_rule_names_are_side_calls() -> None:
    rules = ["You are a title generator", "^Summarize the conversation"]
    async with serve_episode([f"Title{END}", f"Look.{END}", f"Summary{END}"], side_calls=rules) as at:
        title = {"role": "system", "content": "You are a title generator."}
        chat = at.openai.chat.completions
        await chat.create(model="m", messages=[title, {"role": "user", "content": "Fix it"}])
        history: list[Any] = [{"role": "user", "content": "Fix it"}]
        turn = (await chat.create(model="m", messages=history)).choices[0].message
        history += [{"role": "assistant", "content": turn.content}]
        await chat.create(model="m", messages=[*history, {"role": "user", "content": "Summarize the conversation."}])
        played = at.trajectory()
    assert [(turn.text, turn.role, turn.is_step) for turn in played.turns if turn.tokens] == [
        ("Title", SIDE_CALL, False),
        ("Look.", "assistant", True),
        ("Summary", SIDE_CALL, False),
    ]


async def test_results_in_a_rewritten_history_are_the_observation_of_their_turn() -> None:
    tool = {"type": "function", "function": {"name": "refund", "parameters": TOOL["input_schema"]}}
    async with serve_episode([call(order="A1"), f"Done.{END}"]) as at:
        chat = at.openai.chat.completions
        turn = (await chat.create(model="m", messages=[{"role": "user", "content": "Go."}], tools=[tool])).choices[0]
        result = {"role": "tool", "tool_call_id": turn.message.tool_calls[0].id, "content": "refunded"}
        summary = {"role": "user", "content": "Summary: an order."}
        history = [summary, turn.message.model_dump(exclude_none=True), result]
        await chat.create(model="m", messages=history, tools=[tool])
        played = at.trajectory()
    assert [(step.branch, step.observation) for step in played.steps] == [(0, "refunded"), (1, None)]
    assert [turn.text for turn in played.turns if turn.branch == 1] == [
        "(2 messages as before)",
        "Summary: an order.",
        "Done.",
    ]
