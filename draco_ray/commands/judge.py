"""`draco judge`: judge traces and print the results."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draco_ray.commands import grade
from draco_ray.config.ineffective_keys import check_effective, ineffective_judge_keys, overridden_keys
from draco_ray.config.schema import FILES_PREFIX, RULE_JUDGE, DracoConfig, JudgeConfig, JudgeLimits
from draco_ray.errors import BudgetSpent, ConfigError, JudgeUnavailable, StoreError
from draco_ray.judging import render
from draco_ray.judging.endpoint import describe_judge
from draco_ray.judging.outage import format_duration
from draco_ray.judging.panel import member_config
from draco_ray.judging.pricing import known_price
from draco_ray.judging.prompt_fitter import BYTES_PER_TOKEN
from draco_ray.judging.reply_cache import REPLIES_FILE, read_cost_ledger, release_cost_of_unanswered
from draco_ray.lab.analysis.judges import RuleCompleter, configured_rules, configures_judge
from draco_ray.lab.analysis.pass_share import Line, pass_share
from draco_ray.lab.report.page import write_report
from draco_ray.lab.runs.cost import cost_table, phase_costs, read_calls
from draco_ray.terminal import console, counted
from draco_ray.traces.batch import BATCH_PRICE_SHARE, unsettled_batches
from draco_ray.traces.estimate import PhaseEstimate, estimate_cost
from draco_ray.traces.judging import as_trajectory
from draco_ray.traces.judging_run import JUDGED_FILE, JudgingRun, Totals
from draco_ray.traces.library import MeteredJudge, Plan, judge_run, open_judge, plan
from draco_ray.traces.load import Groups, load_traces
from draco_ray.traces.results import rubric_digest

EXIT_BELOW, EXIT_PARTIAL = 3, 4
"""Exit codes: the pass share is below ``--fail-under`` or the baseline; some traces could not be read or judged."""
ROUNDING = 1e-9
"""How far below ``--fail-under`` a pass share may be by rounding."""
SAY_SECONDS = 15.0
"""Seconds between two progress lines without a terminal."""
SHOWN_PROBLEMS, SHOWN_GROUPS = 20, 5
SECTIONS_READ = ("judge", "algorithm", "ray")
"""Sections of the configuration that the command uses."""
OF_ALGORITHM = (
    *("rubric", "static_rubric", "rule", "reliability", "std_epsilon", "skip_inert_credit_calls"),
    *("skip_useless_credit_calls", "credit_surviving_only", "merge_proposals", "merge_verdicts"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeArguments:
    """The command's arguments."""

    paths: Sequence[Path]
    judge: str | None
    """Value of ``--judge``; None: the configuration's judge."""
    out: Path | None
    format: str
    group_by: str | None
    mapping: Path | None
    rubric: str | None
    budget: float | None
    fail_under: float | None
    baseline: Path | None
    api_base: str | None
    api_key_env: str | None
    context: int | None
    config: DracoConfig
    typed: Sequence[str]
    """``KEY=VALUE`` words of the command line."""
    batch: bool
    ray: bool
    github: bool
    release: bool
    dry_run: bool


