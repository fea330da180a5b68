"""Demonstrations: draws of faults, wordings, and that their tokens are those of an episode in the agent loop."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from draco_ray.config.load import load_config
from draco_ray.config.schema import AgentConfig
from draco_ray.engine.chat import ChatTokenizer
from draco_ray.engine.sampler import Sample
from draco_ray.environments.appworld.environment import AppWorldEnvironment
from draco_ray.environments.base import WorldVerdict
from draco_ray.records import EpisodeEnd, Task, Trajectory
from draco_ray.rollout.agent import RolloutRequest, agent_template
from draco_ray.rollout.code_block import cut_output, extract_code
from draco_ray.rollout.tokens import TokenPolicy
from draco_ray.rollout.turn_agent import CodeAgent
from draco_ray.sandbox.starter import demonstrations as demo
from draco_ray.sandbox.starter.settings import FAULT_RATES, StarterSettings
from draco_ray.sandbox.starter.tokenizer import train_tokenizer
from draco_ray.sandbox.world.scripts import Fault, families

AGENT = load_config("sandbox").agent
FAMILY = families()["like_playlist_songs"]
TASK = Task(
    task_id="abc_1",
    instruction=FAMILY.wordings[0].format(title="Road Trip"),
    fields={
        "supervisor_first_name": "Ann",
        "supervisor_last_name": "Lee",
        "supervisor_email": "ann@lee.example",
        "supervisor_phone_number": "5551234",
    },
)


def played(faults: frozenset[Fault] = frozenset(), output: str = "12\n") -> demo.Demonstration:
    cells = tuple(FAMILY.script(faults))
    return demo.Demonstration(task=TASK, wordings=FAMILY.wordings, cells=cells, outputs=(output,) * len(cells))


def test_draws_follow_the_rates_and_the_seed() -> None:
    tasks = [(TASK, FAMILY)]
    drawn = demo.draw_demonstrations(tasks, 400, FAULT_RATES, seed=1)
    assert (
        drawn
        == demo.draw_demonstrations(tasks, 400, FAULT_RATES, seed=1)
        != demo.draw_demonstrations(tasks, 400, FAULT_RATES, seed=2)
    )
    unfinished = sum("complete_task" not in each.cells[-1] + each.cells[-2] for each in drawn) / 400
    assert unfinished == pytest.approx(FAULT_RATES[Fault.NO_COMPLETION], abs=0.07)
    clean = demo.draw_demonstrations(tasks, 3, {}, seed=1)
    assert {each.cells for each in clean} == {tuple(FAMILY.script())}
    certain = demo.draw_demonstrations(tasks, 3, {Fault.PRINT_SECRET: 1.0}, seed=1)
    assert {each.cells for each in certain} == {tuple(FAMILY.script(frozenset({Fault.PRINT_SECRET})))}


def test_faults_a_family_does_not_have_are_passed_over() -> None:
    family = families()["playlist_of_likes"]
    drawn = demo.draw_demonstrations([(TASK, family)], 2, {Fault.WRONG_FILTER: 1.0}, seed=0)
    assert {each.cells for each in drawn} == {tuple(family.script())}


def test_the_default_rates_leave_a_middling_success() -> None:
    rates = StarterSettings().fault_rates
    assert set(rates) == set(Fault)
    for family in families().values():
        flawless = np.prod([1 - rates[fault] for fault in family.fatal])
        assert 0.3 < flawless < 0.7


def test_rewording_keeps_the_parameters() -> None:
    rng = random.Random(0)
    seen = {demo.reword(played(), rng).task.instruction for _ in range(60)}
    assert seen == {wording.format(title="Road Trip") for wording in FAMILY.wordings}
    stranger = replace(played(), task=replace(TASK, instruction="Sing."))
    with pytest.raises(ValueError, match="fits no wording"):
        demo.reword(stranger, rng)


@pytest.mark.parametrize("family", families().values(), ids=lambda family: family.name)
def test_every_wording_can_be_reworded_into_every_other(family) -> None:  # type: ignore[no-untyped-def]
    values = {"title": "Road Trip", "date": "2023-01-10", "limit": "85", "time": "12:30", "relation": "sibling"}
    values |= {"message": "See you.", "tag": "home", "project": "Move", "extension": "txt", "stem": "songs_1"}
    told = {wording.format(**values) for wording in family.wordings}
    for instruction in told:
        demonstration = replace(played(), task=replace(TASK, instruction=instruction), wordings=family.wordings)
        rng = random.Random(0)
        assert {demo.reword(demonstration, rng).task.instruction for _ in range(80)} == told


class Script:
    """A sampler that returns the turns of a script, one per call."""

    name = "script"

    def __init__(self, turns: list[list[int]]) -> None:
        self._turns = iter(turns)

    async def sample(self, token_ids: list[int], *, max_tokens: int, seed: int | None = None) -> Sample:
        turn = next(self._turns)
        assert len(turn) <= max_tokens
        return Sample(token_ids=turn, logprobs=[0.0] * len(turn), finish_reason="stop", policy_version=0)

    async def read_calls(self, text: str, tools: str, *, parser: str | None, thinking: bool) -> None:
        raise NotImplementedError


class Recording:
    """A stand-in world that replays recorded outputs."""

    def __init__(self, demonstration: demo.Demonstration) -> None:
        self.task = demonstration.task
        self._outputs = iter(demonstration.outputs)

    async def act(self, action: str) -> str:
        return next(self._outputs)

    async def evaluate(self) -> WorldVerdict:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


async def recorded(demonstration: demo.Demonstration, chat: ChatTokenizer, agent: AgentConfig) -> Trajectory:
    """What the agent loop records if policy and AppWorld write exactly the demonstration's texts."""
    lines = demo.turn_texts(demonstration, "Done.")
    turns = [[*chat.tokenizer.encode(line, add_special_tokens=False), chat.end_of_turn_id] for line in lines]
    template = agent_template(agent.prompt, AppWorldEnvironment.agent_prompt)
    player = CodeAgent(TokenPolicy(Script(turns), chat, agent), agent, template)
    request = RolloutRequest(task_id="abc_1", group="demonstrations", rollout=0, attempt=0, seed=0)
    return await player.run(Recording(demonstration), request)


