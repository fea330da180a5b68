"""What `draco replay` and `draco attribution-bench` do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draco_ray.config.load import load_config
from draco_ray.config.schema import DracoConfig, JudgeConfig
from draco_ray.errors import ConfigError, WorldError
from draco_ray.judging.complete import Complete
from draco_ray.judging.judge import Judge, prompts_of
from draco_ray.judging.static_rubric import load_static_rubric
from draco_ray.lab.analysis import rubric_overlap
from draco_ray.lab.analysis.attribution.bench import judge_groups
from draco_ray.lab.analysis.attribution.measure import measures, rollout_rows
from draco_ray.lab.analysis.attribution.plant import planted_groups
from draco_ray.lab.analysis.attribution.recorded import recorded_groups
from draco_ray.lab.analysis.checkpoint_judge import checkpoints_before, open_checkpoints
from draco_ray.lab.analysis.dropout import dropout_variance, survival_by_group_size
from draco_ray.lab.analysis.judge_loss import judge_loss
from draco_ray.lab.analysis.judges import OWN, POLICY, RULES, folder_name, judge_config, open_complete
from draco_ray.lab.analysis.replay import PHASES, agreement_table, archived_calls, check_steps, replay
from draco_ray.lab.analysis.rescoring import REPLAYS, rescore, rubric_rates
from draco_ray.lab.analysis.rescoring import TABLE as RESCORED_TABLE
from draco_ray.lab.analysis.rules import replay_rules
from draco_ray.lab.analysis.tables import write_table
from draco_ray.lab.analysis.trend import trends
from draco_ray.lab.files import check_folder
from draco_ray.runs.directory import RunDirectory

SHOWN_BY_FAULT = ("kappa", "citation_precision", "citation_recall", "hit_at_1", "push_share")
"""Measures printed for each kind of fault."""
FOLLOWED = ("agreement", "kappa", "ac1", "balanced_accuracy", "false_pass", "false_fail", "citation_overlap")
"""Measures of agreement followed over training."""


def replay_algorithm(
    directory: Path, *, rules: Sequence[str], steps: Sequence[int] | None, out: Path | None, console: Console
) -> list[Path]:
    """Run advantage rules over the recorded verdicts, and vary the members of groups; no call is made.

    Raises:
        ConfigError: not a run, an unknown step, or nothing that could be replayed.
    """
    run = _open(directory, steps)
    std_epsilon = run.setting("algorithm.std_epsilon")
    folder = check_folder(out or run.path / REPLAYS)
    table = replay_rules(run, rules, steps, std_epsilon=std_epsilon)
    if not table.num_rows:
        raise ConfigError(f"{directory}: no group with verdicts and advantages; only rubric runs can be replayed")
    _print_means(console, "advantage rules, means over steps", table, "rule", ("run", "training_step"))
    dropout = dropout_variance(run, steps, std_epsilon=std_epsilon)
    names = ("reward_deviation", "advantage_deviation", "advantage_deviation_fixed", "sign_flips")
    _print_means(console, "under resampled members, means over rollouts", dropout.select(["run", *names]), "run", ())
    survival = survival_by_group_size(run, steps)
    shown = survival.select(["group_size", "surviving", "survival"])
    _print_means(console, "criteria that survive dropout, by group size", shown, "group_size", ())
    return [
        path
        for name, found in (("rules", table), ("dropout", dropout), ("survival", survival))
        for path in write_table(found, folder, name)
    ]


def replay_judge(
    directory: Path,
    *,
    judge: str,
    api_base: str | None,
    api_key_env: str | None,
    phases: Sequence[str],
    steps: Sequence[int] | None,
    pairing: str | None,
    pairing_api_base: str | None,
    pairing_api_key_env: str | None,
    static_rubric: Path | None,
    out: Path | None,
    console: Console,
    trust: bool = False,
) -> list[Path]:
    """Send archived judge calls to another judge and print how far it agrees; ``pairing`` compares written criteria.

    With ``static_rubric`` it also scores the recorded rollouts against that rubric.

    Raises:
        ConfigError: not a run, an unknown step, no call to replay, criteria to compare and no model that does, or a
            policy's checkpoint that was not kept.
        JudgeUnavailable: the judge does not answer.
        EngineError: the policy cannot be served.
    """
    run = _open(directory, steps)
    if judge == POLICY:
        if api_base is not None or api_key_env is not None:
            raise ConfigError(f"--judge {POLICY}: it is served here; expected no --api-base and no --api-key-env")
        checkpoints_before(run, steps or run.steps())
    if pairing == POLICY:
        raise ConfigError(
            f"--pairing {POLICY}: a policy cannot compare its own criteria; name a third model or {RULES}"
        )
    writing = [phase for phase in phases if phase in rubric_overlap.PHASES]
    verdicts = [phase for phase in phases if phase in PHASES]
    if writing and pairing is None:
        raise ConfigError(
            f"--phase {writing[0]}: a third model says which criteria of the two judges are the same check; "
            f"name it with --pairing MODEL ({RULES}: the offline judge)"
        )
    if pairing is not None and not writing:
        raise ConfigError("--pairing: only verdicts were asked about; add --phase stage1, stage2 or union")
    own = _config(str(run.path), (judge, pairing), api_base, api_key_env, trust=trust).judge
    calls = archived_calls(run, steps, verdicts)
    written = rubric_overlap.writing_calls(run, steps, writing, own)
    rubric = None if static_rubric is None else load_static_rubric(static_rubric)
    if not calls and not written and rubric is None:
        raise ConfigError(f"{directory}: no archived {' or '.join(phases)} call with a usable reply")
    folder = check_folder(out or run.path / REPLAYS)
    config = _cached(judge_config(own, judge, api_base=api_base, api_key_env=api_key_env, cache=None), folder)
    tables = folder / folder_name(judge)
    found: list[Path] = []
    dollars = 0.0
    if calls:
        console.print(f"{len(calls)} archived prompts to {judge}")
        replayed = asyncio.run(
            _asked(
                run,
                judge,
                config,
                [call.training_step for call in calls],
                lambda complete, mine: replay(
                    run, complete, [call for call in calls if call.training_step in mine], judge
                ),
            )
        )
        agreed = agreement_table(replayed)
        _print_overall(console, "agreement with the run's own judge", agreed, ("run", "judge", "phase"))
        lost = judge_loss(run, replayed)
        _print_loss(console, lost)
        dollars += sum(replayed.column("dollars").to_pylist())
        found += write_table(lost, tables, "judge_loss")
        found += [*write_table(agreed, tables, "agreement"), *write_table(replayed, tables, "replayed")]
        found += write_table(trends(agreed, FOLLOWED), tables, "trends")
    if written and pairing is not None:
        console.print(f"{len(written)} archived prompts to {judge}, paired by {pairing}")
        third = _cached(
            judge_config(own, pairing, api_base=pairing_api_base, api_key_env=pairing_api_key_env, cache=None), folder
        )
        model = rubric_overlap.ThirdModel(complete=open_complete(third), config=third)
        compared = asyncio.run(
            # A client of its own: the other one's locks belong to an event loop that has ended.
            _asked(
                run,
                judge,
                config,
                [call.training_step for call in written],
                lambda complete, mine: rubric_overlap.compare_writing(
                    run, [call for call in written if call.training_step in mine], judge, complete, own, model
                ),
            )
        )
        overlap = rubric_overlap.overlap_table(compared)
        _print_overall(console, "criteria, beside the run's own judge against itself", overlap, ("run",))
        dollars += sum(compared.column("dollars").to_pylist())
        found += [*write_table(overlap, tables, "overlap"), *write_table(compared, tables, "comparisons")]
        measured = ("recall", "precision", "criteria", "discriminative")
        found += write_table(trends(overlap, measured), tables, "overlap_trends")
    if rubric is not None:
        scorer = config.model_copy(update={"score_votes": 1})
        prompts = prompts_of(scorer)
        again = asyncio.run(
            _asked(
                run,
                judge,
                scorer,
                steps or run.steps(),
                lambda complete, mine: rescore(run, mine, rubric, Judge(complete, prompts, scorer), judge),
            )
        )
        rates = rubric_rates(run, again)
        overall = [row for row in rates.to_pylist() if row["training_step"] is None]
        names = [name for name in rates.column_names if name not in ("run", "training_step", "rubric")]
        heads = [row["rubric"] for row in overall]
        _print(
            console,
            "the same rollouts against a static rubric",
            ["rubric", *heads],
            {name: [row[name] for row in overall] for name in names},
        )
        dollars += sum(again.column("dollars").to_pylist())
        found += [*write_table(rates, tables, "rubric_rates"), *write_table(again, tables, RESCORED_TABLE)]
    console.print(f"asked for {dollars:.4f} dollars")
    return found


def attribution_bench(
    *,
    judge: str,
    config: str | None,
    api_base: str | None,
    api_key_env: str | None,
    run: Path | None,
    steps: Sequence[int] | None,
    world: Path | None,
    sandbox: Path,
    split: str,
    tasks: int | None,
    processes: int,
    out: Path,
    console: Console,
    trust: bool = False,
) -> list[Path]:
    """Plant faults in solutions, let a judge find them, print how well it and credit do.

    Args:
        judge: who is measured.
        config: for the judge; None is the run's own, else the defaults.
        api_base: the judge's endpoint.
        api_key_env: variable that holds its key.
        run: take its successful rollouts; None takes a sandbox's reference solutions.
        steps: training steps of the run.
        world: data root; None is the run's, or ``sandbox`` where there is no run.
        sandbox: the usual place of a sandbox.
        split: of the sandbox.
        tasks: at most so many.
        processes: AppWorld processes side by side.
        out: folder of the tables.
        console: where figures are printed.
        trust: as of `draco_ray.config.load.load_config`.

    Raises:
        ConfigError: an unknown split or step, not a run, or a configuration that cannot be used.
        WorldError: no sandbox, no successful rollout, or AppWorld fails.
        JudgeUnavailable: the judge does not answer.
    """
    recorded = None if run is None else _open(run, steps)
    check_folder(out)
    source = config if config is not None or recorded is None else str(recorded.path)
    settings = judge_config(
        _config(source, (judge,), api_base, api_key_env, trust=trust).judge,
        judge,
        api_base=api_base,
        api_key_env=api_key_env,
        cache=None if judge == RULES else out / "judge_cache",
    )
    prompts = prompts_of(settings)
    if recorded is None:
        world = world or sandbox
        groups = planted_groups(world, split, tasks, processes, out / "rollouts.jsonl")
        if not groups:
            raise WorldError(f"{world}: no reference of split {split} passes; check it with `draco sandbox verify`")
    else:
        of_run = load_config(str(recorded.path), trust=trust)
        world = world or of_run.data.root
        kept = out / "rollouts.jsonl"
        groups = recorded_groups(recorded, steps, tasks, world, of_run.environment, processes, kept)
        if not groups:
            raise WorldError(
                f"{run}: no rollout passes its task's tests in {world} without an error and breaks with a planted "
                "fault; take more training steps, or a run whose policy succeeds"
            )
    faults = sum(rollout.fault is not None for group in groups for rollout in group)
    console.print(
        f"{len(groups)} tasks, {sum(map(len, groups))} rollouts, {faults} with a planted fault; judge {judge}"
    )
    judged = asyncio.run(judge_groups(Judge(open_complete(settings), prompts, settings), groups, world))
    found = measures(judged, judge)
    overall = [row for row in found.to_pylist() if row["scope"] == "all"]
    heads = ("observations", "value", "low", "high", "chance", "last_step")
    _print(
        console, "all planted faults", ["", *heads], {row["measure"]: [row[head] for head in heads] for row in overall}
    )
    by_fault = [row for row in found.to_pylist() if row["measure"] in SHOWN_BY_FAULT and row["scope"] != "all"]
    cells: dict[str, list[object]] = {}
    for row in by_fault:
        cells.setdefault(row["scope"], [None] * len(SHOWN_BY_FAULT))[SHOWN_BY_FAULT.index(row["measure"])] = row[
            "value"
        ]
    _print(console, "by fault", ["", *SHOWN_BY_FAULT], cells)
    tables = out / folder_name(judge)
    return [*write_table(found, tables, "measures"), *write_table(rollout_rows(judged, judge), tables, "rollouts")]


async def _asked(
    run: RunDirectory,
    judge: str,
    config: JudgeConfig,
    steps: Iterable[int],
    ask: Callable[[Complete, Sequence[int]], Awaitable[pa.Table]],
) -> pa.Table:
    """Let ``ask`` put what these training steps hold to the judge, or step by step to a policy's checkpoints."""
    wanted = sorted(set(steps))
    if judge != POLICY:
        return await ask(open_complete(config), wanted)
    # Whether its configuration may be acted on was asked when the judge was named.
    async with open_checkpoints(load_config(str(run.path), trust=True), run, wanted) as policy:
        return pa.concat_tables([await ask(await policy.at(step), [step]) for step in wanted])


