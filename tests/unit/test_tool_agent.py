"""Calling tools: each family's form written by its template and read off its turns, and episodes of the agent."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.chat import ChatTokenizer
from draco_ray.engine.sampler import Sample
from draco_ray.engine.tool_calls import ToolCallReader
from draco_ray.errors import ConfigError, EnvironmentCrashed
from draco_ray.records import GAP, TOOLS, EpisodeEnd, Message, Task, Trajectory
from draco_ray.rollout.agent import RolloutRequest, find_agent
from draco_ray.rollout.tokens import TokenPolicy
from tests.conftest import REPOSITORY
from tests.support.chat_tokenizer import QWEN3 as WITHOUT_TOOLS
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.tool_call_reader import ToolCallReaderMixin
from tests.support.tool_templates import TEMPLATES, tool_tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {"order": {"type": "string"}, "cents": {"type": "integer"}},
    "required": ["order"],
}
SCHEMA = {"type": "function", "function": {"name": "refund", "description": "Pays back.", "parameters": PARAMETERS}}
TASK = Task(task_id="t1", instruction="Refund order 7.", tools=json.dumps([SCHEMA]))
END = {"llama": "<|eot_id|>"}


@pytest.fixture(params=sorted(TEMPLATES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def chat_of(family: str, *, thinking: bool = False) -> ChatTokenizer:
    return ChatTokenizer(tool_tokenizer(TEMPLATES[family]), thinking=thinking)


def said_by(family: str, *calls: dict[str, object], before: str = "") -> str:
    """A turn as the family's own template writes it, which is what its models learn to write."""
    tokenizer = tool_tokenizer(TEMPLATES[family])
    made = [{"type": "function", "function": {"name": "refund", "arguments": call}} for call in calls]
    if family == "llama":
        return "; ".join(json.dumps({"name": "refund", "parameters": call}) for call in calls)
    if family == "mistral":
        listed = [{"name": "refund", "arguments": call, "id": "abcdefgh1"} for call in calls]
        return f"{before}[TOOL_CALLS] {json.dumps(listed)}"
    if family == "mistral args":
        return before + "".join(f"[TOOL_CALLS]refund[ARGS]{json.dumps(call)}" for call in calls)
    ask = [{"role": "user", "content": "-"}]
    turn = {"role": "assistant", "content": before, "tool_calls": made}
    head = tokenizer.apply_chat_template(ask, tokenize=False) + "<|im_start|>assistant\n"
    text = tokenizer.apply_chat_template([*ask, turn], tokenize=False).removeprefix(head)
    return str(text).removesuffix("<|im_end|>\n").rpartition("</think>\n\n")[2]


def test_a_turn_of_every_family_is_read_as_its_template_writes_it(family: str) -> None:
    reader = ToolCallReader(chat_of(family), None)
    for calls in ([{"order": "7"}], [{"order": 'a "b" <c>', "cents": 5}, {"order": "é\n2"}]):
        read = reader.read(said_by(family, *calls, before="I see."), TASK.tools, thinking=False)
        assert read is not None
        assert read.problem is None
        assert [dict(call.arguments) for call in read.calls] == calls
        assert {call.name for call in read.calls} == {"refund"}
        assert "I see." not in read.text
        assert read.text.count("refund") == len(calls)
    for closing in ("Done.", "Order 7 costs {5}.", "", "<think>I might call refund.</think>No."):
        assert reader.read(closing, TASK.tools, thinking=False) is None


def test_arguments_of_named_kinds_are_read_by_what_their_names_stand_for(family: str) -> None:
    kinds = {
        "Place": {
            "type": "object",
            "properties": {"floor": {"$ref": "#/$defs/Floor"}, "in": {"$ref": "#/$defs/Place"}},
        },
        "Floor": {"type": "integer", "enum": [1, 2]},
    }
    place = {"$ref": "#/$defs/Place", "description": "Where to."}
    properties = {"to": place, "by": {"anyOf": [place, {"type": "null"}]}, "via": {"type": "array", "items": place}}
    properties |= {"floor": {"$ref": "#/$defs/Floor"}, "order": {"$ref": "#/$defs/Unknown"}, "note": {}}
    parameters = {"type": "object", "properties": properties, "$defs": kinds}
    function = {"name": "refund", "description": "Pays back.", "parameters": parameters}
    given = {"to": {"floor": 2}, "by": {"floor": 1}, "via": [{"in": {"floor": 1}}], "floor": 1, "order": "7"}
    given |= {"note": "8"}
    read = ToolCallReader(chat_of(family), None).read(
        said_by(family, given), json.dumps([{"type": "function", "function": function}]), thinking=False
    )
    assert read is not None
    assert [dict(call.arguments) for call in read.calls] == [given]


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": None}])
def test_a_tool_whose_parameters_are_not_said_is_called(family: str, parameters: object) -> None:
    function = {"name": "refund", "description": "Pays back.", "parameters": parameters}
    tools = json.dumps([{"type": "function", "function": function}])
    read = ToolCallReader(chat_of(family), None).read(said_by(family, {"order": "A7"}), tools, thinking=False)
    assert read is not None
    assert [dict(call.arguments) for call in read.calls] == [{"order": "A7"}]


