"""`judge` and `judge_sync`: compute rewards and step advantages for groups of traces."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

from draco_ray.config.load import load_config
from draco_ray.config.schema import (
    LOCAL_PROVIDER,
    RULE_JUDGE,
    DracoConfig,
    JudgeConfig,
    JudgeLimits,
    RuleJudgeConfig,
    RunConfig,
    SelfJudgeConfig,
)
from draco_ray.errors import ConfigError
from draco_ray.judging.build import open_model, prompts_of
from draco_ray.judging.completion import Completer, Completion, Request
from draco_ray.judging.endpoint import endpoint_address
from draco_ray.judging.judge import ask_phase
from draco_ray.judging.judge_context import judge_context_length, max_judge_prompt_tokens
from draco_ray.judging.labels import examples_of
from draco_ray.judging.limiter import Limiter, LimiterQueue
from draco_ray.judging.outage import JudgeHealth
from draco_ray.judging.panel import panel_judge, with_fallbacks
from draco_ray.judging.pricing import check_budget
from draco_ray.judging.prompt_fitter import BYTES_PER_TOKEN
from draco_ray.judging.prompts import Prompts, load_prompts, load_static_rubric
from draco_ray.judging.reply_cache import CostLedger, ReplyCache, read_cost_ledger
from draco_ray.judging.tokens import model_limit
from draco_ray.records import Criterion
from draco_ray.traces.judging import Ask, GroupJudgement, JudgeOf, environment_facts, judge_group
from draco_ray.traces.judging_run import TRACES_SETTING, JudgingRun
from draco_ray.traces.model import Trace, TraceGroup
from draco_ray.traces.results import JudgedGroup, judged_group
from draco_ray.workers.tasks import gather_or_cancel

DEFAULT_CONTEXT = 128_000
"""Context length of an unknown judge, in tokens."""
STATIC_RUBRIC = Path("prompts/static_rubric.yaml")
STATIC = "static"
"""Value of ``rubric`` for the static rubric that ships with draco-ray."""
GROUPS_IN_BATCH = 500
"""Groups judged at the same time with the batch API, as each phase takes as long as a batch."""


ConfigSource = DracoConfig | Mapping[str, Any] | str | Path
"""A configuration, a nested mapping, or the name of a preset, a YAML file or a run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Resolved settings for judging traces."""

    config: DracoConfig
    prompts: Prompts
    context_tokens: int
    context_known: bool
    """Whether the judge's context length is known; otherwise it is a guess."""
    rubric: tuple[Criterion, ...] | None
    batch: bool = False
    """Whether the provider's batch API is used."""

    @property
    def told(self) -> DracoConfig:
        """The configuration with the judge's context length."""
        return self.config.updated(judge={"context_tokens": self.context_tokens})

    @property
    def room(self) -> int:
        """Approximate maximum length of a prompt, in characters."""
        return BYTES_PER_TOKEN * (max_judge_prompt_tokens(self.told.judge) or self.context_tokens)

    @property
    def at_once(self) -> int:
        """Number of groups in flight: equal to the requests in flight, as a single trace has one request at a time."""
        judge = self.config.judge
        return GROUPS_IN_BATCH if self.batch else judge.concurrency_per_worker * max(judge.max_workers, judge.workers)


def plan(
    model: str | None = None,
    *,
    config: ConfigSource | None = None,
    budget: float | None = None,
    api_base: str | None = None,
    api_key_env: str | None = None,
    rubric: str | Path | None = None,
    context: int | None = None,
    out: Path | None = None,
    batch: bool = False,
    ray: bool = False,
) -> Plan:
    """Resolve the settings for judging; the arguments are those of `judge`.

    ``ray``: judge on a cluster, which serves a ``hosted_vllm/`` model itself if it has no endpoint (``judge.local``).

    Raises:
        ConfigError: a budget without a known price, an unusable rubric or prompt set, or no model and a configured
            judge that exists only during training.
    """
    base = (
        config if isinstance(config, DracoConfig) else load_config(str(config) if isinstance(config, Path) else config)
    )
    model = _configured_model(base.judge) if model is None else model
    told = {"model": model, "api_base": api_base, "api_key_env": api_key_env, "context_tokens": context}
    told = {name: value for name, value in told.items() if value is not None}
    checked = load_config({"judge": told}).judge
    judge = base.judge.model_copy(
        update={
            **{name: getattr(checked, name) for name in told},
            "rule_judge": RuleJudgeConfig(),
            "self_judge": SelfJudgeConfig(),
            "limits": base.judge.limits if budget is None else _budget(base.judge.limits, budget),
            "cache": base.judge.cache or (None if out is None else (out / "judge_cache").resolve()),
        }
    )
    judge = _served_here(judge, ray=ray)
    check_budget(judge, model)
    of_run = base.updated(model={"path": "traces"}).model_copy(
        update={"judge": judge, "setting": TRACES_SETTING, "run": RunConfig(root=base.run.root, trackers=())}
    )
    static = None
    if rubric is not None or base.algorithm.rubric == "static":
        ships = base.algorithm.static_rubric or STATIC_RUBRIC
        static = ships if rubric is None or str(rubric) == STATIC else Path(rubric).resolve()
        of_run = of_run.updated(algorithm={"rubric": "static", "static_rubric": static})
        if "skip_useless_credit_calls" not in base.algorithm.model_fields_set:
            # Users want to know which steps are to blame even if all traces get the same reward.
            of_run = of_run.updated(algorithm={"skip_useless_credit_calls": False})
    known = judge_context_length(judge) or model_limit(model, "max_input_tokens")
    tokens = context or known or DEFAULT_CONTEXT
    if tokens <= judge.max_tokens:
        raise ConfigError(
            f"--context {tokens}: a reply alone may have judge.max_tokens={judge.max_tokens} tokens; expected more"
        )
    prompts = load_prompts(judge.prompts, examples=examples_of(judge))
    return Plan(
        config=of_run,
        prompts=prompts,
        context_tokens=tokens,
        context_known=bool(context or known),
        rubric=load_static_rubric(static) if static is not None else None,
        batch=batch,
    )


