"""Sets up a run: checks the model and prompts, and starts the judge, Ray and the actors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from rich.console import Console

from draco_ray.config.schema import DracoConfig, LearnerConfig
from draco_ray.engine.actor import EngineClient, start_policy_engines
from draco_ray.engine.fleet import EngineFleet
from draco_ray.engine.model_directory import chat_template_text, check_model_directory, is_local, load_tokenizer
from draco_ray.environments.base import Environment, find_environment, make_environment
from draco_ray.environments.tools.rows import check_id
from draco_ray.errors import BudgetSpent, ClusterError, ConfigError, DracoError
from draco_ray.interruption import sigterm_as_interrupt
from draco_ray.judging.actors import request_number_prefix, start_judge_limiter, start_replies
from draco_ray.judging.endpoint import describe_judge
from draco_ray.judging.held_out import HeldOutJudge
from draco_ray.judging.judge_context import self_judge_context_length, uses_self_judge
from draco_ray.judging.local.actor import start_judge_servers
from draco_ray.judging.outage import OutageStatus
from draco_ray.judging.pool import JudgePool, PolicyJudge, judge_starter
from draco_ray.judging.prompts import load_static_rubric
from draco_ray.learner.base import Learner, find_learner
from draco_ray.pipeline import Pipeline, Wait
from draco_ray.records import Criterion, Judged, Message
from draco_ray.registry import find_component
from draco_ray.rollout.agent import agent_template, find_agent
from draco_ray.rollout.pool import RolloutPool, RolloutWorkers
from draco_ray.rollout.tokens import EnginePolicies, TokenPolicy
from draco_ray.rollout.turn_agent import TurnAgent
from draco_ray.rollout.worker import EPISODES, rollout_starter
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import carried_rubrics
from draco_ray.runs.store_actor import start_run_store
from draco_ray.training.advantage_computer import start_advantage_computer
from draco_ray.training.cluster import connect_ray, leave_ray, pending_demand, release_start_lock, stop_unless_head_lost
from draco_ray.training.held_out import HeldOutEvaluator, HeldOutJudgeEvaluator, Tell
from draco_ray.training.preflight import check_judge_context, check_session
from draco_ray.training.progress import RunObserver, StepProgress, shown, watch_judge
from draco_ray.training.resume import StartPoint
from draco_ray.training.sizes import with_gradient_checkpointing
from draco_ray.training.trainer import BatchScheduler, TaskOrder, Trainer, WeightSync, engines_asleep
from draco_ray.training.watchdog import PendingOperations, report_inactivity, run_with_timeout

if TYPE_CHECKING:
    from draco_ray.engine.chat import ChatTokenizer
    from draco_ray.judging.judge import Judge


class Actors:
    """Engines, judge, rollout workers and run store of one run."""

    def __init__(
        self,
        config: DracoConfig,
        run: RunDirectory,
        *,
        engines: Sequence[Any] | None = None,
    ) -> None:
        """Create the actors; they begin loading at once.

        Args:
            config: from `draco_ray.training.session.open_run_session`.
            run: the run directory; its name is part of the actors' names.
            engines: existing policy engine actors, with the configured number and names; None: start vLLM engines.

        Raises:
            ConfigError, ClusterError: the cluster is too small for the run (`draco_ray.training.preflight`).
        """
        check_session(config, run.path)
        judge, name = config.judge, run.path.name
        self._config = config
        self._name = name
        self._kept = run.path.resolve() / EPISODES
        self._ready = False
        length = config.agent.max_prompt_length + config.agent.max_response_length
        if uses_self_judge(config):
            length = max(length, self_judge_context_length(config))
        self.fleet = EngineFleet(
            engines
            if engines is not None
            else start_policy_engines(
                config.engine,
                config.model,
                max_model_len=length,
                lora_rank=config.learner.lora_rank,
                seed=config.seed,
                run_name=name,
                staleness=config.train.staleness,
            ),
            config.engine,
        )
        number = len(self.fleet.engines)
        self.clients = [EngineClient(index, name, number) for index in range(number)]
        judged = config.algorithm.reward == "rubric"
        nothing: tuple[Any, Any] = (None, None)
        # The handles are kept: an actor ends with its handle.
        self._limiter, leases = (start_judge_limiter(judge, run.path, name) if judged else None) or nothing
        self._servers, servers = (start_judge_servers(judge, run.path, name) if judged else None) or nothing
        self._replies, replies = (start_replies(judge, name) if judged else None) or nothing
        self._tokenizer = load_tokenizer(config.model.path, config.model.chat_template)
        policy = None
        if judge.self_judge.enabled:
            policy = PolicyJudge(samplers=self.clients, tokenizer=self._tokenizer, name=Path(config.model.path).name)
        own = not request_number_prefix(judge, run.path)
        starter = judge_starter(judge, policy, leases, name, servers, replies, own_replies=own)
        self.judges = JudgePool(starter, judge)
        if judged:
            self.judges.open()
        self.workers = self._rollout_workers(ground_truth=config.algorithm.reward == "outcome")
        self.store = start_run_store(run.path, name, request_number_prefix(judge, run.path))

    async def start(self, pending: PendingOperations | None = None) -> None:
        """Return once the judge and every engine answer; ``pending`` records what is being waited for.

        Raises:
            JudgeUnavailable: the judge cannot be reached from its worker's node; not checked if no rubric is used.
            ClusterError: no judge worker started.
            EngineError: the model cannot be loaded.
        """
        pending = pending or PendingOperations()
        ready: list[Awaitable[Any]] = [pending.wait("the engines' start", self.fleet.start())]
        if self._config.algorithm.reward == "rubric":
            ready.insert(0, pending.wait("the first judge worker and its first reply", self.judges.ready()))
        if self._servers is not None:
            ready.insert(0, pending.wait("the first vLLM server of the judge", self._servers.ready.remote()))
        await asyncio.gather(*ready)
        self._ready = True

    async def judge_pause(self) -> OutageStatus | None:
        """The judge's current outage, if there is one and the limiter answers."""
        if self._limiter is None:
            return None
        try:
            pause: OutageStatus | None = await self._limiter.pause.remote()
        except ray.exceptions.RayError:
            return None
        return pause

    def evaluation_workers(self) -> RolloutWorkers:
        """Additional workers that can evaluate, with ``environment.slots`` slots."""
        return self._rollout_workers(ground_truth=True, kind="EvaluationWorker")

    def _rollout_workers(self, *, ground_truth: bool, kind: str = "RolloutWorker") -> RolloutWorkers:
        config = self._config
        start = rollout_starter(
            EnginePolicies(samplers=self.clients, tokenizer=self._tokenizer),
            agent=config.agent,
            environment=config.environment,
            data=config.data,
            ground_truth=ground_truth,
            run_name=self._name,
            kind=kind,
            kept=self._kept,
        )
        workers = RolloutWorkers(start, config.environment)
        workers.open()
        return workers

    def pool(self, workers: RolloutWorkers) -> RolloutPool:
        """A rollout pool of ``workers`` and all engines."""
        return RolloutPool(workers, self.fleet.workers, self._config.environment.rollout_retries, self._config.seed)

    async def stop(self) -> None:
        """Stop the actors that have child processes; Ray stops the others."""
        self.judges.close()
        stops: list[Awaitable[Any]] = [self.fleet.stop(), self.workers.stop()]
        if self._ready:
            stops += [self.store.settle.remote()]
            stops += [] if self._servers is None else [self._servers.stop.remote()]
        with contextlib.suppress(Exception):
            await asyncio.wait_for(asyncio.gather(*stops), timeout=20)


