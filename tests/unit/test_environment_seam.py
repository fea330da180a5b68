"""An environment of one's own: found by name, and whatever it does loses a rollout and never a run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from draco_ray.config.load import load_config
from draco_ray.config.schema import DataConfig, EnvironmentConfig
from draco_ray.environments.base import (
    Environment,
    GuardedWorld,
    World,
    WorldVerdict,
    find_environment,
    make_environment,
)
from draco_ray.errors import ConfigError, EnvironmentCrashed, WorldBroken, WorldError
from draco_ray.judging.example import EXAMPLES
from draco_ray.judging.phases import PHASES
from draco_ray.judging.prompts import load_prompts
from draco_ray.records import EpisodeEnd, Task, Termination, Trajectory, Turn
from draco_ray.rollout.worker import evaluate
from draco_ray.training import session
from draco_ray.training.session import resolve_config
from tests.conftest import REPOSITORY
from tests.unit.test_runs import a_trajectory

DESK = REPOSITORY / "examples" / "order_desk"
TASK = Task(task_id="t_1", group="t", instruction="Do it.")


class Plain(Environment):
    """The least that an environment needs."""

    def tasks(self, split: str) -> list[str]:
        return ["t_1"]

    def task(self, task_id: str) -> Task:
        return TASK

    async def open(self, task_id: str) -> World:
        raise NotImplementedError


class Ill:
    """A world that does whatever it is told to."""

    task: ClassVar[Task] = TASK

    def __init__(self, does: object) -> None:
        self.does = does

    async def act(self, action: str) -> str:
        if isinstance(self.does, Exception):
            raise self.does
        if self.does == "hang":
            await asyncio.Event().wait()
        return self.does  # type: ignore[return-value]

    async def evaluate(self) -> WorldVerdict:
        if isinstance(self.does, Exception):
            raise self.does
        return WorldVerdict(success=True, passed_tests=2, total_tests=2)

    async def close(self) -> None:
        if isinstance(self.does, Exception):
            raise self.does


def guarded(does: object, seconds: float = 60.0) -> GuardedWorld:
    return GuardedWorld(Ill(does), "worker.0", seconds)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("appwrld", "did you mean 'appworld'"),
        ("nowhere.py:Shop", "cannot be imported"),
        ("json:dumps", "not a subclass of draco_ray.environments.base.Environment"),
        ("json:Shop", "has no 'Shop'"),
    ],
)
def test_what_is_no_environment_is_refused_in_one_line(use: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        find_environment(use)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("error", [ValueError("no such order"), RecursionError(), KeyError("x"), OSError(28, "full")])
async def test_what_an_environment_raises_is_a_crash_of_the_environment(error: Exception) -> None:
    world = guarded(error)
    for doing in (world.act("x"), world.evaluate(), world.close()):
        with pytest.raises(EnvironmentCrashed, match=rf"worker\.0: task t_1: {type(error).__name__}") as crash:
            await doing
        assert not isinstance(crash.value, WorldBroken)


async def test_whose_doing_it_was_is_kept() -> None:
    with pytest.raises(WorldBroken, match="it was you"):
        await guarded(WorldBroken("it was you")).act("x")


@pytest.mark.parametrize("answer", [None, 5, b"bytes"])
async def test_an_answer_that_is_no_text_is_a_crash(answer: object) -> None:
    with pytest.raises(EnvironmentCrashed, match=f"act returned {type(answer).__name__}, expected text"):
        await guarded(answer).act("x")


async def test_a_hanging_action_is_given_up_on() -> None:
    with pytest.raises(EnvironmentCrashed, match="TimeoutError"):
        await guarded("hang", seconds=0.01).act("x")


def plain() -> Plain:
    return Plain(EnvironmentConfig(), DataConfig(), ground_truth=False, name="plain")


def ended(how: EpisodeEnd, *, steps: bool = True) -> Trajectory:
    turns = (Turn(text="a", action="a" if steps else None, observation="b", first_token=2, last_token=5),)
    return Trajectory(
        task_id="t_1",
        group="g",
        rollout=3,
        attempt=0,
        policy_version=0,
        prompt=(),
        turns=turns,
        token_ids_T=np.arange(5),
        sampled_T=np.array([0, 0, 1, 1, 1], dtype=bool),
        logprob_T=np.zeros(5),
        step_T=np.array([-1, -1, 0, 0, 0] if steps else [-1] * 5),
        prompt_length=2,
        ended=how,
        started_at=0.0,
        ended_at=1.0,
        error="why" if how is EpisodeEnd.CRASHED else None,
    )


@pytest.mark.parametrize(
    ("trajectory", "expected"),
    [
        (ended(EpisodeEnd.FINISHED), Termination.FINISHED),
        (ended(EpisodeEnd.FINISHED, steps=False), Termination.NO_ACTION),
        (ended(EpisodeEnd.TURN_LIMIT), Termination.TURN_LIMIT),
        (ended(EpisodeEnd.RESPONSE_LIMIT), Termination.RESPONSE_LIMIT),
        (ended(EpisodeEnd.CRASHED), Termination.CRASHED),
        (ended(EpisodeEnd.SERVER_ERROR), Termination.SERVER_ERROR),
    ],
)
def test_an_agent_that_stops_acting_has_finished_unless_the_environment_says_otherwise(
    trajectory: Trajectory, expected: Termination
) -> None:
    assert plain().termination(trajectory) is expected


def test_without_an_evaluator_nothing_can_be_evaluated() -> None:
    assert not Plain.evaluates
    with pytest.raises(WorldError, match="has no evaluator"):
        plain().difficulty("t_1")


async def test_a_verdict_is_kept_with_the_rollout_and_its_scenario() -> None:
    evaluation = (await evaluate(Ill("ok"), ended(EpisodeEnd.FINISHED))).evaluation
    assert (evaluation.success, evaluation.run, evaluation.scenario, evaluation.turns) == (True, 3, "t", 1)
    crashed = (await evaluate(Ill("ok"), ended(EpisodeEnd.CRASHED))).evaluation
    assert (crashed.success, crashed.failures) == (False, ("the world crashed: why",))
    spoilt = (await evaluate(Ill(WorldBroken("spoilt")), ended(EpisodeEnd.FINISHED))).evaluation
    assert (spoilt.success, spoilt.failures) == (False, ("the world crashed: spoilt",))


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
async def test_a_reward_that_is_no_number_is_no_verdict(reward: float, monkeypatch: pytest.MonkeyPatch) -> None:
    async def rewarded(self: Ill) -> WorldVerdict:
        return WorldVerdict(success=reward > 0, reward=reward)

    monkeypatch.setattr(Ill, "evaluate", rewarded)
    with pytest.raises(EnvironmentCrashed, match=f"^task t_1: the evaluator's reward is {reward}, expected a number$"):
        await evaluate(Ill("ok"), ended(EpisodeEnd.FINISHED))


def desk(*, ground_truth: bool) -> Environment:
    config = load_config(str(DESK / "order_desk.yaml"))
    use = config.environment.model_copy(update={"use": f"{DESK / 'environment.py'}:OrderDesk"})
    return make_environment(use, DataConfig(root=DESK / "tasks"), ground_truth=ground_truth)


async def test_the_example_is_played_and_evaluated() -> None:
    seeing = desk(ground_truth=True)
    assert len(seeing.tasks("train")) == 12
    world = await seeing.open("refund_0")
    assert (await world.act("show A01\nrefund A02\nrefund A01")).splitlines() == [
        "A01: delivered",
        "error: A02 is shipped, refund needs delivered",
        "A01: refunded",
    ]
    assert await world.act("dance") == "error: unknown command 'dance'"
    assert (await world.evaluate()).failures == ("no reply",)
    await world.act("reply It is on its way.")
    assert (await world.evaluate()).success
    # Another time it begins anew.
    assert "delivered" in await (await seeing.open("refund_0")).act("show A01")


async def test_the_example_sees_no_ground_truth_in_training() -> None:
    blind = desk(ground_truth=False)
    for task_id in blind.tasks("train"):
        world = await blind.open(task_id)
        assert "expected" not in json.dumps(blind.task(task_id).fields)
        with pytest.raises(WorldError, match="without ground truth"):
            await world.evaluate()


@pytest.mark.parametrize("folder", [Path("prompts/judge"), Path("prompts/judge-cache-friendly")])
@pytest.mark.parametrize("phase", list(PHASES))
def test_a_judge_is_told_the_facts_of_the_environment_and_of_no_other(phase: str, folder: Path) -> None:
    facts = desk(ground_truth=False).facts
    question = EXAMPLES[phase]
    own, bare = (
        # Without the tag, which differs.
        question.prompt(load_prompts(folder, facts=each)).rpartition("\n\n")[0]
        for each in (facts, None)
    )
    assert facts in own
    assert own.replace(facts, "- Nothing beyond what the agent was told.") == bare
    template = load_prompts(folder).templates[phase]
    assert not [word for word in ("complete_task", "<code>", "AppWorld", "API") if word in template]


def test_a_trajectory_without_a_mode_is_read_as_before() -> None:
    assert a_trajectory().termination is None


def test_a_static_rubric_is_the_environments_own_or_has_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "checked_model", lambda config: config)
    (tmp_path / "tasks.jsonl").write_text('{"id": "1", "instruction": "Refund A1."}\n', encoding="utf-8")
    own = [f"data.root={tmp_path}", "environment.use=tasks"]
    with pytest.raises(ConfigError, match=r"environment\.use=tasks has no static rubric; write one with `draco rubric"):
        resolve_config(load_config("sandbox", own, "static"))[0]
    # Without a static rubric nothing is missing.
    assert resolve_config(load_config("sandbox", own, "draco"))[0].algorithm.static_rubric is None
    rubric = tmp_path / "rubric.yaml"
    rubric.write_text("[{title: Polite, description: Kind words., evaluator_instruction: Look.}]", encoding="utf-8")
    named = resolve_config(load_config("sandbox", [*own, f"algorithm.static_rubric={rubric}"], "static"))[0]
    assert named.algorithm.static_rubric == rubric
    appworld = resolve_config(load_config("sandbox", [], "static"))[0]
    assert appworld.algorithm.static_rubric == Path("prompts/static_rubric.yaml")
    with pytest.raises(ConfigError, match="none.yaml"):
        resolve_config(load_config("sandbox", [*own, f"algorithm.static_rubric={tmp_path}/none.yaml"], "static"))[0]