def _configured_model(judge: JudgeConfig) -> str:
    if judge.self_judge.enabled or judge.rule_judge.start:
        switch = "self_judge.enabled" if judge.self_judge.enabled else "rule_judge.start"
        raise ConfigError(
            f"judge.{switch}=true: this judge exists only in training runs; set a judge model to judge traces"
        )
    if "model" not in judge.model_fields_set:
        raise ConfigError("no judge given; expected a model, or judge.model in the configuration")
    return judge.model


def _served_here(judge: JudgeConfig, *, ray: bool) -> JudgeConfig:
    """The configuration with ``judge.local`` enabled if the cluster serves the judge, otherwise disabled."""
    own = judge.model.startswith(LOCAL_PROVIDER) and not (judge.api_base or os.environ.get("HOSTED_VLLM_API_BASE"))
    if own and not ray:
        raise ConfigError(
            f"judge {judge.model}: no endpoint given; add --api-base, or --ray to serve the model on a cluster"
        )
    return judge.model_copy(update={"local": judge.local.model_copy(update={"enabled": own})})


def _budget(limits: JudgeLimits, budget: float) -> JudgeLimits:
    if not math.isfinite(budget) or budget < 0:
        raise ConfigError(f"budget {budget:g}: expected 0 dollars or more")
    return limits.model_copy(update={"dollars": budget})


class MeteredJudge:
    """A `Completer` that counts its calls and those of the other judges."""

    def __init__(self, complete: Completer | None = None) -> None:
        """``complete``: the completer that answers; None: it is set later."""
        self.complete = None if complete is None else self.over(complete)
        self.open_other: Callable[[JudgeConfig], Completer] = lambda _: self
        """Opens the completer of another judge."""
        self.replies: ReplyCache | None = None
        """The reply store."""
        self.done = self.replayed = self.failed = 0
        self.dollars = 0.0
        self.limiter = Limiter(JudgeLimits())
        """Set by `open_judge`; its ``spent``, unlike ``dollars``, includes start-up checks and unanswered requests."""
        self.checked = False
        """Whether the judges have answered once. If so, they are not checked again: calls wait for an outage to end."""
        self.waits_for = ""
        """Description of servers that are still loading."""
        self.begun: dict[int, float] = {}
        self.numbers = itertools.count()

    def over(self, complete: Completer) -> Completer:
        """A completer that calls ``complete`` and counts its calls here."""
        return _Counted(self, complete)

    @property
    def under_way(self) -> int:
        """Number of calls in flight."""
        return len(self.begun)

    @property
    def oldest(self) -> float:
        """Age of the oldest call in flight, in seconds."""
        return time.monotonic() - min(self.begun.values(), default=time.monotonic())

    async def __call__(self, request: Request) -> Completion:
        """See `Completer`."""
        assert self.complete is not None
        return await self.complete(request)

    async def forget(self, request: Request) -> None:
        """See `Completer`."""
        assert self.complete is not None
        await self.complete.forget(request)

    async def check(self) -> None:
        """See `Completer`."""
        assert self.complete is not None
        await self.complete.check()


@dataclass(frozen=True, slots=True)
class _Counted:
    meter: MeteredJudge
    complete: Completer

    async def __call__(self, request: Request) -> Completion:
        number = next(self.meter.numbers)
        self.meter.begun[number] = time.monotonic()
        try:
            completion = await self.complete(request)
        finally:
            del self.meter.begun[number]
        self.meter.done += 1
        self.meter.replayed += completion.requests == 0
        self.meter.failed += completion.error is not None
        self.meter.dollars += completion.dollars
        return completion

    async def forget(self, request: Request) -> None:
        await self.complete.forget(request)

    async def check(self) -> None:
        await self.complete.check()


