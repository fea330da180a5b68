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
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from draco_ray.benchmarks.tau.config import TauBenchConfig
from draco_ray.benchmarks.tau.results import (
    INFRASTRUCTURE,
    MISSING,
    read_episodes,
    read_judge_usage,
    rollout_result,
    simulation_files,
    summary,
)
from draco_ray.benchmarks.tau.server import SERVED, TauPolicy, free_port, serve_command, served
from draco_ray.benchmarks.tau.tau2_process import (
    BANKING,
    Tau2,
    find_tau2,
    key_variables,
    read_keys,
    run_job,
    sampling,
    tau2_environment,
    tau2_job,
)
from draco_ray.config.schema import DracoConfig
from draco_ray.engine.child import Scrubber
from draco_ray.errors import ConfigError
from draco_ray.judging.pricing import find_price
from draco_ray.lab.evaluation.results import EvaluationDirectory, Plan
from draco_ray.temp_dirs import PrivateTempDir
from draco_ray.terminal import PlainConsole

log = logging.getLogger(__name__)

BENCHMARK = "tau-banking"
NOT_COMPARED = {
    *("tau2_python", "tau2_home", "embeddings_cache"),
    *("concurrency", "stall_timeout_seconds", "restarts"),
    *("tasks", "trials"),
}
"""Settings that do not change the outcome, or that the plan stores elsewhere."""


def evaluate_tau(
    config: DracoConfig,
    policies: Sequence[TauPolicy],
    out: Path,
    *,
    label: str | None = None,
    retry_errors: bool = False,
    max_lost_share: float = 1.0,
) -> EvaluationDirectory:
    """Evaluate every policy on the full split, with ``config.tau_bench.trials`` episodes per task.

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
    rerun = {MISSING, INFRASTRUCTURE} if retry_errors else {MISSING}
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


def plan_tau(config: DracoConfig, policies: Sequence[TauPolicy], label: str | None = None) -> tuple[Tau2, Plan]:
    """Check everything `evaluate_tau` needs; returns the installation and the plan.

    Raises:
        ConfigError: a requirement is missing.
    """
    tau = TauBenchConfig.of(config)
    names = tuple(policy.name for policy in policies)
    if len(set(names)) < len(names):
        raise ConfigError(f"policies {', '.join(names)}: expected different names")
    for policy in policies:
        read_keys(tau, policy)
        if not policy.api:
            serve_command(config, policy, free_port(tau.server.port), policy.adapter)
    tau2 = find_tau2(tau)
    tasks = task_ids(tau, tau2)
    settings = tau.model_dump(mode="json", exclude=NOT_COMPARED)
    for role in ("agent", "user", "judge", "embedder"):
        del settings[role]["api_key_env"]
    for role, temperature in sent_temperatures(tau, policies).items():
        settings[role]["temperature"] = temperature
    del settings["server"]["port"], settings["server"]["start_timeout_seconds"]
    settings |= {f"weights.{policy.name}": policy.digest for policy in policies}
    settings |= {f"model.{policy.name}": policy.model for policy in policies}
    settings |= {"thinking": config.agent.thinking, "dtype": config.model.dtype, "tau2_commit": tau2.commit}
    return tau2, Plan(
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
        refused = [name for name in names if settings.temperature is not None and not sampling(settings, name)]
        if refused:
            log.warning(
                "tau_bench.%s.temperature=%g is not sent and recorded as null: %s does not accept a temperature",
                *(role, settings.temperature, ", ".join(refused)),
            )
        found[role] = None if refused else settings.temperature
    return found


def _run(config: DracoConfig, policy: TauPolicy, tau2: Tau2, tasks: Sequence[str], folder: Path, out: Path) -> None:
    tau = TauBenchConfig.of(config)
    keys = read_keys(tau, policy)
    with ExitStack() as stack:
        tmp = stack.enter_context(PrivateTempDir())
        endpoint = None
        if not policy.api:
            withhold = list(key_variables(tau, policy).values())
            log.info("serving %s as %s", policy.name, SERVED)
            endpoint = stack.enter_context(served(config, policy, folder / "server.log", tmp, withhold))
        unreadable = [*tau2.secret_paths, str(out.resolve())]
        job = tau2_job(tau, policy, endpoint, folder.resolve(), tasks=tasks, unreadable=unreadable)
        environment = tau2_environment(tau, tau2.home, policy, endpoint, keys, tmp)
        scrubber = Scrubber([*keys.values(), *([endpoint.key] if endpoint else [])])
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("episodes"))
        console = PlainConsole(stderr=True, soft_wrap=False)
        quiet = not console.is_terminal or console.is_dumb_terminal
        bar = stack.enter_context(Progress(*columns, TimeElapsedColumn(), console=console, disable=quiet))
        shown = bar.add_task(f"τ-bench {policy.name}", total=len(tasks) * tau.trials)
        run_job(
            job, tau2.python, environment, folder, tmp, tau, scrubber, lambda done: bar.update(shown, completed=done)
        )


def _log_lost(name: str, found: dict[str, Any]) -> None:
    errors, missing, episodes = found["infrastructure_errors"], found["missing"], found["episodes"]
    if errors or missing:
        log.warning(
            "%s: %d of %d episodes are infrastructure errors and %d are missing (%.1f %%); they count as failures",
            *(name, errors, episodes, missing, 100 * (errors + missing) / episodes),
        )
