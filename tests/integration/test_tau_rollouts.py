"""τ-bench as a training environment: the agent program plays episodes of a stand-in for tau2 behind the endpoint.

The policy is scripted, the user simulator a scripted HTTP server; processes, endpoint, records and files are real.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draco_ray.config.schema import AgentConfig
from draco_ray.errors import ConfigError, EnvironmentCrashed
from draco_ray.records import EpisodeEnd, Termination
from draco_ray.rollout.agent import Policy, RolloutRequest
from draco_ray.rollout.tokens import TokenPolicy
from draco_ray.rollout.worker import RolloutWorkerActor
from tests.support.endpoint_episode import CHAT, END, ScriptedSampler, call
from tests.support.scripted_customer import ScriptedCustomer
from tests.support.tau2_installation import write_python, write_retail
from tests.support.tau_rollout import USER_KEY, Played, play_tau, tau_config, tau_environment

pytestmark = pytest.mark.slow

LOOKS_UP = [call("find_user_id_by_name_zip", zip="19122"), f"Hello Yusuf.{END}"]
ASKS = ["A refund, please.", "Thanks. ###STOP###"]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in for tau2-bench as the installation, and the user simulator's key."""
    monkeypatch.setenv("TAU2_HOME", str(write_retail(tmp_path / "home")))
    monkeypatch.setenv("TAU2_PYTHON", str(write_python(tmp_path / "python")))
    monkeypatch.setenv("TAU2_USER_API_KEY", USER_KEY)
    return tmp_path


async def play(
    machine: Path, lines: list[str], said: list[str | int], *overrides: str, ground_truth: bool = False
) -> Played:
    with ScriptedCustomer(said) as customer:
        config = tau_config(customer.base, *overrides)
        played = await play_tau(config, "0", lines, machine / "kept", ground_truth=ground_truth)
        assert customer.keys <= {USER_KEY}
    everything = str(played.trajectory.turns) + str(played.trajectory.error) + str(contents(played))
    assert USER_KEY not in everything
    return played


def contents(played: Played) -> dict[str, str]:
    return {path.name: path.read_text() for path in played.kept.iterdir()}


def simulation(played: Played) -> dict[str, Any]:
    (found,) = json.loads(contents(played)["results.json"])["simulations"]
    assert isinstance(found, dict)
    return found


async def test_an_episode_is_recorded_and_tau2s_result_file_is_kept(machine: Path) -> None:
    played = await play(machine, LOOKS_UP, [*ASKS])
    rollout = played.trajectory
    assert (rollout.ended, rollout.error, rollout.branches) == (EpisodeEnd.FINISHED, None, (0,))
    assert [step.observation for step in rollout.steps] == ["yusuf_rossi_9620", None]
    assert [turn.role for turn in rollout.turns] == [
        *("tools", "system", "earlier assistant", "user", "assistant", "assistant", "program")
    ]
    # What tau2 prints, its rewards among it, is in its log and nowhere that a judge reads.
    assert rollout.turns[-1].text.endswith("standard output:\nThe episode ended: user_stop.")
    assert "Reward of the last episode" in contents(played)["tau2.log"]
    assert "Reward" not in str(rollout.turns)
    # Blind to outcomes: not scored, and the task has lost its criteria before it was played.
    kept = json.loads(contents(played)["results.json"])
    assert simulation(played)["reward_info"] is None
    assert kept["tasks"][0]["evaluation_criteria"] is None
    assert [message["role"] for message in simulation(played)["messages"]] == [
        *("assistant", "user", "assistant", "tool", "assistant", "user")
    ]


@pytest.mark.parametrize(("lines", "reward"), [(LOOKS_UP, 1.0), ([f"No.{END}"], 0.0)])
async def test_tau2s_reward_is_the_evaluators_number(machine: Path, lines: list[str], reward: float) -> None:
    played = await play(machine, lines, [*ASKS], ground_truth=True)
    assert played.evaluated is not None
    evaluation = played.evaluated.evaluation
    assert (evaluation.success, evaluation.reward) == (reward == 1.0, reward)
    assert evaluation.failures == (() if reward else ("DB",))
    assert simulation(played)["reward_info"]["reward"] == reward


