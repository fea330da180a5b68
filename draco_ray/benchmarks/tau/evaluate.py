"""Evaluate one or several checkpoints on τ-bench banking, into an evaluation directory.

::

    evaluation.json                     what is measured (see `draco_ray.lab.evaluation.results`)
    results/<measurement>.jsonl         every planned episode, once tau2 has finished a measurement
    summary.json                        costs by role and failures by kind of every measurement
    tau2/<measurement>/results.json     tau2's own files, in its directory format, readable by `tau2 view`
    tau2/<measurement>/simulations/
    tau2/<measurement>/judge_calls.jsonl, runner.log, server.log
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from draco_ray.benchmarks.tau.config import TauBenchConfig
from draco_ray.benchmarks.tau.results import (
    INFRASTRUCTURE_ERROR,
    MISSING_EPISODE,
    read_episodes,
    read_judge_usage,
    rollout_result,
    simulation_files,
    summary,
)
from draco_ray.benchmarks.tau.server import LITELLM_NAME, SERVED_NAME, TauPolicy, free_port, serve_command, serve_policy
from draco_ray.benchmarks.tau.tau2_process import (
    BANKING,
    DENSE_RETRIEVAL,
    JUDGE_KEY,
    PASSED_ON,
    RUNNER_SCRIPT,
    Tau2,
    find_tau2,
    judge_job,
    key_variable,
    litellm_variables,
    sampling_arguments,
    tau2_base_env_vars,
)
from draco_ray.benchmarks.tau.tau2_runner import EXIT_REFUSED
from draco_ray.config.schema import DracoConfig
from draco_ray.engine.child import Child, Scrubber
from draco_ray.errors import ConfigError, TauBenchError
from draco_ray.judging.endpoint import Server
from draco_ray.judging.pricing import find_price
from draco_ray.lab.evaluation.results import EvaluationDirectory, EvaluationPlan
from draco_ray.temp_dirs import PrivateTempDir
from draco_ray.terminal import PlainConsole

log = logging.getLogger(__name__)

BENCHMARK = "tau-banking"
NOT_COMPARED: Any = {
    **dict.fromkeys(("tau2_python", "tau2_home", "embeddings_cache"), True),
    **dict.fromkeys(("concurrency", "stall_timeout_seconds", "restarts", "tasks", "trials"), True),
    **{role: {"api_key_env"} for role in ("agent", "user", "judge", "embedder")},
    "server": {"port", "start_timeout_seconds"},
}
"""Settings that do not change the outcome, or that the plan stores elsewhere."""
COPIED_KEYS = {"retrieval", "trials", "seed", "concurrency", "episode_retries", "episode_timeout_seconds"}
"""Configuration keys that are copied to a job under the same names."""
STEPS_PER_TURN = 2
"""tau2's max_steps counts the messages of both sides."""
EMBEDDER_KEY = "DRACO_TAU_EMBEDDER_KEY"
POLL_SECONDS = 0.2


