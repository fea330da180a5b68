"""What the judge was not asked: the calls and tokens that savings kept out of a run's bill, and what each may change.

Savings by ``algorithm.skip_useless_credit_calls`` leave every update as it is. The others change what the judge reads
or when it is asked, so a verdict or a citation could be another than in a run without them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from draco_ray.algorithm.rules import RULES, find_rule
from draco_ray.judging.phases import PHASES, Credit, Stage1
from draco_ray.records import JudgeCall
from draco_ray.runs.directory import RunDirectory

_Group = tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """One switch, and what it kept from being asked."""

    switch: str
    """The configuration key that turns it off; empty for the rest of the durable reply cache, which is always on."""
    what: str
    changes: str
    """What could be otherwise without it."""
    calls: int
    """Calls that were not made. For criteria left out of a call: 0, the call was made without them."""
    tokens: int
    """Input and output. Of a replayed answer what it once cost; else as many as such a call of this run took on
    average."""
    dollars: float


def savings(run: RunDirectory, calls: Sequence[tuple[int, JudgeCall]]) -> list[Saving]:
    """Every saving of a run that uses a rubric, in the order of the pipeline; those without effect too.

    Args:
        run: a run directory.
        calls: (training step, archived judge call) of the whole run.
    """
    if run.setting("algorithm.reward") != "rubric":
        return []
    kept = run.setting("judge.stage1_across_epochs")
    replayed = [call for _, call in calls if call.requests == 0]
    stage1 = [call for call in replayed if kept and call.phase == Stage1.name]
    others = [call for call in replayed if not (kept and call.phase == Stage1.name)]
    phases = [phase for phase in PHASES if any(call.phase == phase for call in others)]
    found = [
        _replayed(
            "judge.stage1_across_epochs",
            "stage1 kept",
            "later epochs are judged from the criteria of a task's first",
            stage1,
        ),
        _replayed(
            "",
            "answers kept: equal requests" + (f" ({', '.join(phases)})" if phases else ""),
            "an equal request is not sampled again",
            others,
        ),
    ]
    if _cites(run, calls):
        found += _credit(run, [(step, call) for step, call in calls if call.phase == Credit.name])
    return found


def _cites(run: RunDirectory, calls: Sequence[tuple[int, JudgeCall]]) -> bool:
    """Whether credit calls are made under a run's rule; a rule of one's own is not imported to look at a run."""
    rule = run.setting("algorithm.rule")
    if rule in RULES:
        return find_rule(rule, run.setting("algorithm.reliability")).cites
    return any(call.phase == Credit.name for _, call in calls)


def _replayed(switch: str, what: str, changes: str, replayed: Sequence[JudgeCall]) -> Saving:
    return Saving(
        switch=switch,
        what=what,
        changes=changes,
        calls=len(replayed),
        tokens=sum(call.input_tokens + call.output_tokens for call in replayed),
        dollars=sum(call.dollars for call in replayed),
    )


def _credit(run: RunDirectory, calls: Sequence[tuple[int, JudgeCall]]) -> Iterator[Saving]:
    asked = {(step, call.task_id, call.rollout) for step, call in calls}
    paid = [call for _, call in calls if call.requests]
    tokens = sum(call.input_tokens + call.output_tokens for call in paid) / max(len(asked), 1)
    dollars = sum(call.dollars for call in paid) / max(len(asked), 1)
    rewards: dict[_Group, dict[int, float]] = defaultdict(dict)
    for row in run.table("advantages", columns=["training_step", "task_id", "rollout", "reward"]).to_pylist():
        rewards[row["training_step"], row["task_id"]][row["rollout"]] = row["reward"]
    skips_useless, skips_inert = (
        run.setting("algorithm.skip_useless_credit_calls"),
        run.setting("algorithm.skip_inert_credit_calls"),
    )
    useless = inert = 0
    for (step, task), reward in rewards.items():
        missing = sum((step, task, rollout) not in asked for rollout in reward)
        # Without a surviving criterion every reward is 0. Without the switch, what is missing in a group with spread
        # are rollouts without a step.
        if len(set(reward.values())) < 2:
            useless += missing * skips_useless
        else:
            inert += missing * skips_inert
    yield Saving(
        switch="algorithm.skip_useless_credit_calls",
        what="no credit call in a group without spread or surviving criterion",
        changes="no update; citations are missing from the record",
        calls=useless,
        tokens=round(useless * tokens),
        dollars=useless * dollars,
    )
    yield Saving(
        switch="algorithm.skip_inert_credit_calls",
        what="no credit call for a rollout with unanimous verdicts",
        changes="the call could have overridden a verdict",
        calls=inert,
        tokens=round(inert * tokens),
        dollars=inert * dollars,
    )
    yield _criteria_left_out(run, calls)


def _criteria_left_out(run: RunDirectory, calls: Sequence[tuple[int, JudgeCall]]) -> Saving:
    """Priced by the output alone, which is one entry a criterion; the shorter input comes on top."""
    sizes: dict[_Group, tuple[int, int]] = {}
    for row in run.table("criteria", columns=["training_step", "task_id", "survived"]).to_pylist():
        of, surviving = sizes.get((row["training_step"], row["task_id"]), (0, 0))
        sizes[row["training_step"], row["task_id"]] = of + 1, surviving + bool(row["survived"])
    left_out, in_all, tokens, dollars = 0, 0, 0.0, 0.0
    on = run.setting("algorithm.credit_surviving_only")
    for step, call in calls:
        of, surviving = sizes.get((step, call.task_id), (0, 0))
        if not (on and call.requests and surviving):
            continue
        left_out, in_all = left_out + of - surviving, in_all + of
        tokens += call.output_tokens / surviving * (of - surviving)
        output_share = call.output_tokens / max(call.input_tokens + call.output_tokens, 1)
        dollars += call.dollars * output_share / surviving * (of - surviving)
    return Saving(
        switch="algorithm.credit_surviving_only",
        what=f"{left_out:,} of {in_all:,} criteria not sent to the credit call (output tokens alone)",
        changes="the judge reads another prompt than one that asks about all",
        calls=0,
        tokens=round(tokens),
        dollars=dollars,
    )
