"""A small run directory with known numbers: two steps, two tasks, two rollouts each, hostile text everywhere.

After the last step both tasks are evaluated, a rollout each; the first is solved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from draco_ray.records import (
    Attribution,
    CreditFallback,
    Criterion,
    EpisodeEnd,
    Evaluation,
    GroupAdvantages,
    JudgeCall,
    Message,
    RolloutAdvantage,
    ScoredCriterion,
    Termination,
    Trajectory,
    Turn,
    Verdict,
)
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>{{ 7 * 7 }}"
TASKS = ("aaa1111_1", "bbb2222_1")
CODE = "print(apis.venmo.show_transactions())\nprint('second line')"
PROMPT = f"Grade this run.\n### Step 1\n{CODE}\n{HOSTILE}"

CONFIG = f"""\
setting: draco
seed: 3
model: {{path: "{HOSTILE}"}}
algorithm: {{rubric: dynamic}}
"""


def a_trajectory(step: int, task: str, rollout: int) -> Trajectory:
    """Two steps (2 and 4 sampled tokens) and a closing turn; the prompt has one token."""
    return Trajectory(
        task_id=task,
        group=f"step{step}/{task}",
        rollout=rollout,
        attempt=0,
        policy_version=step - 1,
        prompt=(Message(role="system", content="Act."), Message(role="user", content=f"Do {task}. {HOSTILE}")),
        turns=(
            Turn(
                text=f"I look. {HOSTILE}\n<code>\n{CODE}\n</code>",
                action=CODE,
                observation=HOSTILE,
                first_token=1,
                last_token=3,
            ),
            Turn(text="<code>\nfinish()\n</code>", action="finish()", observation="ok", first_token=4, last_token=8),
            Turn(text="Done.", action=None, observation=None, first_token=9, last_token=10),
        ),
        token_ids_T=np.arange(10),
        sampled_T=np.array([0, 1, 1, 0, 1, 1, 1, 1, 0, 1], dtype=bool),
        logprob_T=np.zeros(10),
        step_T=np.array([-1, 0, 0, -1, 1, 1, 1, 1, -1, -1]),
        prompt_length=1,
        ended=EpisodeEnd.FINISHED if rollout == 0 else EpisodeEnd.TURN_LIMIT,
        termination=Termination.GAVE_UP if rollout == 0 else Termination.TURN_LIMIT,
        started_at=100.0 * step,
        ended_at=100.0 * step + 10,
    )


def a_call(phase: str, step: int, task: str, rollout: int | None) -> JudgeCall:
    """A call with 100 input tokens, 10 output tokens and a cost of two cents."""
    return JudgeCall(
        call_id=f"{phase}-{step}-{task}-{rollout}",
        phase=phase,
        group=f"step{step}/{task}",
        task_id=task,
        rollout=rollout,
        model="judge/<b>model</b>",
        prompt=PROMPT,
        reply=f"[] {HOSTILE}",
        finish_reason="stop",
        input_tokens=100,
        cached_tokens=40,
        output_tokens=10,
        dollars=0.02,
        started_at=100.0 * step + 8,
        seconds=0.5,
        requests=1,
    )


def rubric(task: str) -> list[Criterion]:
    """Three criteria: one for this task only, one for every task, and one that no member fails."""

    def criterion(title: str) -> Criterion:
        return Criterion(title=title, description=HOSTILE, evaluator_instruction="Look closely.", source="union")

    return [criterion(f"Only {task}"), criterion("Closes the task"), criterion("Never <i>fails</i>")]


def advantages(step: int, task: str, size: int = 2) -> GroupAdvantages:
    """Rollout 0 wins, with all credit on step 2 (cited by passes); the others lose, with inert credit."""
    return GroupAdvantages(
        group=f"step{step}/{task}",
        surviving_K=np.array([True, True, False]),
        rollouts=(
            RolloutAdvantage(
                rollout=0,
                reward=1.0,
                advantage=0.7,
                quality_M=np.array([0.0, 1.0]),
                step_advantage_M=np.array([0.0, 1.05]),
                cited_M=np.array([True, True]),
                fallback=CreditFallback.NONE,
                inert=False,
            ),
            *(
                RolloutAdvantage(
                    rollout=rollout,
                    reward=-1.0,
                    advantage=-0.7,
                    quality_M=np.array([0.0, 0.0]),
                    step_advantage_M=np.array([-1.05, -0.525]),
                    cited_M=np.array([False, True]),
                    fallback=CreditFallback.NONE,
                    inert=True,
                )
                for rollout in range(1, size)
            ),
        ),
    )


def write_group(store: RunStore, step: int, task: str, size: int = 2) -> None:
    """All rows of a group whose step credit was computed."""
    share = advantages(step, task, size)
    store.write("criteria", step, task, rows.criterion_rows(step, task, rubric(task), share))
    store.write("proposals", step, task, rows.proposal_rows(step, task, rubric(task)))
    tokens: dict[int, Sequence[int]] = {rollout: [2, 4] for rollout in range(size)}
    store.write("advantages", step, task, rows.advantage_rows(step, task, share, tokens))
    group = {"state": "credited", "rollouts": size, "lost": 0, "unscored": 0, "credit_failures": 0, "reason": None}
    store.write("groups", step, task, [{"training_step": step, "task_id": task, **group}])
    calls = [a_call("stage1", step, task, None), a_call("union", step, task, None)]
    spans = []
    for rollout in range(size):
        trajectory = a_trajectory(step, task, rollout)
        key = f"{task}-{rollout}"
        verdicts = [
            ScoredCriterion(
                verdict=Verdict.PASS if rollout == 0 else Verdict.FAIL,
                evidence=HOSTILE,
                justification=f"Because {task}.",
            ),
            ScoredCriterion(verdict=Verdict.PASS if rollout == 0 else Verdict.FAIL),
            ScoredCriterion(verdict=Verdict.PASS if rollout == 0 else Verdict.NOT_APPLICABLE),
        ]
        cited = [
            Attribution(criterion=0, verdict=verdicts[0].verdict, steps=(2,), explanation="The second step did it."),
            Attribution(criterion=1, verdict=Verdict.FAIL, steps=(1, 2) if rollout == 0 else (2,)),
        ]
        store.write("trajectories", step, key, rows.trajectory_rows(step, trajectory))
        store.write("steps", step, key, rows.step_rows(step, trajectory))
        store.write("verdicts", step, key, rows.verdict_rows(step, task, rollout, verdicts))
        store.write("citations", step, key, rows.citation_rows(step, task, rollout, cited))
        calls += [a_call(phase, step, task, rollout) for phase in ("score", "credit")]
        begin = 100.0 * step
        spans += [(rollout, "rollout", begin, begin + 10), (rollout, "score", begin + 8, begin + 12)]
    store.write("judge_calls", step, task, rows.call_rows(step, calls))
    named = ("rollout", "stage", "started_at", "ended_at")
    store.write(
        "spans",
        step,
        task,
        [{"training_step": step, "task_id": task, **dict(zip(named, span, strict=True))} for span in spans],
    )


def small_run(path: Path, steps: int = 2, size: int = 2, *, evaluated: bool = True) -> RunDirectory:
    """Write the run; every step has the same numbers, so that tests can state them."""
    store = RunStore(RunDirectory.create(path, CONFIG))
    for step in range(1, steps + 1):
        for task in TASKS:
            write_group(store, step, task, size)
        begin = 100.0 * step
        learning = {"training_step": step, "stage": "learning", "started_at": begin + 12, "ended_at": begin + 17}
        sync = {"training_step": step, "stage": "sync", "started_at": begin + 17, "ended_at": begin + 18}
        store.write("spans", step, "policy", [learning, sync])
        if step == steps and evaluated:
            evaluations = [
                Evaluation(
                    task_id=task,
                    run=0,
                    success=task == TASKS[0],
                    passed_tests=1,
                    total_tests=2,
                    turns=3,
                    ended=EpisodeEnd.FINISHED,
                )
                for task in TASKS
            ]
            store.write("evaluations", step, "test", rows.evaluation_rows(step, "test", evaluations))
            for task in TASKS:
                played = replace(a_trajectory(step, task, 0), policy_version=step)
                store.write("evaluation_trajectories", step, task, rows.trajectory_rows(step, played))
                store.write("evaluation_steps", step, task, rows.step_rows(step, played))
        line = {"step": step, "reward": 0.0, "kl": 0.001 * step, "rollouts": 4, "judge_dollars": 0.24, "seconds": 20.0}
        store.finish_step(step, {**line, "seconds_learning": 5.0, "seconds_sync": 1.0})
    return store.directory