def run(wanted: JudgeArguments) -> int:
    """Judge traces, or print what would be judged; returns the exit code.

    Raises:
        TraceError: none of the files is a trace.
        ConfigError: the arguments cannot be used.
        JudgeUnavailable: the judge does not answer, or the budget is spent.
    """
    if wanted.out is None and not wanted.dry_run:
        raise ConfigError(
            "draco judge: expected --out DIR, the folder for the results (or --dry-run, which writes nothing)"
        )
    judge = _configured(wanted.config) if wanted.judge is None else wanted.judge
    _check_together(wanted, judge)
    # Check the arguments before reading any trace.
    # The offline judge is free and has no price.
    settled = plan(
        judge,
        config=wanted.config.updated(judge={"limits": JudgeLimits()}) if judge == RULE_JUDGE else wanted.config,
        budget=None if judge == RULE_JUDGE else wanted.budget,
        api_base=wanted.api_base,
        api_key_env=wanted.api_key_env,
        rubric=wanted.rubric,
        context=wanted.context,
        # A dry run writes nothing. Otherwise replies and the secret key of the prompts' evidence codes are stored here.
        out=None if wanted.dry_run else wanted.out,
        batch=wanted.batch,
        ray=wanted.ray,
    )
    baseline = None if wanted.baseline is None else grade.read_lines(wanted.baseline)
    if baseline is not None:
        rubric = settled.rubric or ()
        grade.check_rubric({each.title for each in rubric}, baseline, rubric_digest(rubric))
    judge = settled.config.judge.model
    check_effective("--set", wanted.typed, SECTIONS_READ, _idle(settled, wanted))
    groups = load_traces([*wanted.paths], wanted.format, wanted.group_by, wanted.mapping)
    if baseline is not None:
        grade.shared_tasks({group.task_id for group in groups}, baseline)
    for line in _understood(groups, settled):
        console.print(line)
    guessed = estimate_cost(
        groups,
        settled.config,
        settled.prompts,
        settled.room,
        known_price(settled.config.judge, judge),
        rubric=settled.rubric,
    )
    console.print(_asked(settled.config.judge))
    console.print(_estimated(guessed, settled.config.judge, batch=wanted.batch))
    if judge == RULE_JUDGE:
        console.print(
            "the offline judge is a stand-in whose rules fit only the sandbox's tasks; its verdicts on other traces "
            "are examples without meaning"
        )
    if wanted.dry_run or wanted.out is None:
        _show_one(groups, settled)
        return EXIT_PARTIAL if groups.problems else 0
    with JudgingRun.open(wanted.out, settled.config, groups) as kept:
        calls = sum(each.calls for each in guessed.values())
        totals = _judge(kept, settled, wanted, calls, len(groups))
        _summary(kept, totals)
        lines = grade.read_lines(kept.path) if settled.rubric is not None and totals.traces else []
        if wanted.github and totals.traces:
            grade.write_github_annotations(grade.read_lines(kept.path))
    below = _below(lines, baseline, wanted)
    for line in totals.errors[:SHOWN_PROBLEMS]:
        console.print(f"no reward: {line}")
    return EXIT_BELOW if below else EXIT_PARTIAL if groups.problems or totals.errors else 0


def _configured(config: DracoConfig) -> str | None:
    """The judge to use if ``--judge`` is not given; None leaves the choice to `plan`."""
    if config.judge.rule_judge.start and not config.judge.self_judge.enabled:
        return RULE_JUDGE
    # The schema's default is used only if the configuration names no judge.
    return None if configures_judge(config) else config.judge.model


def _check_together(wanted: JudgeArguments, judge: str | None) -> None:
    """Refuse options that contradict each other or have no effect on the judge. Raises: ConfigError."""
    if wanted.ray and (wanted.batch or judge == RULE_JUDGE):
        raise ConfigError("--ray: cannot be combined with --batch or with the offline judge, which needs no cluster")
    sent: dict[str, object] = {"--api-base": wanted.api_base, "--api-key-env": wanted.api_key_env}
    sent |= {"--batch": wanted.batch, "--release": wanted.release}
    local = judge is not None and (judge == RULE_JUDGE or judge.startswith(FILES_PREFIX))
    if local and (given := [name for name, value in sent.items() if value]):
        raise ConfigError(f"{given[0]}: no effect with --judge {judge}, because no request is sent")
    for option, given_ in (("--fail-under", wanted.fail_under), ("--baseline", wanted.baseline)):
        if given_ is not None and wanted.rubric is None:
            raise ConfigError(
                f"{option}: needs a fixed rubric, because the judge's rubrics differ between groups; add --rubric"
            )
    typed = overridden_keys(wanted.typed)
    for option, value, keys in (
        ("--judge", wanted.judge, ("judge.model", "judge.rule_judge.start", "judge.self_judge.enabled")),
        ("--api-base", wanted.api_base, ("judge.api_base",)),
        ("--api-key-env", wanted.api_key_env, ("judge.api_key_env",)),
        ("--budget", wanted.budget, ("judge.limits.dollars",)),
        ("--context", wanted.context, ("judge.context_tokens",)),
        ("--rubric", wanted.rubric, ("algorithm.rubric", "algorithm.static_rubric")),
    ):
        if value is not None and (twice := next((key for key in keys if key in typed), None)):
            raise ConfigError(f"{option} and --set {twice}: give only one of them")


