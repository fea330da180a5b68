"""Agents on the OpenAI Agents SDK, LangGraph and smolagents, unchanged, against the endpoint of an episode.

``make frameworks-check`` makes an environment for each and runs this; a variable below names another. The policy is
scripted; the programs, their frameworks, the endpoint and the books of what was sampled are real.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from draco_ray.records import EpisodeEnd, Trajectory
from tests.conftest import REPOSITORY
from tests.support.endpoint_episode import END, ScriptedSampler, call
from tests.unit.test_program_agent import Rollouts

pytestmark = pytest.mark.slow

FRAMEWORKS = REPOSITORY / "tests" / "support" / "frameworks"
BOTH = [(api, way) for api in ("chat", "responses") for way in ("run", "stream")]


async def played(folder: Path, script: str, variable: str, usual: str, lines: list[str], *words: str) -> Trajectory:
    """A rollout of a script in the environment that a variable, else a folder, names."""
    python = Path(os.environ.get(variable) or REPOSITORY / usual)
    if not python.is_file():
        pytest.skip(f"{variable} names no python")
    rollouts = Rollouts(folder, sampler=ScriptedSampler(lines))
    command = " ".join([str(python), str(FRAMEWORKS / script), *words])
    trajectory = await rollouts.play(command=command, max_prompt_length=8000, max_response_length=8000)
    assert (trajectory.ended, trajectory.error) == (EpisodeEnd.FINISHED, None), trajectory.turns[-1].text
    # Every turn was asked for, none was repeated by a client that did not like its answer.
    assert len(rollouts.sampler.asked) == len(lines)
    return trajectory


def done(trajectory: Trajectory) -> str:
    """What the program printed."""
    return trajectory.turns[-1].text.rpartition("standard output:\n")[2].partition("\nstandard error:")[0]


@pytest.mark.parametrize(("api", "way"), BOTH)
async def test_openais_agents_sdk_with_a_sub_agent(tmp_path: Path, api: str, way: str) -> None:
    lines = [call("ask_policy", input="May A1 be refunded?"), f"It may.{END}", call(order="A1"), f"All done.{END}"]
    trajectory = await played(
        tmp_path, "openai_agents.py", "DRACO_AGENTS_PYTHON", ".venv-framework-agents/bin/python", lines, api, way
    )
    # The sub-agent is a branch, and what it said is a step.
    assert [(step.branch, step.observation) for step in trajectory.steps] == [
        (0, "It may."),
        (1, None),
        (0, "refunded A1"),
        (0, None),
    ]
    assert done(trajectory) == "All done."


@pytest.mark.parametrize(("api", "way"), BOTH)
async def test_langgraph(tmp_path: Path, api: str, way: str) -> None:
    two = call(order="A1").removesuffix(END) + "\n" + call(order="A2")
    trajectory = await played(
        tmp_path,
        "langgraph_agent.py",
        "DRACO_LANGGRAPH_PYTHON",
        ".venv-framework-langgraph/bin/python",
        [two, f"All done.{END}"],
        api,
        way,
    )
    assert trajectory.branches == (0,)
    refunds = "(1) refund: refunded A1\n(2) refund: refunded A2"
    assert [step.observation for step in trajectory.steps] == [refunds, None]
    assert done(trajectory) == "All done."


@pytest.mark.parametrize("way", ["run", "stream"])
@pytest.mark.parametrize("kind", ["tools", "code"])
async def test_smolagents(tmp_path: Path, kind: str, way: str) -> None:
    lines = {
        "tools": [call(order="A1"), call("final_answer", answer="All done.")],
        "code": [
            f"<code>\nprint(refund(order='A1'))\n</code>{END}",
            f"Thought: that is all.\n<code>\nfinal_answer({json.dumps('All done.')})\n</code>{END}",
        ],
    }[kind]
    trajectory = await played(
        tmp_path,
        "smol_agent.py",
        "DRACO_SMOLAGENTS_PYTHON",
        ".venv-framework-smolagents/bin/python",
        lines,
        kind,
        way,
    )
    assert len(trajectory.steps) >= 1
    # While it streams it also shows what it hears.
    assert done(trajectory).endswith("All done.")
    assert any("refunded A1" in (turn.observation or turn.text) for turn in trajectory.turns[:-1])