def evaluate_tau(
    config: DracoConfig,
    policies: Sequence[TauPolicy],
    out: Path,
    *,
    label: str | None = None,
    retry_errors: bool = False,
    max_lost_share: float = 1.0,
) -> EvaluationDirectory:
    """Evaluate every policy on ``tau_bench.tasks`` (null: the full split), ``tau_bench.trials`` episodes per task.

    If the directory contains part of the same evaluation, it is continued; tau2 then also retries episodes that ended
    in an infrastructure error.

    Args:
        policies: one, or the checkpoints of one setting; their names are the measurements.
        out: evaluation directory.
        label: the setting's name in tables; None uses ``config.setting``.
        retry_errors: retry infrastructure errors even if no episode is missing.
        max_lost_share: largest accepted share of lost episodes, checked after each measurement.

    Raises:
        ConfigError: a requirement is missing, ``out`` contains another evaluation, or another process uses it.
        TooManyLost: more than ``max_lost_share`` were lost; finished episodes are kept.
        TauBenchError: the server or tau2 failed too often; finished episodes are kept.
        SystemExit: 130 after Ctrl-C, with one line about the finished episodes.
    """
    tau2, plan = plan_tau(config, policies, label)
    tasks, trials = tuple(plan.tasks), TauBenchConfig.of(config).trials
    directory = EvaluationDirectory.begin(out, plan)
    rerun = {MISSING_EPISODE, INFRASTRUCTURE_ERROR} if retry_errors else {MISSING_EPISODE}
    found: dict[str, dict[str, Any]] = {}
    with directory.claimed():
        for policy in policies:
            folder = out / "tau2" / policy.name
            folder.mkdir(parents=True, exist_ok=True)
            episodes = read_episodes(folder, tasks, trials)
            if any(episode.termination_reason in rerun for episode in episodes):
                try:
                    _run(config, policy, tau2, tasks, folder, out)
                except KeyboardInterrupt:
                    kept = sum(len(simulation_files(out / "tau2" / each.name)) for each in policies)
                    where = f"{kept} of {directory.total} episodes are in {directory.path}"
                    log.warning("stopped; %s; run the same command again to continue", where)
                    raise SystemExit(130) from None
                episodes = read_episodes(folder, tasks, trials)
            price = find_price(policy.model, config.judge.prices)
            (out / "results" / f"{policy.name}.jsonl").unlink(missing_ok=True)
            for episode in episodes:
                directory.add(policy.name, rollout_result(episode, price))
            found[policy.name] = summary(episodes, read_judge_usage(folder), policy.model, config, tau2.commit)
            _log_lost(policy.name, found[policy.name])
            directory.check_lost(max_lost_share)
        directory.write_summary({"label": directory.plan.label, "measurements": found})
    return directory


def plan_tau(
    config: DracoConfig, policies: Sequence[TauPolicy], label: str | None = None
) -> tuple[Tau2, EvaluationPlan]:
    """Check everything `evaluate_tau` needs; returns the installation and the plan.

    Raises:
        ConfigError: a requirement is missing.
    """
    tau = TauBenchConfig.of(config)
    names = tuple(policy.name for policy in policies)
    if len(set(names)) < len(names):
        raise ConfigError(f"policies {', '.join(names)}: expected different names")
    for policy in policies:
        key_variables(tau, policy)
        if not policy.api:
            serve_command(config, policy, free_port(tau.server.port), policy.adapter)
    tau2 = find_tau2(tau)
    tasks = task_ids(tau, tau2)
    settings = tau.model_dump(mode="json", exclude=NOT_COMPARED)
    for role, temperature in sent_temperatures(tau, policies).items():
        settings[role]["temperature"] = temperature
    settings |= {f"weights.{policy.name}": policy.digest for policy in policies}
    settings |= {f"model.{policy.name}": policy.model for policy in policies}
    settings |= {"thinking": config.agent.thinking, "dtype": config.model.dtype, "tau2_commit": tau2.commit}
    return tau2, EvaluationPlan(
        benchmark=BENCHMARK,
        split="full" if len(tasks) == len(tau2.tasks) else "part",
        label=label or config.setting,
        policy=", ".join(names),
        runs=tau.trials,
        measurements=names,
        tasks=dict.fromkeys(tasks),
        world=hashlib.sha256(" ".join((tau2.commit, *tasks)).encode()).hexdigest()[:16],
        split_size=len(tau2.tasks),
        scenarios=False,
        settings=settings,
    )


def task_ids(config: TauBenchConfig, tau2: Tau2) -> tuple[str, ...]:
    """The tasks to run, in the checkout's order.

    Raises:
        ConfigError: a configured task does not exist.
    """
    if unknown := sorted(set(config.tasks or ()) - set(tau2.tasks)):
        raise ConfigError(
            f"tau_bench.tasks: {unknown[0]!r} is not a task of {BANKING}; expected e.g. {tau2.tasks[0]!r}"
        )
    return tuple(task for task in tau2.tasks if config.tasks is None or task in config.tasks)