def _idle(settled: Plan, wanted: JudgeArguments) -> dict[str, str]:
    """Keys in `SECTIONS_READ` that have no effect on this call -> the reason, as `check_effective` expects them."""
    judge = settled.config.judge
    # If the configuration starts a rule judge, `plan` has reset judge.rule_judge, so the user's own keys are checked.
    named = wanted.judge is not None or judge.model != RULE_JUDGE
    idle = {"algorithm": "when judging traces"}
    idle |= {f"algorithm.{key}": "" for key in OF_ALGORITHM}
    idle |= ineffective_judge_keys(settled.config if named else wanted.config)
    if not wanted.ray:
        pool = ("workers", "max_workers", "idle_seconds", "start_timeout_seconds")
        idle |= dict.fromkeys(("ray", *(f"judge.{key}" for key in pool)), "without --ray")
    if not judge.local.enabled:
        idle["judge.local"] = (
            "unless the cluster serves the judge, which needs --ray and a hosted_vllm/ model without an endpoint"
        )
    if settled.rubric is None:
        idle["algorithm.static_rubric"] = "without algorithm.rubric=static"
    if judge.model == RULE_JUDGE:
        sent = ("api_base", "api_key_env", "temperature", "reasoning_effort", "extra_body", "service_tier", "limits")
        idle |= dict.fromkeys((f"judge.{key}" for key in sent), "with the offline judge, which answers in this process")
    if wanted.batch:
        own = ("service_tier", "prompt_cache", "request_timeout_seconds", "concurrency_per_worker")
        idle |= dict.fromkeys((f"judge.{key}" for key in own), "with --batch")
    return idle


def _settle_unanswered(cache: Path, wanted: JudgeArguments) -> None:
    """Print how much of the budget is reserved by requests of killed processes, or free it."""
    # The cost of requests in recorded batches is settled once their batch has ended.
    batches = unsettled_batches(cache) if wanted.batch else {}
    known = {lease for members in batches.values() for lease in members.values()}
    if wanted.release:
        freed = release_cost_of_unanswered(cache, except_numbers=known)
        console.print(f"${freed:.4f} of unanswered requests now count as not billed")
    elif waiting := {each: most for each, most in read_cost_ledger(cache).under_way.items() if each not in known}:
        console.print(
            f"{counted(len(waiting), 'request')} of an earlier process had no answer and may have been billed: "
            f"${math.fsum(waiting.values()):.4f} stay reserved; if the provider did not bill them, add --release"
        )


def _judge(kept: JudgingRun, settled: Plan, wanted: JudgeArguments, calls: int, groups: int) -> Totals:
    offline = settled.config.judge.model == RULE_JUDGE
    if any(kept.results()):
        left = len(kept.pending())
        console.print(f"{counted(groups - left, 'group')} already judged, {left} left")
        replies = (settled.config.judge.cache or kept.directory.judge_cache) / REPLIES_FILE
        if not offline and not replies.exists():
            console.print(
                f"{replies} is missing: judged groups are kept, but calls of the other groups are sent and paid for "
                "again, and earlier costs do not count towards the budget"
            )
    if offline:
        named = wanted.judge == RULE_JUDGE
        meter = MeteredJudge(RuleCompleter() if named else configured_rules(wanted.config.judge, wanted.config.seed))
    else:
        _settle_unanswered(settled.config.judge.cache or kept.directory.judge_cache, wanted)
        meter = open_judge(settled)
    began = time.monotonic()
    try:
        asyncio.run(_with_progress(kept, settled, meter, calls, ray=wanted.ray))
    except KeyboardInterrupt:
        kept.finish(time.monotonic() - began)
        console.print(f"stopped; results so far are in {kept.path}; run the same command again to continue")
        raise SystemExit(130) from None
    except (JudgeUnavailable, StoreError) as error:
        with contextlib.suppress(OSError, StoreError):
            kept.finish(time.monotonic() - began)
        if meter.done == meter.failed and not any(kept.results()):
            raise
        more = "the command with a larger --budget" if isinstance(error, BudgetSpent) else "the same command again"
        raise type(error)(f"{error}; answers so far are kept in {kept.path}; run {more} to continue") from None
    return kept.finish(time.monotonic() - began)


async def _with_progress(kept: JudgingRun, settled: Plan, meter: MeteredJudge, calls: int, *, ray: bool) -> None:
    saying = asyncio.create_task(_say(kept, meter, calls))
    try:
        if ray and kept.pending():
            from draco_ray.commands.judge_cluster import open_judge_pool

            async with open_judge_pool(settled.told, kept, meter) as ask:
                await judge_run(settled, meter, kept, ask)
        else:
            await judge_run(settled, meter, kept)
    finally:
        saying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await saying


