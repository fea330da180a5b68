"""`draco evaluate --benchmark appworld`: play every task of a split, keep what AppWorld's evaluator says, go on later.

plan ──► (task, run) pairs that are missing ──► environment slots ──► results/<measurement>.jsonl, appworld/
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from draco_ray.config.schema import AgentConfig, DracoConfig
from draco_ray.engine.actor import EngineClient, EngineFleet, start_policy_engines
from draco_ray.environments.appworld.data_root import load_split, load_task
from draco_ray.errors import BudgetSpent, CanaryFailed, ConfigError, JudgeUnavailable
from draco_ray.judging.model_limits import model_limit
from draco_ray.judging.pricing import check_budget, find_price, known_price
from draco_ray.lab.evaluation.appworld_outputs import AppWorldOutputs
from draco_ray.lab.evaluation.limiter_actor import start_evaluation_limiter
from draco_ray.lab.evaluation.policies import Checkpoint, Policy, deciding_settings, load_adapter, lora_rank
from draco_ray.lab.evaluation.results import EvaluationDirectory, Plan, RolloutResult, Usage, lost_rollout
from draco_ray.lab.evaluation.setting import SplitResult, read_split
from draco_ray.lab.evaluation.worker import ApiPolicy, LocalPolicy, Played, PlayRequest, start_evaluation_workers
from draco_ray.rollout.pool import SlotQueue
from draco_ray.sandbox.world.build import MANIFEST
from draco_ray.training.cluster import connect
from draco_ray.training.session import checked_model, plain_error

BENCHMARK = "appworld"
_PROBE_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOptions:
    """How an API model is reached; the rest (timeouts, retries, prices, limits) is ``judge.*`` of the configuration."""

    api_base: str | None = None
    api_key_env: str | None = None
    """Variable that holds the key; None: ``<PROVIDER>_API_KEY``."""
    temperature: float | None = None
    """None leaves it to the provider: some models refuse any other."""


def evaluate_appworld(
    policy: Policy,
    config: DracoConfig,
    *,
    split: str,
    runs: int,
    out: Path,
    label: str | None = None,
    api: ApiOptions | None = None,
    retry_errors: bool = False,
    console: Console | None = None,
) -> SplitResult:
    """Measure a policy on a split; what was measured there before by the same command is not played again.

    Args:
        policy: weights or API model, see `draco_ray.lab.evaluation.policies`.
        config: everything but the policy; ``data.eval_tasks`` limits the split to its first tasks.
        split: AppWorld dataset name.
        runs: independent rollouts per task.
        out: evaluation directory.
        label: the row's name in tables; None is the policy's.
        api: for an API model.
        retry_errors: play lost rollouts again (crashed worlds, an endpoint that did not answer).

    Raises:
        ConfigError: ``out`` holds another evaluation, or the policy or the data cannot be used.
        DracoError: engines, environments or the API fail for good; finished rollouts are in ``out``.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    if policy.api_model is None:
        config = checked_model(config)
    whole = load_split(config.data.root, split)
    tasks = whole[: config.data.eval_tasks]
    settings = deciding_settings(config, policy)
    if policy.api_model is not None:
        check_budget(config.judge, policy.api_model)
        settings |= {f"api.{key}": value for key, value in asdict(api or ApiOptions()).items() if key != "api_key_env"}
    plan = Plan(
        benchmark=BENCHMARK,
        split=split,
        label=label or policy.label,
        policy=policy.api_model or policy.name,
        runs=runs,
        measurements=tuple(checkpoint.name for checkpoint in policy.checkpoints),
        tasks={task: _difficulty(config.data.root, task) for task in tasks},
        world=world_digest(config.data.root, tasks),
        generated=(config.data.root / MANIFEST).is_file(),
        split_size=len(whole),
        settings=settings,
    )
    directory = EvaluationDirectory.begin(out, plan)
    with directory.claimed():
        if retry_errors and (dropped := directory.drop_lost()):
            console.print(f"{out}: {dropped} lost rollouts are played again")
        if found := directory.finished():
            console.print(f"{out}: {found} of {directory.total} rollouts are there already")
        if found < directory.total:
            with _stopped_plainly(directory, console), _ray(config, policy):
                asyncio.run(_Evaluator(config, policy, api or ApiOptions(), directory, console).run())
    if lost := directory.lost():
        console.print(
            f"{len(lost)} of {directory.total} rollouts were lost and count as failures (the last: {lost[-1].error}); "
            "the same command with --retry-errors plays them again"
        )
    result = read_split(directory)
    directory.write_summary(summary(result))
    return result