@pytest.mark.parametrize(
    ("lines", "said", "ended", "error"),
    [
        # The policy's doing: a reply with nothing in it, and a chat that is longer than its context.
        ([LOOKS_UP[0], END], ASKS, EpisodeEnd.CRASHED, "must have either content or tool_calls"),
        (LOOKS_UP, ["Hello.", "many words " * 900], EpisodeEnd.RESPONSE_LIMIT, "after it had reached a limit"),
        # Nobody's, and nothing of the policy's to judge: what it is asked first is too long.
        (LOOKS_UP, ["many words " * 900], EpisodeEnd.SERVER_ERROR, "got no answer: This model's maximum context"),
        # The user simulator's: played again.
        (LOOKS_UP, ["Hello.", 401], EpisodeEnd.SERVER_ERROR, "played again: the user simulator: HTTPError"),
        (LOOKS_UP, ["Hello.", ""], EpisodeEnd.SERVER_ERROR, "the user simulator: ValueError: UserMessage must"),
        # Before the policy was asked for anything.
        (LOOKS_UP, [500], EpisodeEnd.SERVER_ERROR, "never called the endpoint.*the user simulator"),
    ],
)
async def test_only_the_policys_own_failures_are_counted_against_it(
    machine: Path, lines: list[str], said: list[str | int], ended: EpisodeEnd, error: str
) -> None:
    played = await play(machine, lines, said, "agent.max_prompt_length=500", "agent.max_response_length=600")
    assert played.trajectory.ended is ended, played.trajectory.error
    assert played.trajectory.error is not None
    assert re.search(error, played.trajectory.error), played.trajectory.error
    assert simulation(played)["termination_reason"] == "infrastructure_error"


async def test_a_rollout_worker_keeps_files_below_the_group_and_of_the_last_time(machine: Path) -> None:
    with ScriptedCustomer(ASKS) as customer:
        config = tau_config(customer.base)

        def policies(agent: AgentConfig) -> list[Policy]:
            lines = lambda prompt: LOOKS_UP["yusuf_rossi" in prompt]  # noqa: E731
            return [TokenPolicy(ScriptedSampler(lines), CHAT, agent)]

        parts: dict[str, Any] = {"agent": config.agent, "environment": config.environment, "data": config.data}
        worker: Any = RolloutWorkerActor("w", policies, ground_truth=False, slots=1, kept=machine / "episodes", **parts)
        folder = machine / "episodes" / "step1" / "0" / "3.1"
        folder.mkdir(parents=True)
        (folder / "old").touch()
        request = RolloutRequest(task_id="0", group="step1/0", rollout=3, attempt=1, seed=1)
        trajectory, summary, evaluated = await worker.rollout(request, 0)
        outside = replace(request, group="../step1/..")
        assert (await worker.rollout(outside, 0))[1].ended is EpisodeEnd.FINISHED
    assert trajectory is not None
    assert (summary.ended, summary.termination, evaluated) == (EpisodeEnd.FINISHED, Termination.FINISHED, None)
    assert {path.name for path in folder.iterdir()} == {"results.json", "tau2.log"}
    assert [path.name for path in (machine / "episodes").iterdir()] == ["step1"]


async def test_a_chat_that_tau2_cuts_has_failed(machine: Path) -> None:
    lines = [f"What?{END}"] * 3
    played = await play(machine, lines, ["Hm."], "environment.options.max_steps=3", ground_truth=True)
    assert played.trajectory.ended is EpisodeEnd.FINISHED
    assert played.evaluated is not None
    evaluation = played.evaluated.evaluation
    assert (evaluation.success, evaluation.reward, evaluation.failures) == (False, 0.0, ("max_steps",))


async def test_assertions_need_a_judges_key(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = {"instructions": "Call."}
    row = {"id": "0", "user_scenario": scenario, "evaluation_criteria": {"nl_assertions": ["It is kind."]}}
    home = write_retail(machine / "other", **{"tasks.json": [row], "split_tasks.json": {"train": ["0"]}})
    monkeypatch.setenv("TAU2_HOME", str(home))
    with pytest.raises(
        EnvironmentCrashed, match="could not evaluate the episode: .*set environment variable NO_SUCH_KEY"
    ):
        await play(machine, LOOKS_UP, [*ASKS], "environment.options.judge.api_key_env=NO_SUCH_KEY", ground_truth=True)


def test_facts_for_the_judge(machine: Path) -> None:
    environment = tau_environment(tau_config("http://user/v1"))
    assert environment.tasks("train") == ["0", "2"]
    assert "Reason for the call: You want a refund." in environment.task("0").instruction
    assert "\n  Look customers up first." in environment.facts
    assert "- Tool `find_user_id_by_name_zip(zip?: string)`: Finds a customer." in environment.facts
    assert "domain retail" in environment.facts


def test_another_package_named_tau2_is_reported_before_anything_starts(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = machine / "physics"
    (package / "tau2").mkdir(parents=True)
    (package / "tau2" / "__init__.py").write_text("")
    python = write_python(machine / "wrong", version="0.3", package=package)
    environment = tau_environment(tau_config("http://user/v1", f"environment.options.tau2_python={python}"))
    with pytest.raises(ConfigError, match="the package index's 'tau2' is a physics program"):
        environment.tasks("train")