async def _say(kept: JudgingRun, meter: MeteredJudge, calls: int) -> None:
    """Show progress until cancelled: one live line on a terminal, otherwise a line every `SAY_SECONDS`."""
    began, total = time.monotonic(), len(kept.pending())
    if console.is_terminal:
        with console.status("") as status:
            while True:
                status.update(progress_line(meter, calls, time.monotonic() - began, total))
                await asyncio.sleep(0.5)
    while True:
        await asyncio.sleep(SAY_SECONDS)
        console.print(progress_line(meter, calls, time.monotonic() - began, total))


def progress_line(meter: MeteredJudge, calls: int, seconds: float, groups: int) -> str:
    """One line: calls so far and expected, their cost, calls in progress, and the estimated time left."""
    asked = meter.done - meter.replayed
    left = max(calls - meter.done, 0)
    pace = "" if not asked else f", about {format_duration(seconds * left / asked)} left"
    waiting = f", {meter.under_way} in progress, the oldest for {meter.oldest:.0f}s" if meter.under_way else ""
    failed = f", {meter.failed} failed" if meter.failed else ""
    kept = f" ({meter.replayed} from an earlier process)" if meter.replayed else ""
    return (
        f"{meter.done} of about {max(calls, meter.done)} calls{kept} for {counted(groups, 'group')} in "
        f"{format_duration(seconds)}, "
        f"${meter.dollars:.4f} so far{waiting}{failed}{pace}{f'; {meter.waits_for}' if meter.waits_for else ''}"
    )


def _understood(groups: Groups, settled: Plan) -> list[str]:
    summaries = [each for group in groups for each in group.summaries]
    formats = Counter(each.format for each in summaries)
    single = sum(len(group) == 1 for group in groups)
    sizes = Counter(len(group) for group in groups if len(group) > 1)
    steps = sum(each.steps for each in summaries)
    lines = [
        f"{counted(len(summaries), 'trace')} ({', '.join(f'{name} {count}' for name, count in formats.items())}), "
        f"{counted(steps, 'step')}, in {counted(len(groups), 'group')}"
    ]
    if sizes:
        lines += [f"  {counted(count, 'group')} of {size} traces of one task" for size, count in sorted(sizes.items())]
        several = [group for group in groups if len(group) > 1]
        lines += [f"    {', '.join(each.source for each in group.summaries)}" for group in several[:SHOWN_GROUPS]]
    if single:
        lines.append(
            f"  {counted(single, 'single trace')}: get a rubric, verdicts and step qualities, but no dropout and no "
            "advantage; to group traces of the same task, add --group-by FIELD"
        )
    long = [each for each in summaries if each.characters + each.prompt_characters > settled.room]
    if long:
        lines.append(
            f"  {counted(len(long), 'trace')} longer than the {settled.room:,} characters that fit into a prompt at "
            f"{BYTES_PER_TOKEN} bytes per token: outputs, then turns, then the prompt are shortened; no step is left "
            "out"
        )
    if not settled.context_known and settled.config.judge.model != RULE_JUDGE and settled.config.judge.files is None:
        lines.append(
            f"  the context length of {settled.config.judge.model} is unknown: {settled.context_tokens:,} tokens are "
            "assumed; set it with --context"
        )
    local = settled.config.judge.local
    if local.enabled:
        most = max(local.replicas, local.max_replicas)
        where = f"of {local.gpus_per_replica:g} GPUs" if local.gpus_per_replica else "on CPUs"
        lines.append(
            f"  {settled.config.judge.model} is served on the cluster: {local.replicas} to {most} vLLM servers {where} "
            "(judge.local)"
        )
    places: dict[str, list[str]] = {}
    for summary in summaries:
        for note in summary.notes:
            places.setdefault(note, []).append(summary.source)
    noted = [
        f"  {sources[0]}{f' and {len(sources) - 1} more' if len(sources) > 1 else ''}: {note}"
        for note, sources in places.items()
    ]
    lines += noted[:SHOWN_PROBLEMS]
    if len(noted) > SHOWN_PROBLEMS:
        lines.append(f"  and {len(noted) - SHOWN_PROBLEMS} more such notes")
    if groups.problems:
        lines.append(f"{counted(len(groups.problems), 'input')} could not be read, first: {groups.problems[0]}")
    return lines