def _config(
    source: str | None, judges: Sequence[str | None], api_base: str | None, api_key_env: str | None, *, trust: bool
) -> DracoConfig:
    """A configuration whose judge's prompts and sampling are taken; more only where it names who is asked."""
    if not {OWN, POLICY} & set(judges):
        return load_config(source, trust=True)
    given = {"judge.api_base": api_base, "judge.api_key_env": api_key_env}
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
    return load_config(source, overrides if judges[0] == OWN else (), trust=trust)


def _open(directory: Path, steps: Sequence[int] | None) -> RunDirectory:
    run = RunDirectory.open(directory.resolve())
    if not run.steps():
        raise ConfigError(f"{directory}: nothing to replay, the run has no rows yet")
    check_steps(run, steps or ())
    return run


def _cached(config: JudgeConfig, folder: Path) -> JudgeConfig:
    """With a durable reply cache; the rule judge answers faster than a disk."""
    if config.model == RULES:
        return config
    return config.model_copy(update={"cache": folder / "judge_cache"})


def _print_overall(console: Console, title: str, table: pa.Table, keys: Sequence[str]) -> None:
    """A line per measure, a column per row over all steps, headed by its phase; intervals stand beside their value."""
    overall = [row for row in table.to_pylist() if row["training_step"] is None]
    bounded = {name.removesuffix("_low") for name in table.column_names if name.endswith("_low")}
    bounds = {f"{name}_{side}" for name in bounded for side in ("low", "high")}
    names = [name for name in table.column_names if name not in (*keys, "phase", "training_step", *bounds)]
    heads = [row["phase"] for row in overall]

    def shown(row: Mapping[str, object], name: str) -> object:
        if name not in bounded or row[f"{name}_low"] is None:
            return row[name]
        return f"{_written(row[name])} [{_written(row[f'{name}_low'])}, {_written(row[f'{name}_high'])}]"

    _print(console, title, ["phase", *heads], {name: [shown(row, name) for row in overall] for name in names})


