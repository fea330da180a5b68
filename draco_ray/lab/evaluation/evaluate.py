"""`draco evaluate`: play every task of a split and record the environment's verdicts; can resume after an interrupt.

plan ──► missing (task, run) pairs ──► environment slots ──► results/<measurement>.jsonl, appworld/
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from draco_ray.config.schema import AgentConfig, DracoConfig, Price
from draco_ray.engine.actor import EngineClient, start_policy_engines
from draco_ray.engine.canary import Scorer
from draco_ray.engine.fleet import EngineFleet
from draco_ray.engine.model_directory import load_tokenizer
from draco_ray.environments.base import Environment, make_environment
from draco_ray.errors import BudgetSpent, CanaryFailed, JudgeUnavailable
from draco_ray.judging.endpoint import describe_judge
from draco_ray.judging.pricing import check_budget, find_price, known_price, reply_cost
from draco_ray.judging.tokens import model_limit
from draco_ray.lab.evaluation.api_policy import ApiPolicies, start_evaluation_limiter
from draco_ray.lab.evaluation.appworld import AppWorldOutputs
from draco_ray.lab.evaluation.policies import Checkpoint, EvaluatedPolicy, load_adapter, lora_rank, outcome_settings
from draco_ray.lab.evaluation.results import EvaluationDirectory, EvaluationPlan, RolloutResult
from draco_ray.lab.evaluation.setting import SplitResult, aggregate
from draco_ray.records import Trajectory, Usage, lost_evaluation
from draco_ray.rollout.pool import RolloutPool, RolloutWorkers
from draco_ray.rollout.tokens import EnginePolicies
from draco_ray.rollout.worker import EPISODES, Evaluated, rollout_starter
from draco_ray.sandbox.world.build import MANIFEST
from draco_ray.terminal import PlainConsole
from draco_ray.training.cluster import release_start_lock
from draco_ray.training.session import (
    await_startup,
    checked_model,
    ray_session,
    say_cut_prompts,
    task_prompts,
    unwrap_ray_error,
)
from draco_ray.training.watchdog import PendingOperations, cancel_on_loss
from draco_ray.workers.elastic import fixed_workers
from draco_ray.workers.tasks import gather_or_cancel

APPWORLD = "appworld"
"""The benchmark for which rollouts are also written in the layout of its own tools."""
_PROBE_TOKENS = 256


def evaluate_policy(
    policy: EvaluatedPolicy,
    config: DracoConfig,
    *,
    split: str,
    runs: int,
    out: Path,
    label: str | None = None,
    retry_errors: bool = False,
    max_lost_share: float = 1.0,
) -> SplitResult:
    """Measure a policy on a split; rollouts that an earlier call with the same arguments finished are not repeated.

    Args:
        policy: weights or API model, see `draco_ray.lab.evaluation.policies`.
        config: everything except the policy; ``data.eval_tasks`` limits the split to its first tasks.
        split: split of the environment's tasks.
        runs: independent rollouts per task.
        out: evaluation directory.
        label: the row's name in tables; None uses the policy's label.
        retry_errors: repeat lost rollouts (crashed worlds, an endpoint that did not answer).
        max_lost_share: stop as soon as more than this share of all rollouts is lost.

    Raises:
        ConfigError: ``out`` contains another evaluation, or the policy or the data cannot be used.
        TooManyLost: more than ``max_lost_share`` are lost; finished rollouts are in ``out``.
        DracoError: engines, environments or the API fail permanently; finished rollouts are in ``out``.
    """
    console = PlainConsole()
    config, environment, plan = plan_policy(policy, config, split=split, runs=runs, label=label)
    directory = EvaluationDirectory.begin(out, plan)
    with directory.claimed():
        if retry_errors and (dropped := directory.drop_lost()):
            console.print(f"{out}: {dropped} lost rollouts will be repeated")
        if found := directory.finished():
            console.print(f"{out}: {found} of {directory.total} rollouts are already finished")
        directory.check_lost(max_lost_share)
        if found < directory.total:
            evaluator = _Evaluator(config, policy, directory, environment, console, max_lost_share)
            with _stopped_plainly(directory, console), ray_session(_needed(config, policy), console):
                asyncio.run(evaluator.run())
    if lost := directory.lost():
        console.print(
            f"{len(lost)} of {directory.total} rollouts were lost and count as failures (the last: {lost[-1].error}); "
            "to repeat them, add --retry-errors to the same command"
        )
    # Do not use `read_seeds` here: it reads the summary, which is not written yet.
    result = aggregate(directory.plan, [list(directory.complete_results().values())])
    directory.write_summary(summary(result))
    return result


def plan_policy(
    policy: EvaluatedPolicy,
    config: DracoConfig,
    *,
    split: str,
    runs: int,
    label: str | None = None,
) -> tuple[DracoConfig, Environment, EvaluationPlan]:
    """The checked configuration, the environment and the plan of `evaluate_policy` for the same arguments.

    Raises:
        ConfigError: the policy or the data cannot be used.
    """
    if policy.api_model is None:
        config = checked_model(config)
    else:
        check_budget(config.judge, policy.api_model)
    environment = make_environment(config.environment, config.data)
    whole = environment.tasks(split)
    tasks = whole[: config.data.eval_tasks]
    settings = outcome_settings(config, policy)
    if policy.api_model is None:
        environment.check_model(config.model, config.agent)
    else:
        settings |= {f"api.{key}": value for key, value in asdict(policy.api).items() if key != "api_key_env"}
    plan = EvaluationPlan(
        benchmark=config.environment.use.rpartition(":")[2],
        split=split,
        label=label or policy.label,
        policy=policy.api_model or policy.name,
        runs=runs,
        measurements=tuple(checkpoint.name for checkpoint in policy.checkpoints),
        tasks={task: environment.difficulty(task) for task in tasks},
        world=environment.digest(tasks),
        generated=(config.data.root / MANIFEST).is_file(),
        split_size=len(whole),
        scenarios=any(environment.task(task).group for task in tasks),
        settings=settings,
    )
    return config, environment, plan


def summary(result: SplitResult) -> dict[str, Any]:
    """The content of ``summary.json``: the numbers of the tables under plain names."""
    # Leave out the measures for comparisons: they can be recomputed from the results.
    numbers = asdict(replace(result, measures={}))
    del numbers["measures"]
    plan, shares = result.plan, result.terminations
    numbers["plan"] = plan.model_dump(include={"benchmark", "split", "policy", "runs", "measurements", "generated"})
    numbers["plan"] |= {"tasks": len(plan.tasks), "split_size": plan.whole_split}
    numbers["terminations"] = shares and {mode.value: share for mode, share in shares.items()}
    numbers["dollars_per_task"] = result.dollars_per_task
    return numbers


@dataclass
class _Evaluator:
    """The actors of one evaluation and its loop over checkpoints."""

    _config: DracoConfig
    _policy: EvaluatedPolicy
    _directory: EvaluationDirectory
    _environment: Environment
    _console: Console
    _max_lost_share: float
    _fleet: EngineFleet | None = None
    _workers: RolloutWorkers | None = None
    _limiter: object | None = None
    _price: Price | None = None
    _outputs: AppWorldOutputs | None = None
    """Writes the outputs that `draco reevaluate` and AppWorld's own tools read."""

    def __post_init__(self) -> None:
        # Unique, as part of actor names and of the adapters' folder: another evaluation may run at the same time.
        self._name = f"evaluation-{os.getpid()}-{int(time.time())}"
        plan = self._directory.plan
        if plan.benchmark == APPWORLD:
            self._outputs = AppWorldOutputs(self._directory.path / "appworld", self._config.data.root, plan.tasks)

    async def run(self) -> None:
        """Play the missing rollouts, one checkpoint after the other."""
        try:
            await self._start()
            for checkpoint in self._policy.checkpoints:
                if missing := self._directory.missing(checkpoint.name):
                    failing = [] if self._fleet is None else [self._fleet.failure()]
                    await cancel_on_loss(self._measure(checkpoint, missing), *failing)
        finally:
            await self._stop()

    async def _start(self) -> None:
        config = self._config
        if self._policy.api_model is not None:
            policies: EnginePolicies | ApiPolicies = self._api_policies(self._policy.api_model)
        else:
            say_cut_prompts(config, self._environment, [*self._directory.plan.tasks], self._console)
            adapters = [each.adapter for each in self._policy.checkpoints if each.adapter is not None]
            self._fleet = EngineFleet(
                start_policy_engines(
                    config.engine,
                    config.model,
                    max_model_len=config.agent.max_prompt_length + config.agent.max_response_length,
                    lora_rank=max(map(lora_rank, adapters), default=config.learner.lora_rank),
                    seed=config.seed,
                    run_name=self._name,
                ),
                config.engine,
            )
            number = config.engine.engines
            clients = [EngineClient(index, self._name, number) for index in range(number)]
            self._price = find_price(config.model.path, config.judge.prices)
            policies = EnginePolicies(
                samplers=clients, tokenizer=load_tokenizer(config.model.path, config.model.chat_template)
            )
        start = rollout_starter(
            policies,
            agent=config.agent,
            environment=config.environment,
            data=config.data,
            ground_truth=True,
            run_name=self._name,
            kind="EvaluationWorker",
            kept=self._directory.path.resolve() / EPISODES,
        )
        self._workers = RolloutWorkers(start, config.environment)
        self._workers.open()
        if self._fleet is not None:
            pending = PendingOperations()
            with pending.of("the engines' start"):
                await await_startup(self._fleet.start(), config, pending, self._console)
        release_start_lock()

    def _api_policies(self, model: str) -> ApiPolicies:
        config = self._config
        client = config.judge.model_copy(
            update={
                "model": model,
                **asdict(self._policy.api),
                "max_tokens": max_tokens_per_turn(model, config.agent),
                "extra_body": {},
                "reasoning_effort": None,
                # Do not wait for an outage to end: lost rollouts can be retried later.
                "max_outage_seconds": 0.0,
                "cache": None,
            }
        )
        self._console.print(f"policy: {describe_judge(client)}")
        # Keep the handle: the actor lives as long as its handle.
        self._limiter, leases = start_evaluation_limiter(client, self._directory.path, self._name) or (None, None)
        return ApiPolicies(client=client, priced=known_price(config.judge, model) is not None, leases=leases)

    async def _measure(self, checkpoint: Checkpoint, missing: Sequence[tuple[str, int]]) -> None:
        if checkpoint.adapter is not None:
            await self._load(checkpoint)
        plan = self._directory.plan
        retries = self._config.environment.rollout_retries
        assert self._workers is not None
        policies = fixed_workers(1, self._config.environment.slots) if self._fleet is None else self._fleet.workers
        pool = RolloutPool(self._workers, policies, retries, self._config.seed)
        total = len(plan.tasks) * plan.runs
        title = f"{checkpoint.name} on {plan.split}"
        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
        terminal = self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=not terminal) as progress:
            bar = progress.add_task(title, total=total, completed=total - len(missing))
            solved = played = 0

            async def one(task_id: str, run: int, priority: int) -> None:
                nonlocal solved, played
                result = await self._play(checkpoint, task_id, run, priority, pool)
                self._directory.add(checkpoint.name, result)
                if result.error is not None:
                    self._directory.check_lost(self._max_lost_share)
                solved, played = solved + result.evaluation.success, played + 1
                progress.update(bar, advance=1, description=f"{title}, {solved} of {played} solved")

            await gather_or_cancel(one(task, run, index) for index, (task, run) in enumerate(missing))
        results = self._directory.results(checkpoint.name)
        rate = sum(result.evaluation.success for result in results) / len(results)
        self._console.print(f"{checkpoint.name}: TGC {rate:.1%} ({len(plan.tasks)} tasks x {plan.runs})")

    async def _play(
        self, checkpoint: Checkpoint, task_id: str, run: int, priority: int, pool: RolloutPool
    ) -> RolloutResult:
        """Play one (task, run), and store its trajectory and world."""
        began = time.monotonic()
        group = f"{checkpoint.name}/{task_id}"
        played = await pool.run(task_id, group, run, step=checkpoint.version, priority=priority)
        usage = played.usage if self._price is None else priced(played.usage, self._price)
        seconds = time.monotonic() - began
        evaluation = lost_evaluation(self._environment.task(task_id), run)
        saved: Mapping[str, str] = {}
        trajectory: Trajectory | None = None
        if played.member is not None:
            evaluated: Evaluated = await played.member.evaluation
            evaluation, saved = evaluated.evaluation, evaluated.saved
            trajectory = await played.member.trajectory
        if self._outputs is not None:
            self._outputs.write(checkpoint.name, run, task_id, saved)
        if trajectory is not None:
            self._directory.write_trajectory(checkpoint.name, trajectory)
        error = played.error if played.member is None else None
        return RolloutResult(evaluation=evaluation, usage=usage, seconds=seconds, attempts=played.attempts, error=error)

    async def _load(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint into every engine and check that it is in use."""
        assert self._fleet is not None
        adapter = load_adapter(checkpoint)
        await self._fleet.load(ray.put(adapter))
        # If all lora_B factors are zero, as in an untrained adapter, the adapter has no effect to check.
        trained = any(np.any(values) for name, values in adapter.tensors.items() if "lora_B" in name)
        if not trained:
            return
        task = next(iter(self._directory.plan.tasks))
        prompts, chat = task_prompts(self._config, self._environment, [task])
        probe = chat.prompt(prompts[task])[-_PROBE_TOKENS:]

        async def live(scorer: Scorer) -> None:
            on = await scorer.logprobs(probe, adapter=True)
            off = await scorer.logprobs(probe, adapter=False)
            if on == off:
                raise CanaryFailed(
                    f"{scorer.name}: the adapter of {checkpoint.name} has no effect: log-probs with and without it "
                    "are equal; check that it belongs to this model"
                )

        await self._fleet.prove(live)

    async def _stop(self) -> None:
        stops = [part.stop() for part in (self._fleet, self._workers) if part is not None]
        with contextlib.suppress(Exception):
            await asyncio.wait_for(asyncio.gather(*stops), timeout=20)


def max_tokens_per_turn(model: str, agent: AgentConfig) -> int:
    """Maximum tokens per turn of an API model: the agent's limit, or the model's if LiteLLM knows a lower one."""
    most = agent.max_turn_tokens or agent.max_response_length
    return min(most, model_limit(model, "max_output_tokens") or most)


def _needed(config: DracoConfig, policy: EvaluatedPolicy) -> DracoConfig:
    """What Ray must have room for: engines and slots, but no learner and no judge."""
    engine = {} if policy.api_model is None else {"gpus_per_engine": 0.0, "cpus_per_engine": 0.0}
    return config.updated(
        algorithm={"reward": "outcome"},
        engine=engine,
        learner={"gpus_per_worker": 0.0, "cpus_per_worker": 0.0},
        train={"evaluate_before_after": False},
    )


@contextlib.contextmanager
def _stopped_plainly(directory: EvaluationDirectory, console: Console) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        console.print(
            f"stopped; {directory.finished()} of {directory.total} rollouts are in {directory.path}; run the same "
            "command again to continue"
        )
        raise SystemExit(130) from None
    except Exception as error:
        plain = unwrap_ray_error(error)
        if plain is None:
            raise
        if isinstance(plain, JudgeUnavailable):
            again = "the command with a higher budget" if isinstance(plain, BudgetSpent) else "the same command again"
            raise type(plain)(
                f"evaluation {directory.path}: {plain}; {directory.finished()} of {directory.total} rollouts are "
                f"kept; run {again} to continue"
            ) from None
        raise plain from None


def priced(usage: Usage, price: Price) -> Usage:
    """The usage with its cost at that price."""
    return replace(usage, dollars=reply_cost(price, usage.input_tokens, usage.cached_tokens, usage.output_tokens))