START_SAY_SECONDS = 60.0
RULE_JUDGE = "draco_ray.sandbox.judge_server:JudgeServer"
"""Import path of the rule judge's server: a name, because training code must not import the sandbox."""
STALE_IMPORTANCE_CAP = 2.0
"""Value of ``learner.importance_cap`` if it is null and ``train.staleness`` is above 0."""


def checked_model(config: DracoConfig) -> DracoConfig:
    """Check the model, and complete the configuration.

    The path of a model directory becomes absolute, the chat template is read, and gradient checkpointing is decided.

    Raises:
        ConfigError: the model cannot be used.
    """
    model, changed = config.model, {}
    check_model_directory(model.path, model.chat_template)
    # Workers may have another working directory.
    if is_local(model.path):
        changed["path"] = str(Path(model.path).expanduser().resolve())
    if model.chat_template is not None:
        changed["chat_template"] = chat_template_text(model.chat_template)
    return with_gradient_checkpointing(config.updated(model=changed))


def with_environment(config: DracoConfig) -> tuple[DracoConfig, Environment]:
    """Make the environment, and add its facts and its static rubric to the configuration where these are needed.

    Returns: the completed configuration, and the environment.
    Raises:
        ConfigError, WorldError: ``environment.use`` names no environment that can be used; or ``algorithm.rubric`` is
            ``static``, and there is no usable static rubric.
    """
    algorithm, environment = config.algorithm, make_environment(config.environment, config.data)
    if algorithm.reward == "rubric" and algorithm.rubric == "static":
        static = algorithm.static_rubric or find_environment(config.environment.use).static_rubric
        if static is None:
            raise ConfigError(
                f"algorithm.rubric=static: environment.use={config.environment.use} has no static rubric; write one "
                "with `draco rubric author CONFIG --out FILE` and set algorithm.static_rubric=FILE"
            )
        trained, other = load_static_rubric(static), config.judge.held_out
        if other and other.rubric and not other.model and load_static_rubric(other.rubric) == trained:
            raise ConfigError(
                f"judge.held_out.rubric={other.rubric} is the rubric that is trained on, so both judges would get the "
                "same replies; expected another rubric, or judge.held_out.model"
            )
        config = config.updated(algorithm={"static_rubric": static})
    if config.judge.environment_facts is None:
        config = config.updated(judge={"environment_facts": environment.facts})
    return config, environment


