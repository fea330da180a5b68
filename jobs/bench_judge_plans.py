"""What do the judge's plans cost, and how much is learned with them? Train on the sandbox under each and print both.

python jobs/bench_judge_plans.py [--plans "paper lean"] [--seeds 3] [--first-seed 0] [--steps 10] [--root DIR]
                                 [--measured DIR] [--print-only]
python jobs/bench_judge_plans.py --rejudge RUN [--visits 4] [--groups 8] [--judge files:DIR] [--out FILE.json]

Below the table: a step's duration as a multiple of its critical path, since merged questions wait for the whole group.

The job continues where it was stopped; the measurements of a run are a small file in --measured. The rule judge answers
merged questions as well as single ones, so the tables show cost, and that the plans work, but no LLM's quality.

``--rejudge`` trains nothing: groups that a run recorded are judged under each plan, as if their tasks came ``--visits``
times with the same rollouts. With ``--judge files:DIR`` the prompts of each plan are files in DIR/<plan>, for a real
judge to answer, and the command continues as replies appear. Rewards and step advantages are written to ``--out``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import options
import typer
from ablation import percent
from bench_noise import after_training, before_training, difference
from critical_path import LearnerTask, critical_path
from measured import REFERENCE_JUDGE, SANDBOX, Measured, Spend, Wanted, default_steps, run_all

from draco_ray.algorithm.computer import local_advantages
from draco_ray.config.load import load_config
from draco_ray.config.plans import PLANS
from draco_ray.config.schema import FILES_PREFIX, AlgorithmConfig, DracoConfig, JudgeConfig
from draco_ray.errors import DracoError
from draco_ray.judging.build import prompts_of
from draco_ray.judging.completion import Completer, Completion, Request
from draco_ray.judging.file_judge import FileJudge
from draco_ray.judging.judge import CallContext, Judge, Judgement, ask_phase
from draco_ray.judging.phases import Phase
from draco_ray.judging.pricing import reply_cost
from draco_ray.lab.analysis.judges import configured_rules
from draco_ray.lab.simulation.recorded import read_run
from draco_ray.pipeline import Group, Pipeline
from draco_ray.records import Judged, Trajectory
from draco_ray.rollout.finished import PlayedRollouts
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import step_trajectories
from draco_ray.training.session import static_criteria

CHARACTERS_PER_TOKEN = 4
"""The same as in the rule judge's server."""
Cell = tuple[str, int]
"""(plan, seed)."""


def print_table(found: Mapping[Cell, Measured], plans: Sequence[str], runs: int) -> None:
    """Print a line per plan over their common seeds, with the difference to the first plan, as Markdown."""
    by_plan = {plan: {seed: each for (of, seed), each in found.items() if of == plan} for plan in plans}
    shared = sorted(set.intersection(*(set(each) for each in by_plan.values())))
    if not shared:
        print("\nNo seed has been run under every plan yet.")
        return
    print(
        "\n| Plan | Seeds | TGC | Gain | Judge tokens a run | $ a run | Tokens / first plan's | TGC less first plan's |"
    )
    print(f"|{'---|' * 8}")
    first = [by_plan[plans[0]][seed] for seed in shared]
    for plan in plans:
        runs_of = [by_plan[plan][seed] for seed in shared]
        spent, base = (sum((each.spent[each.last] for each in side), start=Spend()) for side in (runs_of, first))
        ended = after_training(runs_of, runs)
        against = "-" if plan == plans[0] else percent(difference(ended, after_training(first, runs)), "+")
        gain = percent(difference(ended, before_training(runs_of, runs)), "+")
        cost = (
            f"{spent.tokens / len(shared):,.0f} | {spent.dollars / len(shared):.2f} | {spent.tokens / base.tokens:.2f}"
        )
        print(f"| {plan} | {len(shared)} | {percent(ended.interval())} | {gain} | {cost} | {against} |")
    print(
        f"\nIn %, 95 % intervals over scenarios and, from two seeds on, training seeds; paired by task. Tokens of the "
        f"rule judge's server ({CHARACTERS_PER_TOKEN} characters each), dollars at {REFERENCE_JUDGE}'s prices."
    )
    sys.stdout.flush()