def sent_temperatures(config: TauBenchConfig, policies: Sequence[TauPolicy]) -> dict[str, float | None]:
    """Role -> temperature in its requests; None, with a warning, if its model accepts no temperature."""
    models = {
        "agent": [policy.model for policy in policies if policy.api],
        "user": [config.user.model],
        "judge": [config.judge.model],
    }
    found: dict[str, float | None] = {}
    for role, names in models.items():
        settings = getattr(config, role)
        refused = [
            name for name in names if settings.temperature is not None and not sampling_arguments(settings, name)
        ]
        if refused:
            log.warning(
                "tau_bench.%s.temperature=%g is not sent; null is recorded: %s does not accept a temperature",
                *(role, settings.temperature, ", ".join(refused)),
            )
        found[role] = None if refused else settings.temperature
    return found


def key_variables(config: TauBenchConfig, policy: TauPolicy) -> dict[str, str]:
    """Role -> name of the environment variable that holds its key.

    Raises:
        ConfigError: a key is not set.
    """
    variables = {"user simulator": key_variable(config.user), "judge": key_variable(config.judge)}
    if config.retrieval in DENSE_RETRIEVAL:
        variables["embedder"] = config.embedder.api_key_env
    if policy.api:
        variables["agent"] = key_variable(config.agent, policy.model)
    for role, variable in variables.items():
        if not os.environ.get(variable):
            raise ConfigError(
                f"{role}: no API key found; set environment variable {variable} (to any text if the endpoint needs no "
                "key), or name another variable in tau_bench"
            )
    return variables


def tau2_env_vars(
    config: TauBenchConfig,
    home: Path,
    policy: TauPolicy,
    endpoint: Server | None,
    keys: Mapping[str, str],
    tmp: Path,
) -> dict[str, str]:
    """Build all environment variables of tau2's process.

    Args:
        home: the checkout of tau2-bench.
        endpoint: endpoint of the policy served here; None for an API policy.
        keys: role -> key.
        tmp: private folder for temporary files.

    Raises:
        ConfigError: two roles need one variable with different values, or the endpoint of a role cannot be set.
    """
    user = litellm_variables("tau_bench.user", config.user, config.user.model, keys["user simulator"])
    if endpoint is not None:
        agent = {"HOSTED_VLLM_API_BASE": endpoint.api_base or "", "HOSTED_VLLM_API_KEY": endpoint.key}
    else:
        agent = litellm_variables("tau_bench.agent", config.agent, policy.model, keys["agent"])
    for name in user.keys() & agent.keys():
        if user[name] != agent[name]:
            raise ConfigError(
                f"tau_bench: agent and user simulator need different {name}, which LiteLLM reads for both; give them "
                "one endpoint and key, or models of different providers"
            )
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1", "localhost")))
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment |= {**tau2_base_env_vars(home), "NO_PROXY": direct, "no_proxy": direct, "TMPDIR": str(tmp)}
    environment |= {JUDGE_KEY: keys["judge"], EMBEDDER_KEY: keys.get("embedder", "")}
    return {name: value for name, value in (environment | user | agent).items() if value}


def tau2_job(
    config: TauBenchConfig,
    policy: TauPolicy,
    endpoint: Server | None,
    folder: Path,
    *,
    tasks: Sequence[str],
    unreadable: Sequence[str],
) -> dict[str, Any]:
    """Build the job for `tau2_runner` as JSON; it contains no key.

    Args:
        folder: folder for tau2's results.
        tasks: ids of the tasks to run.
        unreadable: files and folders that the agent's shell must not read.
    """
    agent = LITELLM_NAME if endpoint else policy.model
    # Use one cache folder per model and endpoint, since tau2's own cache key ignores them.
    embedder = hashlib.sha256(f"{config.embedder.model} {config.embedder.api_base}".encode()).hexdigest()[:16]
    return {
        **config.model_dump(include=COPIED_KEYS),
        "domain": BANKING,
        "tasks": list(tasks),
        "max_steps": STEPS_PER_TURN * config.max_turns,
        "agent": {"model": agent, "args": sampling_arguments(config.agent, agent)},
        "user": {"model": config.user.model, "args": sampling_arguments(config.user)},
        "judge": judge_job(config.judge),
        "embedder": {"model": config.embedder.model, "api_base": config.embedder.api_base, "key": EMBEDDER_KEY},
        "embeddings_cache": str(config.embeddings_cache.expanduser().resolve() / embedder),
        "unreadable": list(unreadable),
        "results": str(folder / "results.json"),
        "judge_calls": str(folder / "judge_calls.jsonl"),
    }