def resolve_config(config: DracoConfig) -> tuple[DracoConfig, Environment]:
    """The environment, and the configuration completed by `with_environment` and `checked_model`.

    This configuration is stored in the run directory; only the judge's endpoint is still missing.

    Raises: as these two functions.
    """
    config, environment = with_environment(config)
    return checked_model(config), environment


def chat_tokens(config: DracoConfig) -> ChatTokenizer:
    """The model's chat template. Raises: ConfigError: it cannot be used."""
    from draco_ray.engine.chat import ChatTokenizer

    return ChatTokenizer(load_tokenizer(config.model.path, config.model.chat_template), thinking=config.agent.thinking)


def task_prompts(
    config: DracoConfig, environment: Environment, tasks: Sequence[str]
) -> tuple[dict[str, tuple[Message, ...]], ChatTokenizer]:
    """The agent's prompt of each task, by task id, and the chat template that tokenizes it.

    Raises:
        ConfigError, WorldError: a task or the agent's prompt cannot be used.
    """
    missing = [name for name in environment.agent_variables if name not in config.agent.pass_environment]
    if missing:
        raise ConfigError(
            f"agent.pass_environment: {', '.join(missing)} is missing; environment.use={config.environment.use} needs "
            "it in the agent's program, so add it to agent.pass_environment"
        )
    chat = chat_tokens(config)
    environment.check_model(config.model, config.agent)
    template = agent_template(config.agent.prompt, environment.agent_prompt)
    # The agent only makes prompts here; nothing is sampled.
    agent = find_agent(config.agent.use)(TokenPolicy(EngineClient(0, ""), chat, config.agent), config.agent, template)
    return {task_id: agent.prompt(environment.task(task_id)) for task_id in tasks}, chat


