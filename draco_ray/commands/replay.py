"""`draco replay`: advantage rules on recorded verdicts, and archived judge calls repeated with another judge."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from draco_ray.algorithm.rules import find_rule
from draco_ray.commands.printing import print_overall, print_table
from draco_ray.config.load import load_config
from draco_ray.config.schema import RULE_JUDGE, DracoConfig, JudgeConfig
from draco_ray.errors import ConfigError
from draco_ray.judging.build import prompts_of
from draco_ray.judging.completion import Completer
from draco_ray.judging.judge import Judge
from draco_ray.judging.prompts import load_static_rubric
from draco_ray.lab.analysis import rubric_overlap
from draco_ray.lab.analysis.checkpoint_judge import checkpoints_before, open_checkpoints
from draco_ray.lab.analysis.judge_loss import judge_loss
from draco_ray.lab.analysis.judges import (
    OWN_JUDGE,
    POLICY_JUDGE,
    NamedJudge,
    folder_name,
    judge_config,
    judge_description,
    open_completer,
)
from draco_ray.lab.analysis.pairing import make_pairing_judge
from draco_ray.lab.analysis.replay import (
    VERDICT_PHASES,
    ArchivedCall,
    agreement_table,
    archived_calls,
    check_steps,
    repeated_reliability,
    replay,
)
from draco_ray.lab.analysis.rescoring import REPLAYS, RESCORED_TABLE, rescore, rubric_rates
from draco_ray.lab.analysis.rules import replay_rules
from draco_ray.lab.analysis.tables import write_table
from draco_ray.lab.files import create_output_folder
from draco_ray.lab.rows import grouped, mean
from draco_ray.records import Criterion
from draco_ray.runs.directory import RunDirectory
from draco_ray.terminal import console


def replay_algorithm(
    directory: Path, *, rules: Sequence[str] | None, steps: Sequence[int] | None, out: Path | None
) -> list[Path]:
    """Run advantage rules over the recorded verdicts; no judge is called.

    Raises:
        ConfigError: not a run, an unknown step, or nothing that could be replayed.
    """
    run = open_run(directory, steps)
    for name in rules or ():
        find_rule(name, run.setting("algorithm.reliability"))
    folder = create_output_folder(out or run.path / REPLAYS)
    table = replay_rules(run, rules, steps)
    if not table.num_rows:
        raise ConfigError(
            f"{directory}: the run has no group with verdicts and advantages; only runs with algorithm.reward=rubric "
            "can be replayed"
        )
    by_rule = grouped(table.to_pylist(), "rule")
    measures = [name for name in table.column_names if name not in ("run", "training_step", "rule")]
    means = {
        name: [mean(row[name] for row in rows if row[name] is not None) for rows in by_rule.values()]
        for name in measures
    }
    print_table("advantage rules, means over steps", ["rule", *by_rule], means)
    return write_table(table, folder, "rules")


def replay_judge(
    directory: Path,
    *,
    judge: NamedJudge,
    pairing: NamedJudge | None,
    phases: Sequence[str],
    steps: Sequence[int] | None,
    static_rubric: Path | None,
    out: Path | None,
    trust: bool = False,
) -> list[Path]:
    """Send archived judge calls to another judge and print how far it agrees; ``pairing`` pairs equivalent criteria.

    With ``static_rubric`` the other judge also scores the recorded rollouts against that rubric.

    Raises:
        ConfigError: not a run, an unknown step, no call to replay, no model to compare criteria with, or a policy's
            checkpoint that was not kept.
        JudgeUnavailable: the judge does not answer.
        EngineError: the policy cannot be served.
    """
    run = open_run(directory, steps)
    _check_named(run, judge, pairing, phases, steps)
    own = judges_own_config(str(run.path), judge, *filter(None, [pairing]), trust=trust).judge
    calls = archived_calls(run, steps, [phase for phase in phases if phase in VERDICT_PHASES])
    written = rubric_overlap.writing_calls(run, steps, [p for p in phases if p in rubric_overlap.CRITERIA_PHASES], own)
    rubric = None if static_rubric is None else load_static_rubric(static_rubric)
    if not calls and not written and rubric is None:
        raise ConfigError(f"{directory}: no archived {' or '.join(phases)} call with a usable reply")
    folder = create_output_folder(out or run.path / REPLAYS)
    replayed = _Replay(run, judge.model, own, judge_config(own, judge, folder / "judge_cache"), folder)
    found: list[Path] = []
    if calls:
        found += replayed.verdicts(calls)
    if written and pairing is not None:
        found += replayed.written(written, judge_config(own, pairing, folder / "judge_cache"))
    if rubric is not None:
        found += replayed.static(rubric, steps or run.steps())
    console.print(f"cost of the judge calls: {replayed.dollars:.4f} dollars")
    return found


def _check_named(
    run: RunDirectory,
    judge: NamedJudge,
    pairing: NamedJudge | None,
    phases: Sequence[str],
    steps: Sequence[int] | None,
) -> None:
    if judge.model == POLICY_JUDGE:
        checkpoints_before(run, steps or run.steps())
    writing = [phase for phase in phases if phase in rubric_overlap.CRITERIA_PHASES]
    if pairing is None:
        if writing:
            raise ConfigError(
                f"--phase {writing[0]}: needs a third model that decides which criteria of the two judges are "
                f"equivalent; add --pairing MODEL ({RULE_JUDGE}: the offline judge)"
            )
    elif pairing.model == POLICY_JUDGE:
        raise ConfigError(
            f"--pairing {POLICY_JUDGE}: a policy cannot compare its own criteria; name a third model or {RULE_JUDGE}"
        )
    elif not writing:
        raise ConfigError(
            "--pairing compares criteria, but only verdicts were requested; add --phase stage1, stage2 or union"
        )


@dataclass
class _Replay:
    """Repeats a run's judge calls with another judge, prints the agreement and writes its tables."""

    _run: RunDirectory
    _judge: str
    _own: JudgeConfig
    _config: JudgeConfig
    _folder: Path
    dollars: float = 0.0

    def __post_init__(self) -> None:
        self._seed: int = self._run.setting("seed")
        self._asked = judge_description(self._judge, self._config)

    def verdicts(self, calls: Sequence[ArchivedCall]) -> list[Path]:
        """Print and write the agreement of verdicts and citations, and the training signal that would be lost."""
        console.print(f"sending {len(calls)} archived prompts to {self._asked}")
        replayed = self._ask(
            self._config,
            [call.training_step for call in calls],
            lambda complete, mine: replay(
                self._run, complete, [call for call in calls if call.training_step in mine], self._judge
            ),
        )
        agreed = agreement_table(replayed)
        print_overall("agreement with the run's own judge", agreed, ("run", "judge", "phase"))
        if (trusted := repeated_reliability(replayed)) is not None:
            limit = (
                " (an upper limit: mistakes that the judge repeats count as correct)"
                if self._judge == OWN_JUDGE
                else ""
            )
            console.print(
                f"algorithm.reliability of the run's judge, if all citations by {self._judge} are correct: "
                f"{trusted:.3f}{limit}"
            )
        lost = judge_loss(self._run, replayed)
        _print_loss(lost)
        return self._written({"judge_loss": lost, "agreement": agreed, "replayed": replayed})

    def written(self, calls: Sequence[rubric_overlap.WritingCall], third: JudgeConfig) -> list[Path]:
        """Print and write the overlap of the two judges' criteria, paired by the third model."""
        console.print(
            f"sending {len(calls)} archived prompts to {self._asked}; criteria are paired by "
            f"{judge_description(third.model, third)}"
        )
        model = make_pairing_judge(open_completer(third, self._seed), third)
        compared = self._ask(
            self._config,
            [call.training_step for call in calls],
            lambda complete, mine: rubric_overlap.compare_writing(
                self._run,
                [call for call in calls if call.training_step in mine],
                self._judge,
                complete,
                self._own,
                model,
            ),
        )
        overlap = rubric_overlap.overlap_table(compared)
        print_overall("overlap of criteria, compared with the run's own judge against itself", overlap, ("run",))
        return self._written({"overlap": overlap, "comparisons": compared})

    def static(self, rubric: Sequence[Criterion], steps: Sequence[int]) -> list[Path]:
        """Score the recorded rollouts against a static rubric, and compare the rates with the run's own rubric."""
        scorer = self._config.model_copy(update={"score_votes": 1})
        console.print(f"sending recorded rollouts to {self._asked}")
        prompts = prompts_of(scorer)
        again = self._ask(
            scorer,
            steps,
            lambda complete, mine: rescore(self._run, mine, rubric, Judge(complete, prompts, scorer), self._judge),
        )
        rates = rubric_rates(self._run, again)
        print_overall("the same rollouts against a static rubric", rates, ("run",), head="rubric")
        return self._written({"rubric_rates": rates, RESCORED_TABLE: again})

    def _ask(
        self,
        config: JudgeConfig,
        steps: Iterable[int],
        ask: Callable[[Completer, Sequence[int]], Awaitable[pa.Table]],
    ) -> pa.Table:
        """Run ``ask`` for these training steps, with the judge or with the policy's checkpoint of each step."""
        wanted = sorted(set(steps))

        async def asked() -> pa.Table:
            # A new client each time: locks of the previous one belong to a closed event loop.
            if self._judge != POLICY_JUDGE:
                return await ask(open_completer(config, self._seed), wanted)
            # `judges_own_config` has already checked --trust.
            trusted = load_config(str(self._run.path), trust=True)
            async with open_checkpoints(trusted, self._run, wanted) as policy:
                return pa.concat_tables([await ask(await policy.at(step), [step]) for step in wanted])

        table = asyncio.run(asked())
        self.dollars += sum(table.column("dollars").to_pylist())
        return table

    def _written(self, tables: Mapping[str, pa.Table]) -> list[Path]:
        return [
            path
            for name, table in tables.items()
            for path in write_table(table, self._folder / folder_name(self._judge), name)
        ]