def step_over_bound(run: RunDirectory) -> float:
    """Ratio of the steps' durations to their critical paths (`critical_path.py`), without a run's first step.

    A run records when the learner was busy, but not with which group. So its time is divided among the groups in
    proportion to their tokens, with nothing for the updates; the path is then at most as long as the true one.

    Raises: ConfigError: see `read_run`.
    """
    recorded, seconds, bound = read_run(run), 0.0, 0.0
    for step in recorded.steps:
        groups, tokens = [], []
        for index, each in enumerate(each for each in step.groups if not each.failed):
            group = Group(step=step.number, index=index, task_id=str(index), prompt=())
            rollouts: list[Any] = [
                SimpleNamespace(rollout=rollout.number, started_at=rollout.began, ended_at=rollout.ended)
                for rollout in each.rollouts
            ]
            phases: list[Any] = [
                SimpleNamespace(phase=kind, rollout=rollout, started_at=0.0, ended_at=phase.seconds)
                for (kind, rollout), phase in each.phases.items()
            ]
            group.rollouts, group.phases = rollouts, phases
            groups.append(group)
            tokens.append(sum(rollout.tokens for rollout in each.rollouts))
        if not groups:
            continue
        size = recorded.setting.minibatch or len(groups)
        work = [("accumulate", group, float(count)) for group, count in zip(groups, tokens, strict=True)]
        work += [("remember", group, recorded.remember_share * count) for _, group, count in work[size:]]
        pace = sum(ended - began for began, ended in step.learning) / sum(part for *_, part in work)
        learned = [
            LearnerTask(kind=kind, group=group.name, started_at=0, ended_at=part * pace) for kind, group, part in work
        ]
        learned += [LearnerTask(kind="update", group="", started_at=0, ended_at=0) for _ in groups[::size]]
        seconds += step.seconds - step.tail
        bound += critical_path(groups, learned, slots=recorded.setting.slots, minibatch_prompts=size).seconds
    return seconds / bound


def print_bounds(runs: Mapping[str, Sequence[Path]]) -> None:
    """Print a line for each plan: `step_over_bound` of those of its runs that exist."""
    for plan, folders in runs.items():
        try:
            found = [step_over_bound(RunDirectory.open(each)) for each in folders if (each / "config.yaml").is_file()]
        except DracoError as error:
            print(f"{plan}: step / critical path unknown: {error}")
            continue
        if found:
            shown = ", ".join(f"{each:.2f}" for each in found)
            print(f"{plan}: step / critical path {shown} (the learner's time divided by tokens)")


def with_plan(config: DracoConfig, plan: str) -> DracoConfig:
    """A recorded configuration with another plan."""
    keys = {(section, key) for values in PLANS.values() for section, part in values.items() for key in part}
    standard: dict[str, Any] = {"judge": JudgeConfig(), "algorithm": AlgorithmConfig()}
    chosen: dict[str, dict[str, Any]] = {"judge": {"plan": plan}, "algorithm": {}}
    for section, key in keys:
        chosen[section][key] = PLANS[plan].get(section, {}).get(key, getattr(standard[section], key))
    return config.updated(**chosen)