def usable_prompts(
    config: DracoConfig, environment: Environment, console: Console, needed: int = 0
) -> dict[str, tuple[Message, ...]]:
    """Prompts of the training tasks that fit ``agent.max_prompt_length``, by task id; prints how many do not.

    Raises:
        ConfigError, WorldError: the split, its tasks or the agent's prompt cannot be used, or too few fit.
    """
    prompts, chat = task_prompts(config, environment, environment.tasks(config.data.train_split))
    for task_id in prompts:
        check_id(task_id, f"environment.use={config.environment.use}")
    most, lengths = config.agent.max_prompt_length, {each: len(chat.prompt(prompts[each])) for each in prompts}
    usable = {task_id: prompts[task_id] for task_id, length in lengths.items() if length <= most}
    if len(usable) < len(prompts):
        said = (
            f"{len(prompts) - len(usable)} of {len(prompts)} training tasks are left out, because their prompts are "
            f"longer than agent.max_prompt_length={most} tokens; the longest has {max(lengths.values())}"
        )
        if len(usable) < needed:
            raise ConfigError(
                f"{said}. Fewer than train.prompts_per_step={needed} tasks are left; raise agent.max_prompt_length"
            )
        console.print(said)
    return usable


def say_cut_prompts(config: DracoConfig, environment: Environment, tasks: Sequence[str], console: Console) -> None:
    """Print how many held-out tasks have a prompt that is too long and will be left-truncated.

    Raises:
        ConfigError, WorldError: a task or the agent's prompt cannot be used.
    """
    if not tasks or not issubclass(find_agent(config.agent.use), TurnAgent):
        # Programs send their own messages, and the endpoint refuses those that are too long.
        return
    prompts, chat = task_prompts(config, environment, tasks)
    most = config.agent.max_prompt_length
    if long := [task_id for task_id, prompt in prompts.items() if len(chat.prompt(prompt)) > most]:
        console.print(
            f"{len(long)} of {len(prompts)} held-out tasks have prompts longer than agent.max_prompt_length={most} "
            f"tokens, which will be left-truncated; first {long[0]}",
        )


@contextlib.contextmanager
def open_run_session(
    config: DracoConfig, run: RunDirectory, console: Console, *, cache: Path | None = None, again: str | None = None
) -> Iterator[DracoConfig]:
    """Run the judge's server and Ray during the block; errors are raised as by `one_line_errors`.

    Args:
        config: from `resolve_config`.
        run: the run directory.
        console: for messages.
        cache: folder of the judge's replies if ``judge.cache`` is null; None: a folder in the run directory.
        again: folder or URL with which `draco train --resume` continues the run; None: it cannot be continued.

    Yields: the configuration completed with the judge's endpoint and cache.
    Raises: as `open_judge` and `ray_session`.
    """
    continued = "" if again is None else f"continue with: draco train --resume {shlex.quote(again)}"
    with (
        one_line_errors(run, console, continued),
        sigterm_as_interrupt(continued and f"stopping; {continued}"),
        open_judge(config, console, cache or run.judge_cache) as final,
        ray_session(final, console),
    ):
        yield final