@dataclass(frozen=True, slots=True)
class _Function:
    """A `Completer` that answers requests with the function ``complete``."""

    complete: Callable[[Request], Awaitable[Completion]]

    async def __call__(self, request: Request) -> Completion:
        return await self.complete(request)

    async def forget(self, request: Request) -> None:
        """Do nothing: no reply is stored."""

    async def check(self) -> None:
        """Do nothing: the first request shows whether the function answers."""


def open_judge(settled: Plan, *, final: bool = True) -> MeteredJudge:
    """Open the judge model over LiteLLM, with its limits and budget, of which earlier processes may have spent a part.

    Args:
        settled: the plan.
        final: whether the first request that the budget refuses ends all work, as in `LimiterQueue`; False if several
            calls of `judge` share the judge, so that a refusal ends only one of them.

    Raises:
        StoreError: replies cannot be stored.
    """
    judge = settled.config.judge
    outage = JudgeHealth(
        max_seconds=judge.max_outage_seconds,
        max_backoff_seconds=judge.max_backoff_seconds,
        who=f"judge {judge.model} at {endpoint_address(judge)}",
    )
    book = CostLedger(settled={}, under_way={}) if judge.cache is None else read_cost_ledger(judge.cache)
    # Unanswered requests of ended processes may have been billed; those in batches are settled when their batch ends.
    limiter = Limiter(judge.limits, spent=book.dollars, booked=book.under_way, outage=outage)
    cache = None if judge.cache is None else ReplyCache(judge.cache)
    line = LimiterQueue(limiter, final=final)
    meter = MeteredJudge()
    meter.limiter = limiter

    def open_one(judge: JudgeConfig) -> Completer:
        if settled.batch:
            from draco_ray.traces.batch import BatchClient

            return meter.over(BatchClient(judge, cache, line))
        configured = (judge.model, judge.api_base) == (settled.config.judge.model, settled.config.judge.api_base)
        return meter.over(open_model(judge, cache, leases=line, endpoint_counts=not configured))

    opened: dict[object, Completer] = {}

    def open_other(judge: JudgeConfig) -> Completer:
        # One client for all groups, so that its requests in flight are limited.
        key = (judge.model, judge.api_base, judge.api_key_env)
        if key not in opened:
            opened[key] = open_one(judge)
        return opened[key]

    meter.open_other, meter.replies = open_other, cache
    meter.complete = with_fallbacks(judge, open_one)
    return meter


def make_trace_judge(settled: Plan, meter: MeteredJudge) -> JudgeOf:
    """A function that returns, for some traces, the plan's judge of these traces.

    If the plan states no facts about the agents' environment, the judge's prompts state facts derived from the traces.
    """
    config, prompts = settled.told.judge, prompts_of(settled.config.judge)

    def about(traces: Sequence[Trace]) -> Ask:
        told = prompts if prompts.facts else replace(prompts, facts=environment_facts(traces))
        return partial(ask_phase, panel_judge(config, told, meter, meter.open_other, meter.replies))

    return about


async def check_judges(settled: Plan, meter: MeteredJudge) -> None:
    """Make sure, once, that the judge, its jury and the strong judge answer.

    Raises:
        JudgeUnavailable: one of them does not.
    """
    if not meter.checked:
        await panel_judge(settled.config.judge, settled.prompts, meter, meter.open_other).check()
        meter.checked = True


async def _judge_groups(
    settled: Plan,
    meter: MeteredJudge,
    groups: Iterable[tuple[int, TraceGroup]],
    keep: Callable[[GroupJudgement], Awaitable[None]],
    ask: Ask | None = None,
) -> None:
    """Judge groups, ``settled.at_once`` at a time, and pass each to ``keep`` as soon as it is judged."""
    about: JudgeOf = make_trace_judge(settled, meter) if ask is None else lambda _: ask
    config, waiting = settled.told, iter(groups)

    async def work() -> None:
        for index, group in waiting:
            await keep(await judge_group(index, group, config, settled.rubric, about))

    await gather_or_cancel(work() for _ in range(settled.at_once))


async def judge_run(settled: Plan, meter: MeteredJudge, run: JudgingRun, ask: Ask | None = None) -> None:
    """Judge the pending groups of a run directory.

    Raises:
        JudgeUnavailable: the judge does not answer; BudgetSpent if the budget is spent.
        StoreError: a result cannot be written.
    """
    pending = run.pending()
    if not pending:
        return
    if ask is None:
        await check_judges(settled, meter)

    async def keep(state: GroupJudgement) -> None:
        writing = asyncio.create_task(asyncio.to_thread(run.keep, state))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # Store a finished group even if the others are cancelled.
            await writing
            raise

    await _judge_groups(settled, meter, pending, keep, ask)