def _asked(judge: JudgeConfig) -> str:
    """The judge and its endpoint, printed before the first request."""
    if judge.model == RULE_JUDGE:
        return "judge: the offline judge, in this process"
    beside = {"jury": judge.jury, "strong": [judge.strong] if judge.strong else [], "fallbacks": judge.fallbacks}
    others = [
        f"; {role}: {describe_judge(member_config(judge, each))}"
        for role, members in beside.items()
        for each in members
    ]
    where = f"{judge.model}, served on the cluster" if judge.local.enabled else describe_judge(judge)
    return f"judge: {where}{''.join(others)}"


def _estimated(phases: Mapping[str, PhaseEstimate], judge: JudgeConfig, *, batch: bool) -> str:
    total = sum(phases.values(), start=PhaseEstimate(dollars=0.0))
    share = BATCH_PRICE_SHARE if batch else 1.0
    money = "price unknown" if total.dollars is None else f"about ${share * total.dollars:.2f}"
    parts = ", ".join(f"{phase} {each.calls}" for phase, each in phases.items() if each.calls)
    if judge.files is not None or judge.model == RULE_JUDGE:
        return f"about {total.calls} prompts ({parts}), {total.input_tokens:,} tokens to read"
    beside = " and without jury and strong judge" if judge.jury or judge.strong else ""
    enough = "" if batch or beside or not total.budget else f"; --budget {total.budget:.2f} should be enough"
    return (
        f"about {total.calls} calls ({parts}), {total.input_tokens:,} tokens in, "
        f"{total.output_tokens:,} out, {money}{' in batches' if batch else ''}, without savings by the provider's "
        f"prompt cache{beside}{enough}"
    )


def _show_one(groups: Groups, settled: Plan) -> None:
    trace, task_id = groups[0].traces[0], groups[0].task_id
    text = render.agent_trajectory(as_trajectory(trace, task_id, 0), settled.prompts.code(task_id))
    console.print(f"\ntrace {trace.trace_id} of {trace.source}, as the judge sees it:\n")
    console.print(text)


def _summary(kept: JudgingRun, totals: Totals) -> None:
    calls = [call for step in read_calls(kept.directory).values() for call in step]
    console.print(cost_table(phase_costs(calls)))
    page = kept.path / "report.html"
    write_report(kept.directory, page)
    mean = f"mean reward {math.fsum(totals.rewards) / len(totals.rewards):+.3f}" if totals.rewards else "no rewards"
    failed = f", {len(totals.errors)} without a reward" if totals.errors and totals.rewards else ""
    console.print(
        f"{counted(totals.traces, 'trace')} in {counted(totals.judged, 'group')} judged, {mean}{failed}: "
        f"{kept.path / JUDGED_FILE}, {page}",
    )


def _below(lines: Sequence[Line], baseline: Sequence[Line] | None, wanted: JudgeArguments) -> bool:
    """Print the grades under a pinned rubric.

    Returns: whether the pass share is below the threshold or the baseline, or no criterion applies to any trace.
    """
    share = pass_share(lines)
    if share is None:
        if wanted.fail_under is not None or wanted.baseline is not None:
            judged = any(line["verdicts"] for line in lines)
            why = "no criterion of the rubric applies to any trace" if judged else "no trace could be judged"
            console.print(f"{why}, so there is no pass share to compare")
            return judged
        return False
    console.print(grade.criterion_table(lines))
    console.print(f"pass share {grade.format_pass_share(share)}")
    below = False
    # Rounding must not decide whether the mean of 1, 0.4 and 1 reaches 0.8.
    if wanted.fail_under is not None and share.mean < wanted.fail_under - ROUNDING:
        console.print(f"pass share {share.mean:.10g} is below --fail-under {wanted.fail_under}")
        below = True
    if baseline is not None:
        change, tasks = grade.baseline_difference(lines, baseline)
        one = "no interval, because there is only one task"
        limits = one if math.isinf(change.low) else f"[{100 * change.low:+z.1f}, {100 * change.high:+z.1f}]"
        over = counted(tasks, "common task")
        console.print(f"change from the baseline: {100 * change.mean:+z.1f} percentage points, {limits}, over {over}")
        below = below or change.high < 0
    return below