@contextlib.contextmanager
def open_judge(config: DracoConfig, console: Console, cache: Path | None = None) -> Iterator[DracoConfig]:
    """Yield the configuration with the judge's endpoint, and with ``cache`` as ``judge.cache`` if that is null.

    The rule judge's server, if used, runs during the block.

    Raises:
        ConfigError: the policy judges itself and its context is too short; or a budget is set but the model's price
            is unknown.
        JudgeUnavailable: the judge refuses access or cannot be reached.
    """
    from draco_ray.judging.build import build_judge
    from draco_ray.judging.pricing import check_budget

    final = config.updated(judge={"cache": config.judge.cache or cache})
    judge = final.judge
    if judge.self_judge.enabled or config.algorithm.reward != "rubric":
        which = "the policy itself" if config.algorithm.reward == "rubric" else "not used"
        console.print(f"judge: {which}")
        check_judge_context(config)
    elif judge.local.enabled:
        console.print(f"judge: {judge.model}, served on the cluster")
        # The judge's vLLM servers start with the actors, so the first judge worker checks them.
        check_budget(judge, judge.model)
    elif judge.rule_judge.start:
        with _rule_judge(config, console) as endpoint:
            yield final.updated(judge=endpoint)
        return
    else:
        console.print(f"judge: {describe_judge(judge)}")
        # Check the judge first: this takes seconds, while everything else takes longer to start.
        with shown(console, "asking the judge"):
            asyncio.run(_check_judge(build_judge(config.judge, None), config, console))
    yield final


@contextlib.contextmanager
def _rule_judge(config: DracoConfig, console: Console) -> Iterator[dict[str, str]]:
    """Run the rule judge's server; yields the judge settings that point to it."""
    from draco_ray.judging.pricing import check_budget

    rules = config.judge.rule_judge
    noise = rules.model_dump(include={"false_pass", "false_fail", "wrong_step", "missed_criterion"})
    with find_component("judge.rule_judge", RULE_JUDGE, {})(
        use=rules.use, latency=rules.latency_seconds, noise={**noise, "seed": config.seed}
    ) as server:
        console.print(f"judge: the offline rule judge (a stand-in for a frontier judge) at {server.base_url}")
        # The server needs no key, but the client requires one.
        os.environ.setdefault("DRACO_RULE_JUDGE_KEY", "none")
        model = f"openai/{server.model}"
        check_budget(config.judge, model)
        yield {"model": model, "api_base": server.base_url, "api_key_env": "DRACO_RULE_JUDGE_KEY"}


async def _check_judge(judge: Judge, config: DracoConfig, console: Console) -> None:
    """Check that the judge answers, within ``watch.start_seconds``."""
    pending = PendingOperations()
    checking = pending.wait("the judge's first reply", judge.check())
    # Ray is not running yet, so there are no pending resources to report.
    await await_startup(checking, config, pending, console, why=str)


@contextlib.contextmanager
def ray_session(config: DracoConfig, console: Console | None = None) -> Iterator[None]:
    """Run Ray during the block; ``console`` shows that it is starting."""
    connect_ray(config, console=console)
    try:
        yield
    finally:
        leave_ray()