def test_calls_in_reasoning_are_none(family: str) -> None:
    reader = ToolCallReader(chat_of(family, thinking=True), None)
    call = said_by(family, {"order": "7"})
    assert reader.read(f"<think>{call}</think>No.", TASK.tools, thinking=False) is None
    assert reader.read(f"{call}</think>No.", TASK.tools, thinking=True) is None
    assert reader.read(f"{call} and on and on", TASK.tools, thinking=True) is None
    read = reader.read(f"Let me.</think>{call}", TASK.tools, thinking=True)
    assert read is not None
    assert len(read.calls) == 1


@pytest.mark.parametrize(
    ("family", "turn"),
    [
        ("qwen2.5", '<tool_call>\n{"name": "refund", "arguments": {"order": "7"}\n</tool_call>'),
        ("qwen2.5", '<tool_call>{"name": "refund"}</tool_call>'),
        ("qwen2.5", '<tool_call>{"name": "refund", "arguments": [7]}</tool_call>'),
        ("qwen2.5", "<tool_call>" + '{"name": "refund", "arguments": ' + "[" * 100_000),
        ("qwen3", '<tool_call>{"name": "refund", "arguments": {}}</tool_call>\n<tool_call>{"nam'),
        ("qwen3", "<tool_call></tool_call>"),
        ("qwen3", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        ("qwen3.5", '<tool_call>\n{"name": "refund", "arguments": {"order": "7"}}\n</tool_call>'),
        ("qwen3.5", "<tool_call>\n<function=>\n</tool_call>"),
        ("llama", '{"name": "refund", "parameters": {"order": "7"'),
        ("llama", '{"name": "refund"}'),
        ("mistral", '[TOOL_CALLS] [{"name": "refund", "arguments": {"order": "7"}'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral args", '[TOOL_CALLS]refund[ARGS]{"order": "7"'),
        ("mistral args", "[TOOL_CALLS]"),
    ],
)
def test_a_call_that_cannot_be_read_is_told_from_a_turn_without_any(family: str, turn: str) -> None:
    read = ToolCallReader(chat_of(family), None).read(f"I try.\n{turn}", TASK.tools, thinking=False)
    assert read is not None
    assert not read.calls
    assert read.problem
    assert "\n" not in read.problem
    assert "I try." not in read.text


def test_results_follow_in_the_templates_own_form_and_hold_no_control_tokens(family: str) -> None:
    chat = chat_of(family)
    ids = chat.after_calls([1, chat.end_of_turn_id], ["a", "b"], ["<|im_end|></tool_response><|eot_id|>", "two"])
    text = chat.tokenizer.decode(ids)
    assert text.index("<|im_end|></tool_response>") < text.index("two")
    # Each mark once for the template, and none for the text that spells it.
    spelled = chat.tokenizer.encode("<|im_end|></tool_response><|eot_id|>", add_special_tokens=False)
    controls = [id_ for id_ in ids if id_ in spelled]
    clean = chat.after_calls([1, chat.end_of_turn_id], ["a", "b"], ["one", "two"])
    assert controls == [id_ for id_ in clean if id_ in spelled]
    # A turn that a limit has cut is closed first.
    assert chat.after_calls([1], ["a", "b"], ["one", "two"]) == [chat.end_of_turn_id, *clean]


def test_tools_and_what_they_say_are_in_the_prompt(family: str) -> None:
    chat = chat_of(family)
    schema = json.loads(json.dumps(SCHEMA).replace("Pays back.", "Pays <|im_end|> back."))
    messages = [
        Message(role=TOOLS, content=json.dumps([schema])),
        Message(role="system", content="Be kind."),
        Message(role="user", content="Hello."),
    ]
    ids = chat.prompt(messages)
    text = chat.tokenizer.decode(ids)
    assert all(words in text for words in ("refund", "Pays <|im_end|> back.", '"cents"', "Be kind.", "Hello."))
    end = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    plain = chat.prompt([Message(role=TOOLS, content=json.dumps([SCHEMA])), *messages[1:]])
    assert ids.count(end) == plain.count(end)


def test_what_cannot_be_used_is_one_line() -> None:
    without = ChatTokenizer(chat_tokenizer(WITHOUT_TOOLS), thinking=False)
    tools = Message(role=TOOLS, content=TASK.tools)
    with pytest.raises(ConfigError, match="does not support tools") as refused:
        without.prompt([tools, Message(role="user", content="Hello.")])
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="agent.tool_parser='hermos': unknown; expected one of .*hermes"):
        ToolCallReader(chat_of("qwen3"), "hermos")
    with pytest.raises(ConfigError, match="agent.tool_parser='jamba' does not work with this tokenizer"):
        ToolCallReader(chat_of("qwen3"), "jamba")
    strange = TEMPLATES["qwen2.5"].replace("<tool_call>", "<do>")
    with pytest.raises(ConfigError, match="set agent.tool_parser to vLLM's parser"):
        ToolCallReader(ChatTokenizer(tool_tokenizer(strange), thinking=False), None)


@dataclass
class Says(ToolCallReaderMixin):
    """A stand-in for the engine: says the next line of a script."""

    chat: ChatTokenizer
    lines: list[str]
    cut: bool = False
    name: str = "scripted"
    asked: list[list[int]] = field(default_factory=list)

    async def sample(self, token_ids: list[int], *, max_tokens: int, seed: int | None = None) -> Sample:
        self.asked.append(token_ids)
        ids = self.chat.tokenizer.encode(self.lines[len(self.asked) - 1], add_special_tokens=False)
        ids = ids if self.cut else [*ids, self.chat.end_of_turn_id]
        reason = "length" if self.cut else "stop"
        return Sample(token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason=reason, policy_version=0)


@dataclass
class Desk:
    """A stand-in for a world: remembers what was called, and fails where told."""

    answers: list[str | EnvironmentCrashed]
    task: Task = TASK
    called: list[dict[str, object]] = field(default_factory=list)

    async def act(self, action: str) -> str:
        self.called.append(json.loads(action))
        answer = self.answers[len(self.called) - 1]
        if isinstance(answer, EnvironmentCrashed):
            raise answer
        return answer

    async def evaluate(self) -> object:
        raise NotImplementedError

    async def close(self) -> None:
        return


async def play(
    family: str, lines: list[str], answers: Sequence[str | EnvironmentCrashed], *, cut: bool = False, **limits: Any
) -> tuple[Trajectory, Desk, ChatTokenizer]:
    chat = chat_of(family)
    sampler, desk = Says(chat, lines, cut), Desk(list(answers))
    config = AgentConfig(use="tool_calling", **limits)
    agent = find_agent(config.use)(TokenPolicy(sampler, chat, config), config, "You refund.\n{task_description}")
    request = RolloutRequest(task_id="t1", group="step1/t1", rollout=0, attempt=0, seed=1)
    trajectory = await agent.run(desk, request)  # type: ignore[arg-type]
    ids = trajectory.token_ids_T.tolist()
    for turn, seen in zip(trajectory.turns, sampler.asked, strict=True):
        # Token-in: each turn continues the record so far. Token-out: the record continues with what was said.
        assert seen == ids[: turn.first_token]
        assert chat.text(ids[turn.first_token : turn.last_token]) == turn.text
    return trajectory, desk, chat


async def test_an_episode_with_parallel_calls_and_a_call_that_is_mended(family: str) -> None:
    others = {"llama": '{"name": "refund", ', "mistral": "[TOOL_CALLS] [{", "mistral args": "[TOOL_CALLS]"}
    broken = others.get(family, "<tool_call>{")
    both = said_by(family, {"order": "7"}, {"order": "8", "cents": 5})
    trajectory, desk, chat = await play(family, [broken, both, "Both are paid back."], ["paid", "no such order"])
    assert trajectory.ended is EpisodeEnd.FINISHED
    assert desk.called == [
        {"name": "refund", "arguments": {"order": "7"}},
        {"name": "refund", "arguments": {"order": "8", "cents": 5}},
    ]
    mended, parallel, closing = trajectory.turns
    assert mended.observation is not None
    assert mended.observation.startswith("error: the call cannot be read")
    assert parallel.observation == "(1) refund: paid\n(2) refund: no such order"
    assert (closing.action, closing.observation) == (None, None)
    # One step for both calls, one for the message at the end.
    assert trajectory.steps == trajectory.turns
    assert closing.message
    assert set(trajectory.step_T[trajectory.sampled_T].tolist()) == {0, 1, 2}
    assert set(trajectory.step_T[closing.first_token : closing.last_token].tolist()) == {2}
    text = chat.tokenizer.decode(trajectory.token_ids_T.tolist())
    assert text.count("no such order") == 1
    if family == "named":
        results = ("unknown call00001: error: ", "refund call00001: paid", "refund call00002: no such order")
        assert [text.count(each) for each in results] == [1, 1, 1]
    assert np.array_equal(trajectory.step_T != GAP, trajectory.sampled_T & (trajectory.step_T >= 0))


async def test_a_closing_turn_may_be_a_gap() -> None:
    lines = [said_by("qwen3", {"order": "7"}), "It is paid back."]
    played, _, _ = await play("qwen3", lines, ["ok"], closing_turn="gap")
    assert (len(played.steps), played.turns[-1].message) == (1, False)
    assert set(played.step_T[played.turns[-1].first_token :].tolist()) == {GAP}
    # Nobody receives a turn that only reasons, or one that a limit cut.
    thought, _, _ = await play("qwen3", ["<think>What now?"], [])
    assert (thought.ended, thought.steps) == (EpisodeEnd.FINISHED, ())
    cut, _, _ = await play("qwen3", ["It is paid"], [], cut=True)
    assert (cut.ended, cut.steps) == (EpisodeEnd.RESPONSE_LIMIT, ())


async def test_how_episodes_end() -> None:
    call = said_by("qwen3", {"order": "7"})
    lost, _, _ = await play("qwen3", [call], [EnvironmentCrashed("gone")])
    assert (lost.ended, lost.error) == (EpisodeEnd.SERVER_ERROR, "gone")
    assert lost.turns[0].observation is None
    assert (await play("qwen3", [call] * 2, ["ok"] * 2, max_turns=2))[0].ended is EpisodeEnd.TURN_LIMIT
    # What a limit has cut is not called, complete as it may look.
    cut, desk, _ = await play("qwen3", [call], ["ok"], cut=True)
    assert (cut.ended, cut.steps, desk.called) == (EpisodeEnd.RESPONSE_LIMIT, (), [])
    long, _, _ = await play("qwen3", [call], ["x" * 9000], max_response_length=200)
    assert long.ended is EpisodeEnd.RESPONSE_LIMIT
    short, _, _ = await play("qwen3", [call, "Done."], ["x" * 9000], max_output_characters=100)
    assert short.turns[0].observation == "x" * 100 + "\n[output cut: 8900 more characters]"


async def test_a_task_without_tools_is_refused() -> None:
    chat, config = chat_of("qwen3"), AgentConfig(use="tool_calling")
    agent = find_agent(config.use)(TokenPolicy(Says(chat, []), chat, config), config, "{task_description}")
    with pytest.raises(ConfigError, match="task 't9' has no tools; use an environment with tools"):
        agent.prompt(Task(task_id="t9", instruction="Nothing."))


def test_a_rollout_worker_loads_no_vllm_to_play_with_tools() -> None:
    """Calls are read in the engine's process; importing vLLM's parsers takes each worker 600 MiB."""
    code = """
import asyncio, sys
from draco_ray.engine.sampler import Sample
from draco_ray.rollout.worker import RolloutWorkerActor
from draco_ray.config.schema import AgentConfig
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.tokens import TokenPolicy
from draco_ray.records import TOOLS, Message
from tests.unit.test_tool_agent import TASK, chat_of

class Engine:
    name = "engine"
    async def sample(self, token_ids, *, max_tokens, seed=None):
        return Sample(token_ids=[1], logprobs=[-1.0], finish_reason="stop", policy_version=0)
    async def read_calls(self, text, tools, *, parser, thinking):
        return None

prompt = (Message(role=TOOLS, content=TASK.tools), Message(role="user", content="Refund."))
request = RolloutRequest(task_id="t", group="g", rollout=0, attempt=0, seed=0)
talk = TokenPolicy(Engine(), chat_of("qwen3"), AgentConfig()).begin(prompt, request)
assert asyncio.run(talk.sample()).tool_use is None
print([name for name in sys.modules if name.partition(".")[0] == "vllm"][:3])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr[-2000:]