@pytest.mark.parametrize("max_turns", [AGENT.max_turns, 3])
async def test_an_example_has_the_tokens_that_the_agent_loop_records(max_turns: int) -> None:
    agent = AGENT.model_copy(update={"max_turns": max_turns})
    demonstration = played(frozenset({Fault.REPEAT_FAILING_CALL}), output="x" * 500 + "<|im_end|>")
    tokenizer = train_tokenizer(demo.texts(demonstration, agent, "Done."), 600, 4096)
    chat = ChatTokenizer(tokenizer, thinking=agent.thinking)
    example = demo.tokenize_demonstration(demonstration, chat, agent, "Done.")
    trajectory = await recorded(demonstration, chat, agent)
    assert example.token_ids == tuple(trajectory.token_ids_T.tolist())
    assert example.sampled == tuple(trajectory.sampled_T.tolist())
    if max_turns == 3:
        assert trajectory.ended is EpisodeEnd.TURN_LIMIT
        assert len(trajectory.turns) == 3
        return
    assert trajectory.ended is EpisodeEnd.FINISHED
    assert tuple(turn.action for turn in trajectory.steps) == demonstration.cells
    assert [turn.observation for turn in trajectory.steps] == [
        cut_output(output, agent.max_output_characters) for output in demonstration.outputs
    ]
    assert trajectory.turns[-1].text == "Done."
    # Every sampled stretch is one turn and its end; a policy that samples it is understood in the same way.
    for turn in trajectory.turns:
        sampled = trajectory.token_ids_T[turn.first_token : turn.last_token].tolist()
        assert trajectory.sampled_T[turn.first_token : turn.last_token].all()
        assert sampled[-1] == chat.end_of_turn_id
        assert len(sampled) <= (agent.max_turn_tokens or 0)
        assert extract_code(chat.text(sampled)) == turn.action
    assert trajectory.sampled_T.sum() == sum(turn.last_token - turn.first_token for turn in trajectory.turns)
    assert int((trajectory.token_ids_T[~trajectory.sampled_T] == chat.end_of_turn_id).sum()) == len(
        trajectory.prompt
    ) + len(trajectory.steps)
