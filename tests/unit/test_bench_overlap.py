"""The overlap benchmark's stand-ins: an engine that keeps to its scripts, and barriers that part the phases."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from paced import PacedEngine, Repertoire

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.chat import ChatTokenizer
from draco_ray.engine.sampler import Sample
from draco_ray.environments.base import WorldVerdict
from draco_ray.judging.phases import Credit, Phase, Score, Stage1, Stage2, Union
from draco_ray.records import EpisodeEnd, Task
from draco_ray.rollout.agent import RolloutRequest, agent_template, fill_agent_prompt
from draco_ray.rollout.tokens import TokenPolicy
from draco_ray.rollout.turn_agent import CodeAgent
from draco_ray.sandbox.world.scripts import families
from tests.support.chat_tokenizer import QWEN3, chat_tokenizer
from tests.support.jobs import load_job
from tests.support.tool_call_reader import ToolCallReaderMixin

TOKENIZER = chat_tokenizer(QWEN3)
CHAT = ChatTokenizer(TOKENIZER, thinking=False)
FAMILY = families()["longest_library_song"]
AGENT = AgentConfig(prompt=Path("prompts/agent_starter.txt"), thinking=False, max_response_length=100_000)


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_job("bench_overlap")


@dataclass
class World:
    """A world in which every cell prints the same."""

    task: Task

    async def act(self, action: str) -> str:
        return "ok\nthat is all"

    async def evaluate(self) -> WorldVerdict:
        raise NotImplementedError

    async def close(self) -> None:
        return


@dataclass
class Client(ToolCallReaderMixin):
    """Reaches the engine without Ray."""

    engine: PacedEngine
    name: str = "engine-0"

    async def sample(self, token_ids: list[int], *, max_tokens: int, seed: int | None = None) -> Sample:
        return await self.engine.sample(token_ids, max_tokens, seed, None)


async def test_an_episode_follows_one_of_its_tasks_scripts_to_the_end(bench: ModuleType) -> None:
    tasks = [
        Task(
            task_id=f"abc_{number}",
            instruction=instruction,
            fields={
                "supervisor_first_name": "Ann",
                "supervisor_last_name": "Lee",
                "supervisor_email": "ann@lee.example",
                "supervisor_phone_number": "5551234",
            },
        )
        for number, instruction in enumerate(("Name the longest song.", "Name the longest song in my library."), 1)
    ]
    prompts = [tuple(CHAT.prompt(fill_agent_prompt(agent_template(AGENT.prompt, ""), task))) for task in tasks]
    scripts = bench.scripts(FAMILY, TOKENIZER, CHAT)
    assert len({script[0] for script in scripts}) == len(scripts)
    engine = PacedEngine(
        Repertoire(scripts=dict.fromkeys(prompts, scripts), end_of_turn_id=CHAT.end_of_turn_id), tokens_per_second=1e6
    )
    agent = CodeAgent(TokenPolicy(Client(engine), CHAT, AGENT), AGENT, agent_template(AGENT.prompt, ""))
    followed = set()
    for task, seed in [(task, seed) for task in tasks for seed in range(4)]:
        request = RolloutRequest(task_id=task.task_id, group=f"step1/{task.task_id}", rollout=0, attempt=0, seed=seed)
        played = await agent.run(World(task), request)
        assert played.ended is EpisodeEnd.FINISHED
        said = tuple(tuple(played.token_ids_T[turn.first_token : turn.last_token].tolist()) for turn in played.turns)
        assert said in scripts
        followed.add(scripts.index(said))
    assert len(followed) > 2
    with pytest.raises(ValueError, match="no prepared script"):
        await engine.sample([1, 2, 3], 10, 0, None)


async def test_barriers_part_the_phases(bench: ModuleType) -> None:
    order: list[str] = []

    class Pool:
        async def work(self, phase: str, seconds: float) -> str:
            order.append(phase)
            await asyncio.sleep(seconds)
            return phase

        async def run(self, seconds: float) -> str:
            return await self.work("run", seconds)

        async def ask(self, phase: Phase, seconds: float) -> str:
            return await self.work(phase.name, seconds)

    held = bench.Held(Pool(), bench.Barriers(prompts=2, group_size=2))

    async def member(group: int, rollout: int) -> None:
        assert await held.run(0.02 * group * rollout) == "run"
        await held.ask(Stage2, 0.01 * group)

    async def group(index: int) -> None:
        await held.ask(Stage1, 0)
        await asyncio.gather(*(member(index, rollout) for rollout in range(2)))
        await held.ask(Union, 0.01 * index)
        await asyncio.gather(*(held.ask(Score, 0.01 * index) for _ in range(2)))
        if index:
            await held.ask(Credit, 0)

    async with asyncio.timeout(600):
        await asyncio.gather(group(0), group(1))
    later = [phase for phase in order if phase != "stage1"]
    assert later == ["run"] * 4 + ["stage2"] * 4 + ["union"] * 2 + ["score"] * 4 + ["credit"]