@contextlib.contextmanager
def one_line_errors(run: RunDirectory, console: Console, continued: str = "") -> Iterator[None]:
    """Turn known errors of actors into one line and an interrupt into SystemExit; print the run directory.

    ``continued``: the line that says how to continue the run, printed if not empty.
    """
    try:
        with unwrap_ray_errors():
            yield
    except (DracoError, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if interrupted:
            console.print(f"stopped; finished results are in {run.path}")
        if continued:
            console.print(continued)
        raise (SystemExit(130) if interrupted else error) from None


@contextlib.contextmanager
def unwrap_ray_errors() -> Iterator[None]:
    """Raise the one-line error behind an error of an actor, if there is one."""
    try:
        yield
    except ray.exceptions.RayError as error:
        if (plain := unwrap_ray_error(error)) is None:
            raise
        raise plain from None


def unwrap_ray_error(error: BaseException) -> DracoError | None:
    """The one-line error behind an error of an actor; None if the error is unexpected, that is, a bug."""
    while isinstance(error, ray.exceptions.RayTaskError):
        # Ray wraps an error once more in each actor that passes it on.
        if error.cause is None or error.cause is error:
            return None
        error = error.cause
    if isinstance(error, DracoError):
        return error
    if isinstance(error, ray.exceptions.RayError):
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return ClusterError(
            f"a process of this run was lost and cannot be restarted: {first}; check for lack of memory or lost nodes"
        )
    return None


@contextlib.asynccontextmanager
async def training_session(
    config: DracoConfig,
    prompts: Mapping[str, tuple[Message, ...]],
    order: TaskOrder,
    run: RunDirectory,
    start: StartPoint,
    console: Console,
) -> AsyncIterator[Trainer]:
    """Start the learner, engines, workers and judges of a training run; stop them after the block, or if a start fails.

    Args:
        config: the configuration that `open_run_session` yields.
        prompts: the agent's prompt of each usable task, by task id.
        order: chooses the tasks of each step.
        run: the run directory.
        start: the step and the checkpoint from which training continues.
        console: prints messages.

    Yields: the trainer, which runs the steps.
    Raises:
        DracoError: one of these parts cannot be started, or the block raised the error.
    """
    async with contextlib.AsyncExitStack() as parts:
        pending = PendingOperations()
        progress = StepProgress(console, pending, heartbeat_seconds=config.watch.heartbeat_seconds)
        parts.callback(progress.stop)
        progress.start("starting")
        observer = RunObserver(config, run.path, spent=spent_dollars(run), done=start.step)
        parts.callback(observer.close)
        learner = find_learner(config.learner.use)(
            config.model, learner_config(config), run=run.path, seed=config.seed, resume_from=start.checkpoint
        )
        parts.push_async_callback(partial(stop_unless_head_lost, learner.stop))
        actors = Actors(config, run)
        parts.push_async_callback(partial(stop_unless_head_lost, actors.stop))
        parts.push_async_exit(partial(_drain_within_budget, actors, config.judge.request_timeout_seconds))
        advantages = start_advantage_computer(config.algorithm, run.path.name)
        weights = WeightSync(
            learner,
            actors.fleet,
            advantages,
            tolerance=config.engine.canary_tolerance,
            moved=start.moved,
            first_gap=start.first_gap,
        )

        async def begin() -> None:
            await _start(config, actors, learner, pending)
            release_start_lock()
            if start.step:
                await pending.wait("sync of the adapter to the engines", weights.publish(start.step))

        await await_startup(begin(), config, pending, console)
        pool = actors.pool(actors.workers)
        pipeline = Pipeline(
            config.algorithm,
            pool,
            actors.judges,
            advantages,
            actors.store,
            static_rubric=ray.put(Judged(value=static_criteria(config))),
            carried={} if config.algorithm.rubric_visits is None else carried_rubrics(run, start.step + 1),
            held_out=None if config.judge.held_out is None else HeldOutJudge(config.judge, actors.judges, actors.store),
            seed=config.seed,
            watch=observer.group,
            wait=pending.of,
        )
        for watching in (
            observer.watch_pools(pool, actors.judges),
            observer.watch_engines(actors.fleet),
            watch_judge(actors.judge_pause, progress, console),
            report_inactivity(pending, config.watch.quiet_seconds, console.print, pending_demand),
        ):
            await parts.enter_async_context(_beside(watching))
        trainer = Trainer(
            config,
            batches=BatchScheduler(prompts, order, pipeline, console, start.recorded),
            learner=learner,
            fleet=actors.fleet,
            weights=weights,
            store=actors.store,
            observer=observer,
            progress=progress,
            run=run,
            console=console,
            pending=pending,
            evaluation=_before_after(config, actors, run, progress, console, observer.held_out, pending.of),
        )
        # Callbacks run in reverse order: this one, pushed last, runs first at the end.
        parts.callback(progress.start, "ending")
        yield trainer


def _before_after(
    config: DracoConfig,
    actors: Actors,
    run: RunDirectory,
    progress: StepProgress,
    console: Console,
    tell: Tell,
    wait: Wait,
) -> HeldOutEvaluator | HeldOutJudgeEvaluator | None:
    """The measurement of held-out tasks, by the environment's evaluator or else by the judge; None if disabled."""
    if not config.train.evaluate_before_after:
        return None
    environment = make_environment(config.environment, config.data)
    if environment.evaluates:
        return HeldOutEvaluator(config, actors, run, progress, console, tell, wait)

    def prompts(tasks: Sequence[str]) -> dict[str, tuple[Message, ...]]:
        return task_prompts(config, environment, tasks)[0]

    static = static_criteria(config)
    return HeldOutJudgeEvaluator(
        config, actors, run, progress, console, prompts=prompts, static=static, tell=tell, wait=wait
    )


def spent_dollars(run: RunDirectory) -> float:
    """Dollars spent on judging according to the run's archive."""
    tables = [run.table(name, columns=["dollars"]) for name in ("judge_calls", "heldout_calls")]
    return float(sum(sum(filter(None, table.column("dollars").to_pylist())) for table in tables))


def learner_config(config: DracoConfig) -> LearnerConfig:
    """The learner's configuration: with capped importance weights if ``train.staleness`` is above 0, and on one thread
    with ``engine.deterministic``."""
    if config.engine.deterministic:
        config = config.updated(learner={"cpus_per_worker": min(1.0, config.learner.cpus_per_worker)})
    if config.train.staleness and config.learner.importance_cap is None:
        return config.updated(learner={"importance_cap": STALE_IMPORTANCE_CAP}).learner
    return config.learner


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run ``work`` concurrently with the block; it is cancelled when the block ends."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()


async def await_startup(
    begin: Coroutine[Any, Any, None],
    config: DracoConfig,
    pending: PendingOperations,
    console: Console,
    why: Callable[[], str] = pending_demand,
) -> None:
    """Start a run with ``begin``; print what it waits for whenever nothing has happened for a while.

    Args:
        begin: reports to ``pending`` what it waits for.
        config: of the run.
        pending: what is being waited for.
        console: for messages.
        why: see `draco_ray.training.watchdog.report_inactivity`.

    Raises:
        ClusterError: it takes longer than ``watch.start_seconds``.
    """
    quiet, limit = min(START_SAY_SECONDS, config.watch.quiet_seconds), config.watch.start_seconds

    def late() -> ClusterError:
        return ClusterError(f"the run has not started in watch.start_seconds={limit:g}, waiting for: {pending}")

    async with _beside(report_inactivity(pending, quiet, console.print, why)):
        await run_with_timeout(begin, limit, late)


async def start_actors(actors: Actors, config: DracoConfig, console: Console) -> None:
    """`Actors.start` for commands that do not train. Raises: as `Actors.start` and `await_startup`."""
    pending = PendingOperations()
    await await_startup(actors.start(pending), config, pending, console)


async def _start(config: DracoConfig, actors: Actors, learner: Learner, pending: PendingOperations) -> None:
    waits_for = "the learner's start"
    if not config.engine.colocate:
        await asyncio.gather(actors.start(pending), pending.wait(waits_for, learner.start()))
        return
    # Start engines first: Ray gives each its own GPU, and vLLM measures how much of the GPU's memory is free.
    await actors.start(pending)
    async with engines_asleep(actors.fleet, colocate=True, pending=pending):
        await pending.wait(waits_for, learner.start())


async def _drain_within_budget(actors: Actors, seconds: float, kind: Any, error: Any, trace: Any) -> None:
    """If the budget is spent, wait for the replies to requests already sent, since they are paid for."""
    if isinstance(error, DracoError | ray.exceptions.RayError) and isinstance(unwrap_ray_error(error), BudgetSpent):
        await actors.judges.drain(seconds)


def static_criteria(config: DracoConfig) -> tuple[Criterion, ...]:
    """The criteria of the static rubric; empty if the setting uses none."""
    algorithm = config.algorithm
    if algorithm.reward != "rubric" or algorithm.rubric != "static" or algorithm.static_rubric is None:
        return ()
    return load_static_rubric(algorithm.static_rubric)