def _run(config: DracoConfig, policy: TauPolicy, tau2: Tau2, tasks: Sequence[str], folder: Path, out: Path) -> None:
    """Run the episodes that have no result in ``folder`` yet; restart tau2 after a crash or a stall.

    ``folder`` gets tau2's results, and ``runner.log`` with its output, keys masked.

    Raises:
        TauBenchError: tau2 refused, or failed more often than ``tau_bench.restarts``.
    """
    tau, logged = TauBenchConfig.of(config), folder / "runner.log"
    variables = key_variables(tau, policy)
    keys = {role: os.environ[name] for role, name in variables.items()}
    with ExitStack() as stack:
        tmp = stack.enter_context(PrivateTempDir())
        endpoint = None
        if not policy.api:
            log.info("serving %s as %s", policy.name, SERVED_NAME)
            endpoint = stack.enter_context(
                serve_policy(config, policy, folder / "server.log", tmp, [*variables.values()])
            )
        unreadable = [*tau2.secret_paths, str(out.resolve())]
        job = tmp / "job.json"
        settings = tau2_job(tau, policy, endpoint, folder.resolve(), tasks=tasks, unreadable=unreadable)
        job.write_text(json.dumps(settings), encoding="utf-8")
        command = [tau2.python, "-P", str(RUNNER_SCRIPT), "run", str(job)]
        environment = tau2_env_vars(tau, tau2.home, policy, endpoint, keys, tmp)
        scrubber = Scrubber([*keys.values(), *([endpoint.key] if endpoint else [])])
        progress = stack.enter_context(_shown(policy.name, len(tasks) * tau.trials))
        for start in range(tau.restarts + 1):
            # tau2's working directory is private.
            child = Child(command, environment, logged, scrubber, folder=tmp)
            try:
                problem = _wait(child, folder, tau.stall_timeout_seconds, progress)
            finally:
                child.end()
                # tau2 stores the errors of its calls, and a provider may quote the key in an error.
                for file in folder.rglob("*.json*"):
                    scrubber.file(file)
            if problem is None:
                return
            if child.returncode == EXIT_REFUSED:
                raise TauBenchError(f"tau2 was not started: {child.last_line}")
            kept = f"{len(simulation_files(folder))} of {len(tasks) * tau.trials} episodes are kept"
            if start < tau.restarts:
                log.warning("tau2 %s; %s; restarting it", problem, kept)
    raise TauBenchError(
        f"tau2 {problem}, {tau.restarts + 1} times in total; {kept}; see the end of {logged}; run the same command "
        "again to continue"
    )


@contextmanager
def _shown(name: str, episodes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal; yields a function that takes the number of finished episodes."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("episodes"))
    console = PlainConsole(stderr=True, soft_wrap=False)
    quiet = not console.is_terminal or console.is_dumb_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=quiet) as bar:
        task = bar.add_task(f"τ-bench {name}", total=episodes)
        yield lambda done: bar.update(task, completed=done)


def _wait(child: Child, folder: Path, stall_seconds: float, progress: Callable[[int], None]) -> str | None:
    """Wait for the process; returns what went wrong, or None."""
    done, changed = -1, time.monotonic()
    while True:
        code = child.wait(POLL_SECONDS)
        if (now := len(simulation_files(folder))) != done:
            done, changed = now, time.monotonic()
            progress(done)
        if code is not None:
            return None if code == 0 else f"ended with exit code {code}"
        if time.monotonic() - changed > stall_seconds:
            return f"finished no episode in {stall_seconds:g} s"


def _log_lost(name: str, found: dict[str, Any]) -> None:
    errors, missing, episodes = found["infrastructure_errors"], found["missing"], found["episodes"]
    if errors or missing:
        log.warning(
            "%s: %d of %d episodes are infrastructure errors and %d are missing (%.1f %%); they count as failures",
            *(name, errors, episodes, missing, 100 * (errors + missing) / episodes),
        )