class Counted:
    """A completer that counts tokens by characters, and repeats a task's stage1 reply if the plan keeps it."""

    def __init__(self, complete: Completer) -> None:
        self._complete = complete
        self._kept: dict[str, Completion] = {}

    async def __call__(self, request: Request) -> Completion:
        """The reply; a kept one counts no request."""
        asked = "".join(message.content for message in request.messages)
        if asked in self._kept:
            return replace(self._kept[asked], requests=0)
        found = await self._complete(request)
        tokens, written = (-(-len(text) // CHARACTERS_PER_TOKEN) for text in (asked, found.text))
        found = replace(found, requests=1, input_tokens=tokens, output_tokens=written)
        if request.phase == "stage1" and not request.scope:
            self._kept[asked] = found
        return found

    async def forget(self, request: Request) -> None:
        """See `FileJudge`."""
        await self._complete.forget(request)

    async def check(self) -> None:
        """Do nothing."""


class Rejudged:
    """The results of a plan on recorded groups; stands in for a pipeline's judge pool and run store."""

    def __init__(self, config: DracoConfig, complete: Completer) -> None:
        self._judge = Judge(Counted(complete), prompts_of(config.judge), config.judge)
        self.spent: dict[int, dict[str, Spend]] = defaultdict(lambda: defaultdict(Spend))
        """Visit -> phase -> spend."""
        self.calls = 0
        self.advantages: dict[tuple[int, str], Any] = {}
        self._price = config.judge.prices[REFERENCE_JUDGE]

    async def ask(self, phase: Phase, context: CallContext, **given: Any) -> Judgement:
        """See `draco_ray.judging.pool.JudgePool.ask`."""
        found = await ask_phase(self._judge, phase, context, **given)
        for call in found.archived.calls:
            if call.requests:
                dollars = reply_cost(self._price, call.input_tokens, 0, call.output_tokens)
                visit = int(context.group.partition("/")[0].removeprefix("step"))
                self.spent[visit][phase.name] += Spend(call.input_tokens + call.output_tokens, dollars)
                self.calls += 1
        return found

    @property
    def store(self) -> Any:
        """A run store that keeps only the groups' advantages."""
        nothing = SimpleNamespace(remote=lambda *given: asyncio.sleep(0))
        return SimpleNamespace(
            trajectory=nothing,
            judged=SimpleNamespace(remote=lambda *_: None),
            group=SimpleNamespace(remote=self._group),
        )

    def _group(self, step: int, task_id: str, rubric: Any, advantages: Any, *rest: Any) -> None:
        self.advantages[step, task_id] = advantages


async def rejudge(
    config: DracoConfig, groups: Mapping[str, Sequence[Trajectory]], complete: Completer, visits: int
) -> Rejudged:
    """Judge groups under a configuration, ``visits`` times one after another."""
    done = Rejudged(config, complete)
    played = {task: PlayedRollouts({each.rollout: each for each in rollouts}, {}) for task, rollouts in groups.items()}

    async def run(task_id: str, **given: Any) -> Any:
        return await played[task_id].run(task_id, **given)

    rollouts: Any = SimpleNamespace(
        run=lambda task_id, group, rollout, **given: run(task_id, group=group, rollout=rollout, **given)
    )
    pipeline = Pipeline(
        config.algorithm,
        rollouts,
        done,  # type: ignore[arg-type]
        local_advantages(config.algorithm),
        done.store,
        static_rubric=Judged(value=static_criteria(config)),
    )
    for visit in range(1, visits + 1):
        made = [
            Group(step=visit, index=index, task_id=task_id, prompt=each[0].prompt)
            for index, (task_id, each) in enumerate(groups.items())
        ]
        await asyncio.gather(*map(pipeline.run, made))
        for group in made:
            if group.reason:
                print(f"{group.name}: {group.reason}", file=sys.stderr)
    for key, advantages in done.advantages.items():
        done.advantages[key] = await advantages if asyncio.isfuture(advantages) else advantages
    return done


def recorded_groups(run: RunDirectory, most: int, size: int) -> dict[str, Sequence[Trajectory]]:
    """The first groups of a run without lost rollouts, one per task."""
    found: dict[str, Sequence[Trajectory]] = {}
    for step in run.steps():
        for task_id, rollouts in sorted(step_trajectories(run, step).items()):
            if len(rollouts) == size and len(found) < most:
                found.setdefault(task_id, rollouts)
    return found


def compare(run: Path, plans: Sequence[str], visits: int, most: int, judge: str, out: Path | None) -> None:
    """Judge a run's groups under each plan; print tokens by visit and the agreement of rewards and step advantages."""
    directory = RunDirectory.open(run.resolve())
    config = load_config(str(directory.path))
    groups = recorded_groups(directory, most, config.algorithm.group_size)

    async def under(plan: str) -> Rejudged:
        chosen = with_plan(config, plan)
        if not judge.startswith(FILES_PREFIX):
            return await rejudge(chosen, groups, configured_rules(chosen.judge, chosen.seed), visits)
        folder = Path(judge.removeprefix(FILES_PREFIX)).resolve() / plan
        chosen = chosen.updated(judge={"model": f"{FILES_PREFIX}{folder}"})
        return await rejudge(chosen, groups, FileJudge(folder, chosen.judge.model), visits)

    async def all_of_them() -> list[Rejudged]:
        return await asyncio.gather(*map(under, plans))

    found = dict(zip(plans, asyncio.run(all_of_them()), strict=True))
    print(f"\n{len(groups)} groups of {config.algorithm.group_size} rollouts of {run.name}, {visits} visits each\n")
    columns = ["Plan", "Calls", "Tokens", "$", f"/ {plans[0]}", *(f"visit {n}" for n in range(1, visits + 1))]
    columns += [f"Pairs ordered as under {plans[0]}", "Correlation of step advantages"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    total = {
        plan: [sum(each.spent[n].values(), start=Spend()) for n in range(1, visits + 1)] for plan, each in found.items()
    }
    base = sum(each.tokens for each in total[plans[0]])
    for plan, each in found.items():
        spent = sum(total[plan], start=Spend())
        alike = f"{agreement(found[plans[0]], each)} | {correlation(found[plans[0]], each):.2f}"
        shares = " | ".join(
            f"{of.tokens / max(1, first.tokens):.2f}" for of, first in zip(total[plan], total[plans[0]], strict=True)
        )
        cost = f"{each.calls} | {spent.tokens:,} | {spent.dollars:.2f} | {spent.tokens / base:.2f}"
        print(f"| {plan} | {cost} | {shares} | {alike} |")
    print(
        "\nVisits: tokens as a share of the first plan's at that visit. Pairs: of the pairs of rollouts that the "
        "first plan rewards differently, the share that this plan orders in the same way. Correlation: with the first "
        "plan's step advantages, over the same steps."
    )
    if out is not None:
        out.write_text(json.dumps({plan: shown(each) for plan, each in found.items()}, indent=1), encoding="utf-8")


def shown(done: Rejudged) -> list[dict[str, Any]]:
    """Rewards and step advantages of every group."""
    return [
        {
            "visit": visit,
            "task_id": task_id,
            "rollouts": [
                {"rollout": each.rollout, "reward": each.reward, "step_advantages": each.step_advantage_M.tolist()}
                for each in advantages.rollouts
            ],
        }
        for (visit, task_id), advantages in sorted(done.advantages.items())
        if advantages is not None
    ]


def agreement(first: Rejudged, other: Rejudged) -> str:
    """``17 of 20, 2 tied``: pairs of rollouts that are ordered alike, and those that the second rewards equally."""
    alike = tied = pairs = 0
    for key, advantages in first.advantages.items():
        theirs = other.advantages.get(key)
        if advantages is None or theirs is None:
            continue
        rewards = {each.rollout: each.reward for each in theirs.rollouts}
        known = [each for each in advantages.rollouts if each.rollout in rewards]
        for at, one in enumerate(known):
            for two in known[at + 1 :]:
                if one.reward != two.reward:
                    gap = rewards[one.rollout] - rewards[two.rollout]
                    pairs += 1
                    alike += gap * (one.reward - two.reward) > 0
                    tied += gap == 0
    return f"{alike} of {pairs}, {tied} tied"


def correlation(first: Rejudged, other: Rejudged) -> float:
    """Correlation of the step advantages of the rollouts that both plans judged."""
    ours: list[float] = []
    theirs: list[float] = []
    for key, advantages in first.advantages.items():
        judged = other.advantages.get(key)
        steps = {each.rollout: each.step_advantage_M.tolist() for each in judged.rollouts} if judged else {}
        for each in advantages.rollouts if advantages else ():
            if each.rollout in steps:
                ours += each.step_advantage_M.tolist()
                theirs += steps[each.rollout]
    return float(np.corrcoef(ours, theirs)[0, 1])


def main(
    plans: Annotated[str, typer.Option(help="Plans to compare, separated by spaces.")] = "paper lean",
    seeds: options.Seeds = 3,
    first_seed: options.FirstSeed = 0,
    steps: options.Steps = None,
    preset: Annotated[str, typer.Option(help="Sandbox to train in.")] = SANDBOX,
    root: options.Root = None,
    measured: options.Figures = None,
    print_only: options.PrintOnly = False,
    rejudge: Annotated[
        Path | None, typer.Option(help="Instead of training, judge groups of this run under each plan.")
    ] = None,
    visits: Annotated[int, typer.Option(min=1, help="With --rejudge: visits per task.")] = 4,
    groups: Annotated[int, typer.Option(min=1, help="With --rejudge: maximum number of groups.")] = 8,
    judge: Annotated[str, typer.Option(help="With --rejudge: the judge, rules or files:DIR.")] = "rules",
    out: Annotated[
        Path | None, typer.Option(help="With --rejudge: file to write rewards and step advantages to.")
    ] = None,
    overrides: options.Overrides = None,
) -> None:
    """Train a seed under every plan, then the next, and print the table after each run; or judge recorded groups."""
    chosen = plans.split()
    if unknown := [each for each in chosen if each not in PLANS]:
        sys.exit(f"bench-judge-plans: unknown plan {unknown[0]!r}; expected some of {', '.join(PLANS)}")
    if rejudge is not None:
        compare(rejudge, chosen, visits, groups, judge, out)
        return
    root, last = (root or Path("runs/plans")).resolve(), steps or default_steps(preset)
    cells = {
        (plan, seed): Wanted(
            preset=preset,
            setting="draco",
            seed=seed,
            steps=last,
            every=None,
            runs_per_task=1,
            overrides=(f"judge.plan={plan}", *(overrides or ())),
            label=f"-{plan}",
        )
        for seed in range(first_seed, first_seed + seeds)
        for plan in chosen
    }

    def show(found: Mapping[Cell, Measured]) -> None:
        print_table(found, chosen, 1)
        print_bounds({plan: [root / cells[cell].name for cell in found if cell[0] == plan] for plan in chosen})

    run_all(cells, root, measured or root / "measured", show, print_only=print_only)


if __name__ == "__main__":
    typer.run(main)
