"""An API model in the agent loop: the same ends as on tokens, length by the endpoint's count, costs summed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from draco_ray.config.schema import AgentConfig, JudgeConfig, Price
from draco_ray.environments.base import WorldVerdict
from draco_ray.errors import EnvironmentCrashed, JudgeUnavailable
from draco_ray.judging.client import LiteLLMClient
from draco_ray.lab.evaluation.api_policy import ChatPolicy
from draco_ray.lab.evaluation.evaluate import max_tokens_per_turn
from draco_ray.records import EpisodeEnd, Task, Trajectory, Usage
from draco_ray.rollout.agent import RolloutRequest, agent_template
from draco_ray.rollout.turn_agent import CodeAgent
from tests.support.scripted_judge_server import Reply, ScriptedJudgeServer

CELL = "<code>\nprint(1)\n</code>"
TASK = Task(
    task_id="abc_1",
    instruction="Like all songs.",
    fields={
        "supervisor_first_name": "Ann",
        "supervisor_last_name": "Lee",
        "supervisor_email": "ann@lee.example",
        "supervisor_phone_number": "5551234",
    },
)


@dataclass
class World:
    """Prints what it is told to, or crashes."""

    crash_at: int | None = None
    executed: list[str] = field(default_factory=list)
    task: Task = TASK

    async def act(self, action: str) -> str:
        self.executed.append(action)
        if len(self.executed) == self.crash_at:
            raise EnvironmentCrashed("the server died")
        return f"output {len(self.executed)}"

    async def evaluate(self) -> WorldVerdict:
        raise NotImplementedError

    async def close(self) -> None:
        return


async def play(
    *script: Reply, world: World | None = None, price: Price | None = None, attempts: int = 2, **limits: int
) -> tuple[Trajectory, Usage, list[dict[str, object]]]:
    """An episode over real HTTP and LiteLLM against a scripted endpoint."""
    with ScriptedJudgeServer(*script) as server:
        client = JudgeConfig(
            model="openai/scripted",
            api_base=server.base,
            max_attempts=attempts,
            max_tokens=256,
            temperature=None,
            prices={} if price is None else {"scripted": price},
        )

        async def at_once(seconds: float) -> None:
            return None

        config = AgentConfig(prompt=Path("prompts/agent_starter.txt"), **limits)
        complete = LiteLLMClient(client, sleep=at_once)
        policy = ChatPolicy(complete, config, name="scripted", priced=price is not None)
        agent = CodeAgent(policy, config, agent_template(config.prompt, ""))
        request = RolloutRequest(task_id="abc_1", group="evaluation/abc_1", rollout=1, attempt=0, seed=0)
        trajectory = await agent.run(world or World(), request)
        return trajectory, trajectory.usage, server.requests


@pytest.mark.parametrize(
    ("model", "configured", "expected"),
    [
        ("hosted_vllm/not-known", None, 24_576),
        ("hosted_vllm/not-known", 3000, 3000),
        ("openai/gpt-4o", None, 16_384),
        ("openai/gpt-4o", 3000, 3000),
        ("openai/gpt-4o", 20_000, 16_384),
    ],
)
def test_an_api_model_may_write_what_the_response_holds_as_far_as_it_goes(
    model: str, configured: int | None, expected: int
) -> None:
    assert max_tokens_per_turn(model, AgentConfig(max_turn_tokens=configured)) == expected


async def test_an_episode_ends_when_a_turn_has_no_code_and_its_turns_are_told_in_order() -> None:
    world = World()
    trajectory, usage, requests = await play(
        Reply(text=CELL, input_tokens=100, output_tokens=10),
        Reply(text="All done.", input_tokens=150, cached_tokens=100, output_tokens=5),
        world=world,
        price=Price(input=1.0, cached_input=0.5, output=10.0),
    )
    assert trajectory.ended is EpisodeEnd.FINISHED
    assert world.executed == ["print(1)"]
    assert [turn.observation for turn in trajectory.turns] == ["output 1", None]
    messages = requests[1]["messages"]
    assert isinstance(messages, list)
    assert messages[-2:] == [{"role": "assistant", "content": CELL}, {"role": "user", "content": "output 1"}]
    assert "temperature" not in requests[0]
    assert (usage.calls, usage.requests) == (2, 2)
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (250, 100, 15)
    assert usage.dollars == pytest.approx((150 * 1.0 + 100 * 0.5 + 15 * 10.0) / 1e6)


async def test_limits_end_an_episode() -> None:
    trajectory, _, _ = await play(Reply(text=CELL), max_turns=3)
    assert (trajectory.ended, len(trajectory.turns)) == (EpisodeEnd.TURN_LIMIT, 3)
    world = World()
    trajectory, _, _ = await play(
        Reply(text=CELL, input_tokens=100, output_tokens=10),
        Reply(text=CELL, input_tokens=260, output_tokens=40),
        world=world,
        max_response_length=200,
    )
    # 260 - 100 + 40 is the limit: the second turn's code is not run.
    assert (trajectory.ended, len(world.executed)) == (EpisodeEnd.RESPONSE_LIMIT, 1)
    trajectory, _, _ = await play(Reply(text="<code>\nhalf a pro", finish_reason="length"))
    assert trajectory.ended is EpisodeEnd.RESPONSE_LIMIT


async def test_an_endpoint_that_does_not_count_ends_no_episode_by_its_length() -> None:
    replies = [Reply(text=CELL, usage={}), Reply(text="All done.", usage={})]
    trajectory, usage, _ = await play(*replies, max_response_length=200, price=Price(input=1.0, output=10.0))
    assert (trajectory.ended, len(trajectory.turns)) == (EpisodeEnd.FINISHED, 2)
    assert (usage.input_tokens, usage.output_tokens) == (0, 0)
    # What it may cost is on the bill.
    assert usage.dollars is not None
    assert usage.dollars > 2 * 256 * 10 / 1e6


async def test_a_lost_world_and_a_silent_endpoint_are_server_errors() -> None:
    trajectory, usage, _ = await play(Reply(text=CELL), world=World(crash_at=2))
    assert (trajectory.ended, trajectory.error, usage.calls) == (EpisodeEnd.SERVER_ERROR, "the server died", 2)
    trajectory, usage, _ = await play(Reply(text=CELL), Reply(status=500))
    assert trajectory.ended is EpisodeEnd.SERVER_ERROR
    assert "did not answer" in (trajectory.error or "")
    assert usage.requests == 3
    assert usage.dollars is None


async def test_a_rate_limit_is_waited_out_and_a_refused_key_stops_the_evaluation() -> None:
    trajectory, usage, _ = await play(Reply(status=429, headers={"retry-after": "1"}), Reply(text="Done."))
    assert trajectory.ended is EpisodeEnd.FINISHED
    assert usage.requests == 2
    with pytest.raises(JudgeUnavailable):
        await play(Reply(status=401))