async def judge(
    groups: Sequence[TraceGroup],
    model: str | None = None,
    *,
    budget: float | None = None,
    rubric: str | Path | None = None,
    out: str | Path | None = None,
    api_base: str | None = None,
    api_key_env: str | None = None,
    context: int | None = None,
    config: ConfigSource | None = None,
    batch: bool = False,
    complete: Callable[[Request], Awaitable[Completion]] | Completer | None = None,
) -> list[JudgedGroup]:
    """Judge traces: rubric, verdicts with evidence, the steps responsible, rewards and step advantages.

    Args:
        groups: groups from `draco_ray.load_traces`.
        model: LiteLLM's name of the judge, such as ``openai/gpt-5.4``; None: the configuration's.
        budget: maximum cost in dollars; judging stops before it is exceeded.
        rubric: a YAML file of criteria, or ``static`` for the built-in one, which suits AppWorld's code agents, instead
            of one that the judge writes.
        out: run directory for all results. Repeating the same call resumes there and pays for nothing twice.
        api_base: endpoint of the judge; None: the configuration's, else the provider's.
        api_key_env: environment variable with the key; None: the configuration's, else ``<PROVIDER>_API_KEY``.
        context: context length in tokens; None: the configuration's, else LiteLLM's figure, else `DEFAULT_CONTEXT`.
        config: source of ``judge`` and ``algorithm``, which the other arguments override: a configuration, a nested
            mapping (``{"judge": {"model": ...}}``), or the name of a YAML file or preset; None: the defaults.
        batch: use the provider's batch API: half the price, and up to a day for each of five phases.
        complete: function that answers requests instead of LiteLLM.

    Returns: one result per group, in order; ``error`` says why a group or a trace has no reward.

    Raises:
        ConfigError: an argument or a setting cannot be used.
        JudgeUnavailable: the judge does not answer; BudgetSpent if the budget is spent. Finished groups are in ``out``
            then.
    """
    if not isinstance(groups, Sequence) or not all(isinstance(each, TraceGroup) for each in groups):
        raise ConfigError(f"groups: found {type(groups).__name__}; expected a list of groups, as load_traces returns")
    if batch and complete is not None:
        raise ConfigError("batch: cannot be used with complete, which answers instead of the provider; omit one")
    folder = None if out is None else Path(out)
    settled = plan(
        model,
        config=config,
        budget=budget,
        api_base=api_base,
        api_key_env=api_key_env,
        rubric=rubric,
        context=context,
        out=folder,
        batch=batch,
    )

    if settled.config.judge.model == RULE_JUDGE and complete is None:
        raise ConfigError(
            "judge rules: only the command draco judge has this offline judge; expected a LiteLLM model such as "
            "openai/gpt-5.4, files:DIR, or complete"
        )

    def opened() -> MeteredJudge:
        if complete is None:
            return open_judge(settled)
        if isinstance(complete, MeteredJudge):
            return complete
        return MeteredJudge(complete if isinstance(complete, Completer) else _Function(complete))

    if folder is not None:
        with JudgingRun.open(folder, settled.config, groups) as run:
            began = time.monotonic()
            try:
                await judge_run(settled, opened(), run)
            finally:
                run.finish(time.monotonic() - began)
            return [*run.results()]
    found: dict[int, JudgedGroup] = {}

    async def keep(state: GroupJudgement) -> None:
        found[state.index] = judged_group(state)

    meter = opened()
    if complete is None and groups:
        await check_judges(settled, meter)
    await _judge_groups(settled, meter, enumerate(groups), keep)
    return [found[index] for index in range(len(groups))]


class JudgeOptions(TypedDict, total=False):
    """Keyword arguments of `judge`, documented there."""

    budget: float | None
    rubric: str | Path | None
    out: str | Path | None
    api_base: str | None
    api_key_env: str | None
    context: int | None
    config: ConfigSource | None
    batch: bool
    complete: Callable[[Request], Awaitable[Completion]] | Completer | None


def judge_sync(
    groups: Sequence[TraceGroup], model: str | None = None, **options: Unpack[JudgeOptions]
) -> list[JudgedGroup]:
    """`judge` for synchronous code, including notebooks, with the same arguments and errors."""

    def run() -> list[JudgedGroup]:
        return asyncio.run(judge(groups, model, **options))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    # A notebook already runs an event loop in this thread.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(run).result()


__all__ = ["JudgeOptions", "MeteredJudge", "Plan", "judge", "judge_run", "judge_sync", "open_judge", "plan"]