def summary(result: SplitResult) -> dict[str, Any]:
    """``summary.json``: the numbers of the tables under plain names."""
    # What comparisons need is in the results themselves.
    numbers = asdict(replace(result, measures={}))
    del numbers["measures"]
    plan = result.plan
    numbers["plan"] = {
        "benchmark": plan.benchmark,
        "split": plan.split,
        "policy": plan.policy,
        "runs": plan.runs,
        "measurements": plan.measurements,
        "tasks": len(plan.tasks),
        "split_size": plan.whole_split,
        "generated": plan.generated,
    }
    shares = result.terminations
    numbers["terminations"] = shares and {mode.value: share for mode, share in shares.items()}
    numbers["dollars_per_task"] = result.dollars_per_task
    return numbers


class _Evaluator:
    """The actors of one evaluation and its loop over checkpoints."""

    def __init__(
        self,
        config: DracoConfig,
        policy: Policy,
        api: ApiOptions,
        directory: EvaluationDirectory,
        console: Console,
    ) -> None:
        self._config = config
        self._policy = policy
        self._api = api
        self._directory = directory
        self._console = console
        # Part of actors' names and of the adapters' folder: another evaluation may run beside this one.
        self._name = f"evaluation-{os.getpid()}-{int(time.time())}"
        self._fleet: EngineFleet | None = None
        self._clients: list[EngineClient] = []
        self._workers: list[Any] = []
        self._limiter: object | None = None
        self._outputs = AppWorldOutputs(directory.path / "appworld", config.data.root, directory.plan.tasks)

    async def run(self) -> None:
        """Play what is missing, one checkpoint after the other."""
        try:
            await self._start()
            for checkpoint in self._policy.checkpoints:
                missing = self._directory.missing(checkpoint.name)
                if missing:
                    await self._until_engines_fail(self._measure(checkpoint, missing))
        finally:
            await self._stop()

    async def _start(self) -> None:
        config = self._config
        if self._policy.api_model is not None:
            policy: LocalPolicy | ApiPolicy = self._api_policy(self._policy.api_model)
        else:
            ranks = [rank for checkpoint in self._policy.checkpoints if (rank := lora_rank(checkpoint)) is not None]
            self._fleet = EngineFleet(
                start_policy_engines(
                    config.engine,
                    config.model,
                    max_model_len=config.agent.max_prompt_length + config.agent.max_response_length,
                    lora_rank=max(ranks, default=config.learner.lora_rank),
                    seed=config.seed,
                    run_name=self._name,
                )
            )
            self._clients = [EngineClient(index, self._name) for index in range(config.engine.engines)]
            price = find_price(config.model.path, config.judge.prices)
            policy = LocalPolicy(samplers=self._clients, model_path=config.model.path, price=price)
        self._workers = start_evaluation_workers(
            policy,
            data_root=config.data.root.resolve(),
            agent=config.agent,
            environment=config.environment,
            run_name=self._name,
        )
        if self._fleet is not None:
            await self._fleet.start()

    def _api_policy(self, model: str) -> ApiPolicy:
        config, api = self._config, self._api
        provider = model.split("/", 1)[0] if "/" in model else "openai"
        client = config.judge.model_copy(
            update={
                "model": model,
                "api_base": api.api_base,
                "api_key_env": api.api_key_env or f"{provider.upper()}_API_KEY",
                "temperature": api.temperature,
                "max_tokens": turn_tokens(model, config.agent),
                "extra_body": {},
                "reasoning_effort": None,
                # A rollout that is lost here can be played again.
                "max_outage_seconds": 0.0,
                "cache": None,
            }
        )
        limiter = start_evaluation_limiter(client, self._directory.path, self._name)
        leases = None
        if limiter is not None:
            # The actor lives for as long as its handle.
            self._limiter, leases = limiter
        return ApiPolicy(client=client, priced=known_price(config.judge, model) is not None, leases=leases)

    async def _until_engines_fail(self, work: Awaitable[None]) -> None:
        """Await ``work``, or raise what ended the engines for good."""
        if self._fleet is None:
            await work
            return
        playing, failing = asyncio.ensure_future(work), asyncio.ensure_future(self._fleet.failure())
        try:
            await asyncio.wait({playing, failing}, return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                playing.result()
            else:
                failing.result()
        finally:
            for each in (playing, failing):
                each.cancel()
            await asyncio.gather(playing, failing, return_exceptions=True)

    async def _measure(self, checkpoint: Checkpoint, missing: Sequence[tuple[str, int]]) -> None:
        if checkpoint.adapter is not None:
            await self._load(checkpoint)
        plan = self._directory.plan
        slots: SlotQueue[Any] = SlotQueue([worker for worker, many in self._workers for _ in range(many)], 1)
        load = [0] * max(len(self._clients), 1)
        total = len(plan.tasks) * plan.runs
        with _progress(self._console) as progress:
            bar = progress.add_task(
                f"{checkpoint.name} on {plan.split}", total=total, completed=total - len(missing), solved=0, played=0
            )
            solved = played = 0

            async def one(task_id: str, run: int, priority: int) -> None:
                nonlocal solved, played
                result = await self._play(checkpoint, task_id, run, priority, slots, load)
                self._directory.add(checkpoint.name, result)
                solved, played = solved + result.evaluation.success, played + 1
                progress.update(bar, advance=1, solved=solved, played=played)

            await _gather([one(task, run, index) for index, (task, run) in enumerate(missing)])
        results = self._directory.results(checkpoint.name)
        rate = sum(result.evaluation.success for result in results) / len(results)
        self._console.print(f"{checkpoint.name}: TGC {rate:.1%} ({len(plan.tasks)} tasks x {plan.runs})")

    async def _play(
        self,
        checkpoint: Checkpoint,
        task_id: str,
        run: int,
        priority: int,
        slots: SlotQueue[Any],
        load: list[int],
    ) -> RolloutResult:
        """One (task, run), in a fresh environment again if its world is lost."""
        began, usage, error = time.monotonic(), Usage(), ""
        attempts = self._config.environment.rollout_retries + 1
        for attempt in range(attempts):
            entropy = (self._config.seed, checkpoint.version, run, attempt, *task_id.encode())
            seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
            worker = await slots.acquire(priority)
            player = load.index(min(load))
            load[player] += 1
            try:
                request = PlayRequest(task_id=task_id, run=run, attempt=attempt, seed=seed, player=player)
                played: Played = await worker.play.options(name=f"{checkpoint.name} {task_id} run {run}").remote(
                    request
                )
            except RayActorError:
                error = "its worker died"
                continue
            finally:
                load[player] -= 1
                slots.release(worker)
            usage += played.usage
            if played.evaluation is not None:
                self._outputs.write(checkpoint.name, run, task_id, played.saved)
                return RolloutResult(
                    evaluation=played.evaluation,
                    usage=usage,
                    seconds=time.monotonic() - began,
                    attempts=attempt + 1,
                )
            error = played.error or "the world was lost"
        self._outputs.write(checkpoint.name, run, task_id, {})
        return lost_rollout(task_id, run, usage, seconds=time.monotonic() - began, attempts=attempts, error=error)

    async def _load(self, checkpoint: Checkpoint) -> None:
        """Bring a checkpoint to every engine and make sure that it is live."""
        assert self._fleet is not None
        adapter = load_adapter(checkpoint)
        await self._fleet.load(ray.put(adapter))
        # A LoRA adapter whose second factors are all zero, as an untrained one's are, changes nothing.
        trained = any(np.any(values) for name, values in adapter.tensors.items() if "lora_B" in name)
        if not trained:
            return
        probe = _probe(self._config, next(iter(self._directory.plan.tasks)))
        for client in self._clients:
            on = await client.logprobs(probe, adapter=True)
            off = await client.logprobs(probe, adapter=False)
            if on == off:
                raise CanaryFailed(
                    f"{client.name}: the adapter of {checkpoint.name} is not live: log-probs with and without it are "
                    "the same; is it an adapter of this model?"
                )

    async def _stop(self) -> None:
        if self._fleet is not None:
            await self._fleet.stop()
        actors = [*(self._fleet.engines if self._fleet else []), *(worker for worker, _ in self._workers)]
        with contextlib.suppress(Exception):
            await asyncio.wait_for(asyncio.gather(*(actor.stop.remote() for actor in actors)), timeout=20)


def turn_tokens(model: str, agent: AgentConfig) -> int:
    """Tokens that an API model may write in a turn: what the agent may, as far as LiteLLM knows the model to go."""
    most = agent.max_turn_tokens or agent.max_response_length
    return min(most, model_limit(model, "max_output_tokens") or most)


@contextlib.contextmanager
def _ray(config: DracoConfig, policy: Policy) -> Iterator[None]:
    """Ray for as long as the block runs, with room for engines and slots."""
    # No learner and no judge.
    learner = config.learner.model_copy(update={"gpus_per_worker": 0.0, "cpus_per_worker": 0.0})
    train = config.train.model_copy(update={"evaluate_before_after": False})
    engine = config.engine
    if policy.api_model is not None:
        engine = engine.model_copy(update={"gpus_per_engine": 0.0, "cpus_per_engine": 0.0})
    needed = {"learner": learner, "engine": engine, "train": train}
    resources = connect(config.model_copy(update=needed), judges=False)
    try:
        environment = config.environment
        workers = -(-environment.slots // environment.slots_per_worker)
        wanted = workers * environment.cpus_per_worker + engine.engines * engine.cpus_per_engine
        if wanted > resources.get("CPU", 0):
            raise ConfigError(
                f"environment.slots={environment.slots} and the engines need {wanted:g} CPUs, the Ray cluster has "
                f"{resources.get('CPU', 0):g}: lower environment.slots, or raise environment.slots_per_worker"
            )
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _stopped_plainly(directory: EvaluationDirectory, console: Console) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        console.print(
            f"stopped; {directory.finished()} of {directory.total} rollouts are in {directory.path}: the same command "
            "goes on from there"
        )
        raise SystemExit(130) from None
    except Exception as error:
        plain = plain_error(error)
        if plain is None:
            raise
        if isinstance(plain, JudgeUnavailable):
            again = "the same command with a higher budget" if isinstance(plain, BudgetSpent) else "the same command"
            raise type(plain)(
                f"evaluation {directory.path}: {plain}; {directory.finished()} of {directory.total} rollouts are kept, "
                f"and {again} goes on from there"
            ) from None
        raise plain from None


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("rollouts · {task.fields[solved]}/{task.fields[played]} solved"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


async def _gather(work: Sequence[Awaitable[None]]) -> None:
    """Like asyncio.gather, but the first error cancels the rest."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _probe(config: DracoConfig, task_id: str) -> list[int]:
    from transformers import AutoTokenizer

    from draco_ray.engine.chat import ChatTokens
    from draco_ray.rollout.agent_prompt import render_agent_prompt

    chat = ChatTokens(AutoTokenizer.from_pretrained(config.model.path), thinking=config.agent.thinking)
    prompt = render_agent_prompt(config.agent.prompt, load_task(config.data.root, task_id))
    return chat.prompt(prompt)[-_PROBE_TOKENS:]


def _difficulty(root: Path, task_id: str) -> int | None:
    """AppWorld's label. Raises ConfigError where the data has no ground truth to evaluate with."""
    folder = root / "data" / "tasks" / task_id / "ground_truth"
    if not folder.is_dir():
        raise ConfigError(
            f"data root {root}: task {task_id} has no ground truth, which evaluation needs; use the data as AppWorld "
            "ships it, or a sandbox of `draco sandbox build`"
        )
    try:
        level = json.loads((folder / "metadata.json").read_text(encoding="utf-8")).get("difficulty")
    except (OSError, ValueError, AttributeError):
        return None
    return level if isinstance(level, int) else None


def world_digest(root: Path, tasks: Sequence[str]) -> str:
    """What tells two worlds with the same task ids apart."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update((root / "data" / "tasks" / task / "specs.json").read_bytes())
    return digest.hexdigest()[:16]