def judges_own_config(source: str | None, *judges: NamedJudge, trust: bool) -> DracoConfig:
    """The configuration whose prompts and sampling the judges use; it must be trusted if it also names the judge."""
    if not {OWN_JUDGE, POLICY_JUDGE} & {judge.model for judge in judges}:
        return load_config(source, trust=True)
    first = judges[0]
    given = {"judge.api_base": first.api_base, "judge.api_key_env": first.api_key_env}
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
    return load_config(source, overrides if first.model == OWN_JUDGE else (), trust=trust)


def open_run(directory: Path, steps: Sequence[int] | None) -> RunDirectory:
    """Open a run and check that it has rows and these steps.

    Raises:
        ConfigError: not a run, a run without rows, or an unknown step.
    """
    run = RunDirectory.open(directory.resolve())
    if not run.steps():
        raise ConfigError(f"{directory}: the run has no rows yet; wait for its first step")
    check_steps(run, steps or ())
    return run


def _print_loss(table: pa.Table) -> None:
    """Print how much of the training signal is lost, one line per measure, if both judges have scored a group."""
    for row in table.to_pylist():
        if row["groups"]:
            cells = {name: [cell] for name, cell in row.items() if name not in ("run", "judge")}
            print_table("effect on training if this judge replaced the run's own", ["", row["judge"]], cells)
