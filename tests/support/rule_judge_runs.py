"""Scripted sandbox rollouts as a judge sees them, with outputs like the engine's."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from draco_ray.judging.judge import CallContext, Judge
from draco_ray.judging.phases import Credit, Score, Stage1, Stage2, Union
from draco_ray.records import GAP, Attribution, Criterion, EpisodeEnd, Message, ScoredCriterion, Trajectory, Turn
from draco_ray.sandbox.rule_judge.reading import Run, Step
from draco_ray.sandbox.world.scripts import Fault, families

WHERE = CallContext(group="step1/task_1", task_id="task_1")
PARAMETERS = {
    "title": "Gym Boost",
    "date": "2022-11-03",
    "limit": "250",
    "relation": "coworker",
    "message": "Dinner is at eight tonight.",
    "time": "14:30",
    "tag": "home",
    "project": "Book Club",
    "extension": "txt",
    "stem": "songs_3",
}
"""What fills the instruction templates of the sandbox's families."""
REFUSED = """\
Execution failed. Traceback:
  File "<python-input>", line 2, in <module>
    rows = apis.app.api()
           ^^^^^^^^^^^^^^
Exception: Response status code is 401:
{"message":"You are either not authorized to access this endpoint or your access token is missing."}"""


def instruction(family: str, wording: int = 0) -> str:
    """A task of a sandbox family."""
    return families()[family].wordings[wording].format(**PARAMETERS)


def scripted_run(family: str, *faults: Fault) -> Run:
    """A scripted rollout with these faults."""
    cells = families()[family].script(frozenset(faults))
    return run_of(*((code, output_of(code)) for code in cells))


def run_of(*steps: tuple[str, str | None]) -> Run:
    """A rollout of the given codes and outputs."""
    return Run(
        steps=tuple(Step(number=number, code=code, output=output) for number, (code, output) in enumerate(steps, 1))
    )


def trajectory_of(run: Run, task: str, rollout: int = 0) -> Trajectory:
    """The record that renders to ``run``."""
    turns = [
        Turn(
            text=f"<code>\n{step.code}\n</code>",
            action=step.code,
            observation=step.output,
            first_token=n,
            last_token=n + 1,
        )
        for n, step in enumerate(run.steps)
    ]
    turns.append(Turn(text="Done.", action=None, observation=None, first_token=len(turns), last_token=len(turns) + 1))
    count = len(turns)
    return Trajectory(
        task_id="task_1",
        group="step1/task_1",
        rollout=rollout,
        attempt=0,
        policy_version=0,
        prompt=(Message(role="user", content=f"My name is Ada Example. Your task is: {task}"),),
        turns=tuple(turns),
        token_ids_T=np.arange(count),
        sampled_T=np.ones(count, dtype=bool),
        logprob_T=np.zeros(count, dtype=np.float32),
        step_T=np.array([*range(count - 1), GAP]),
        prompt_length=0,
        ended=EpisodeEnd.FINISHED,
        started_at=0.0,
        ended_at=1.0,
    )


def output_of(code: str) -> str:
    """Approximately what the engine prints for a cell of the scripts."""
    printed = re.findall(r"^print\((.*)\)$", code, re.MULTILINE)
    calls = re.findall(r"apis\.(?!supervisor)\w+\.(?!login)\w+\((.*)\)", code)
    if any("token" not in arguments for arguments in calls):
        return REFUSED
    if not printed:
        return "Execution successful."
    texts = []
    for expression in printed:
        if "passwords" in expression:
            texts.append("S6muesXX")
        elif expression == "len(rows)":
            texts.append("17" if "while True" in code else "5")
        elif expression.startswith("len(") or expression == "answer":
            texts.append("4")
        else:
            texts.append(" ".join(PARAMETERS.get(name.strip(), "") for name in expression.split(",")).strip())
    return "\n".join(texts) + "\n"


async def judge_in_phases(
    trajectories: Sequence[Trajectory], judge: Judge
) -> tuple[list[Criterion], list[tuple[ScoredCriterion, ...]], list[tuple[Attribution, ...]]]:
    """A group's rubric, verdicts and citations, by all five phases."""
    stage1 = await judge.ask(Stage1(trajectories[0].prompt), WHERE)
    assert stage1.value is not None, stage1.error
    candidates = list(stage1.value)
    for trajectory in trajectories:
        stage2 = await judge.ask(Stage2(trajectory, stage1.value), WHERE)
        assert stage2.value is not None, stage2.error
        candidates += stage2.value
    union = await judge.ask(Union(trajectories[0].prompt, candidates, trajectories), WHERE)
    assert union.value is not None, union.error
    scores, credits = [], []
    for trajectory in trajectories:
        score = await judge.ask(Score(trajectory, union.value), WHERE)
        assert score.value is not None, score.error
        credit = await judge.ask(Credit(trajectory, union.value, score.value), WHERE)
        assert credit.value is not None, credit.error
        scores.append(score.value)
        credits.append(credit.value)
    return list(union.value), scores, credits
