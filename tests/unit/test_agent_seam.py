"""The page on agents is right: its agent plays, and its books are the code agent's."""

from __future__ import annotations

from pathlib import Path

import pytest

from draco_ray.config.schema import AgentConfig
from draco_ray.errors import ConfigError, EnvironmentCrashed, WorldBroken
from draco_ray.records import EpisodeEnd, Trajectory
from draco_ray.rollout.agent import RolloutRequest, find_agent
from draco_ray.rollout.tokens import TokenPolicy
from draco_ray.rollout.turn_agent import CodeAgent
from tests.conftest import REPOSITORY
from tests.unit.test_agent_loop import CHAT, END, TOKENIZER, ScriptedSampler, ScriptedWorld, check_books

REQUEST = RolloutRequest(task_id="abc_1", group="step1/abc_1", rollout=0, attempt=0, seed=1)


@pytest.fixture
def one_word(tmp_path: Path) -> str:
    """The agent of docs/extending/agent.md, as a name for ``agent.use``."""
    page = (REPOSITORY / "docs" / "extending" / "agent.md").read_text(encoding="utf-8")
    file = tmp_path / "one_word.py"
    file.write_text(page.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    return f"{file}:OneWord"


async def play(use: str, lines: list[str], outputs: list[str | EnvironmentCrashed], **limits: int) -> Trajectory:
    sampler = ScriptedSampler([line + END for line in lines])
    config = AgentConfig(use=use, **limits)
    agent = find_agent(config.use)(TokenPolicy(sampler, CHAT, config), config, "Say a word. {task_description}")
    trajectory = await agent.run(ScriptedWorld(outputs), REQUEST)
    check_books(trajectory, sampler)
    return trajectory


async def test_a_turn_is_an_action_until_the_agent_stops(one_word: str) -> None:
    trajectory = await play(one_word, ["look", "take", "stop"], ["a room", "taken"])
    assert trajectory.ended is EpisodeEnd.FINISHED
    assert [turn.action for turn in trajectory.turns] == ["look", "take", None]
    assert trajectory.tokens_M.tolist() == [
        len(TOKENIZER.encode(word, add_special_tokens=False)) + 1 for word in ("look", "take")
    ]
    assert trajectory.prompt[0].content == "Say a word. Like all songs."


async def test_limits_and_crashes_end_it_too(one_word: str) -> None:
    assert (await play(one_word, ["a"] * 3, ["x"] * 3, max_turns=2)).ended is EpisodeEnd.TURN_LIMIT
    lost = await play(one_word, ["a"], [EnvironmentCrashed("gone")])
    assert (lost.ended, lost.error) == (EpisodeEnd.SERVER_ERROR, "gone")
    assert (await play(one_word, ["a"], [WorldBroken("mine")])).ended is EpisodeEnd.CRASHED


def test_the_code_agent_goes_through_the_same_seam() -> None:
    assert find_agent("code") is CodeAgent
    with pytest.raises(ConfigError, match="did you mean 'code'"):
        find_agent("coed")