def _print_loss(console: Console, table: pa.Table) -> None:
    """A line a measure of what training would lose, where both judges have scored a group."""
    for row in table.to_pylist():
        if row["groups"]:
            names = [name for name in table.column_names if name not in ("run", "judge")]
            _print(console, "in its place, through the same rule", ["", row["judge"]], {n: [row[n]] for n in names})


def _print_means(console: Console, title: str, table: pa.Table, key: str, left_out: Iterable[str]) -> None:
    """A line per measure, a column per value of ``key``: means over its rows."""
    measures = [name for name in table.column_names if name != key and name not in left_out]
    rows = table.to_pylist()
    values = list(dict.fromkeys(row[key] for row in rows))
    cells: dict[str, list[object]] = {name: [] for name in measures}
    for name in measures:
        for value in values:
            numbers = [float(row[name]) for row in rows if row[key] == value and row[name] is not None]
            cells[name].append(sum(numbers) / len(numbers) if numbers else None)
    _print(console, title, [key, *map(str, values)], cells)


def _print(console: Console, title: str, heads: Sequence[str], cells: Mapping[str, Sequence[object]]) -> None:
    printed = Table(*heads, title=title, title_justify="left", box=None, pad_edge=False)
    for column in printed.columns[1:]:
        column.justify = "right"
    for name, values in cells.items():
        printed.add_row(name, *(Text(_written(value)) for value in values))
    console.print(printed)


def _written(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
