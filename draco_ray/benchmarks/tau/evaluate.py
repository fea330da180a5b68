"""One or several checkpoints on τ-bench banking, into an evaluation directory.

::

    evaluation.json                     what is measured (see `draco_ray.lab.evaluation.results`)
    results/<measurement>.jsonl         every planned episode, once tau2 is done with a measurement
    summary.json                        costs by role and failures by kind of every measurement
    tau2/<measurement>/results.json     tau2's own files, in its directory format, readable by `tau2 view`
    tau2/<measurement>/simulations/
    tau2/<measurement>/judge_calls.jsonl, runner.log, server.log
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from draco_ray.benchmarks.tau import job as jobs
from draco_ray.benchmarks.tau.episodes import (
    INFRASTRUCTURE,
    MISSING,
    Episode,
    count_episodes,
    read_episodes,
    read_judge_tokens,
)
from draco_ray.benchmarks.tau.installation import Tau2, find_tau2
from draco_ray.benchmarks.tau.job import sampling
from draco_ray.benchmarks.tau.policy import TauPolicy
from draco_ray.benchmarks.tau.report import rollout_result, summary
from draco_ray.benchmarks.tau.server import SERVED, free_port, serve_command, served
from draco_ray.benchmarks.tau.supervise import run_job
from draco_ray.config.schema import DracoConfig, TauBenchConfig
from draco_ray.engine.child import Scrubber
from draco_ray.errors import ConfigError
from draco_ray.judging.pricing import find_price
from draco_ray.lab.evaluation.results import EvaluationDirectory, Plan
from draco_ray.temp_dirs import PrivateTempDir
from draco_ray.terminal import PlainConsole

log = logging.getLogger(__name__)

BENCHMARK = "tau-banking"
VOLATILE = {
    "tau2_python",
    "tau2_home",
    "tasks",
    "trials",
    "concurrency",
    "stall_timeout_seconds",
    "restarts",
    "embeddings_cache",
}
"""Settings that do not decide the outcome, or that the plan has elsewhere."""


def evaluate_tau(
    config: DracoConfig,
    policies: Sequence[TauPolicy],
    out: Path,
    *,
    label: str | None = None,
    retry_errors: bool = False,
    max_lost_share: float = 1.0,
) -> EvaluationDirectory:
    """Measure every policy on the full split, ``config.tau_bench.trials`` episodes a task.

    A directory that holds part of the same evaluation is continued; tau2 then also runs episodes again that had ended
    in an infrastructure error.

    Args:
        policies: one, or the checkpoints of one setting; their names are the measurements.
        out: evaluation directory.
        label: the setting's name in tables; None is ``config.setting``.
        retry_errors: run infrastructure errors again even where nothing is missing.
        max_lost_share: of all episodes; looked at after each measurement.

    Raises:
        ConfigError: something that is needed is not there, or ``out`` holds another evaluation, or another process is
            at it.
        TooManyLost: more than ``max_lost_share``; what was finished is kept.
        TauBenchError: the server or tau2 failed for good; what was finished is kept.
        SystemExit: 130 after Ctrl-C, with one line that says what is kept.
    """
    tau2, plan = plan_tau(config, policies, label)
    tasks = tuple(plan.tasks)
    directory = EvaluationDirectory.begin(out, plan)
    found: dict[str, dict[str, Any]] = {}
    with directory.claimed(), _stopped_plainly(directory):
        for policy in policies:
            folder = _folder(directory, policy.name)
            folder.mkdir(parents=True, exist_ok=True)
            episodes = read_episodes(folder, tasks, config.tau_bench.trials)
            if _anything_to_run(episodes, retry_errors):
                _run(config, policy, tau2, folder, out, len(episodes))
                episodes = read_episodes(folder, tasks, config.tau_bench.trials)
            price = find_price(policy.model, config.judge.prices)
            (out / "results" / f"{policy.name}.jsonl").unlink(missing_ok=True)
            for episode in episodes:
                directory.add(policy.name, rollout_result(episode, price))
            found[policy.name] = summary(episodes, read_judge_tokens(folder), policy.model, config, tau2.commit)
            _note_errors(policy.name, found[policy.name])
            directory.check_lost(max_lost_share)
        directory.write_summary({"label": directory.plan.label, "measurements": found})
    return directory


def plan_tau(config: DracoConfig, policies: Sequence[TauPolicy], label: str | None = None) -> tuple[Tau2, Plan]:
    """The tau2-bench that `evaluate_tau` would run, and what it would measure.

    Raises:
        ConfigError: something that is needed is not there.
    """
    if len({policy.name for policy in policies}) < len(policies):
        raise ConfigError(f"policies {', '.join(policy.name for policy in policies)}: expected different names")
    for policy in policies:
        jobs.read_keys(config.tau_bench, policy)
        if not policy.api:
            serve_command(config, policy, free_port(config.tau_bench.server.port), policy.adapter)
    tau2 = find_tau2(config.tau_bench)
    return tau2, _plan(config, policies, tau2, jobs.task_ids(config.tau_bench, tau2), label or config.setting)


def _folder(directory: EvaluationDirectory, name: str) -> Path:
    """Where tau2's files of a measurement lie."""
    return directory.path / "tau2" / name


@contextmanager
def _stopped_plainly(directory: EvaluationDirectory) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        kept = sum(count_episodes(_folder(directory, name)) for name in directory.plan.measurements)
        log.warning(
            "stopped; %d of %d episodes are in %s: the same command goes on from there",
            kept,
            directory.total,
            directory.path,
        )
        raise SystemExit(130) from None


def carried_temperatures(config: TauBenchConfig, policies: Sequence[TauPolicy]) -> dict[str, float | None]:
    """The temperature that the requests of each role carry; None, with a line, where they carry none."""
    models = {
        "agent": [policy.model for policy in policies if policy.api],
        "user": [config.user.model],
        "judge": [config.judge.model],
    }
    found: dict[str, float | None] = {}
    for role, names in models.items():
        told = getattr(config, role)
        refused = [name for name in names if told.temperature is not None and not sampling(told, name)]
        if refused:
            log.warning(
                "tau_bench.%s.temperature=%g is not sent, and the evaluation says null: %s takes none",
                *(role, told.temperature, ", ".join(refused)),
            )
        found[role] = None if refused else told.temperature
    return found


def _plan(config: DracoConfig, policies: Sequence[TauPolicy], tau2: Tau2, tasks: Sequence[str], label: str) -> Plan:
    settings = config.tau_bench.model_dump(mode="json", exclude=VOLATILE)
    for role in ("agent", "user", "judge", "embedder"):
        del settings[role]["api_key_env"]
    for role, temperature in carried_temperatures(config.tau_bench, policies).items():
        settings[role]["temperature"] = temperature
    del settings["server"]["port"], settings["server"]["start_timeout_seconds"]
    settings |= {f"weights.{policy.name}": policy.digest for policy in policies}
    settings |= {f"model.{policy.name}": policy.model for policy in policies}
    settings |= {"thinking": config.agent.thinking, "dtype": config.model.dtype, "tau2_commit": tau2.commit}
    return Plan(
        benchmark=BENCHMARK,
        split="full" if len(tasks) == len(tau2.tasks) else "part",
        label=label,
        policy=", ".join(policy.name for policy in policies),
        runs=config.tau_bench.trials,
        measurements=tuple(policy.name for policy in policies),
        tasks=dict.fromkeys(tasks),
        world=hashlib.sha256(" ".join((tau2.commit, *tasks)).encode()).hexdigest()[:16],
        split_size=len(tau2.tasks),
        scenarios=False,
        settings=settings,
    )


def _anything_to_run(episodes: Sequence[Episode], retry_errors: bool) -> bool:
    return any(episode.ended == MISSING or (retry_errors and episode.ended == INFRASTRUCTURE) for episode in episodes)


def _run(config: DracoConfig, policy: TauPolicy, tau2: Tau2, folder: Path, out: Path, planned: int) -> None:
    tau = config.tau_bench
    keys = jobs.read_keys(tau, policy)
    with ExitStack() as stack:
        tmp = stack.enter_context(PrivateTempDir())
        endpoint = None
        if not policy.api:
            withhold = list(jobs.key_variables(tau, policy).values())
            log.info("serving %s as %s", policy.name, SERVED)
            endpoint = stack.enter_context(served(config, policy, folder / "server.log", tmp, withhold))
        unreadable = [*tau2.solutions, str(out.resolve())]
        job = jobs.tau2_job(tau, tau2, policy, endpoint, folder.resolve(), unreadable=unreadable)
        environment = jobs.tau2_environment(tau, tau2, policy, endpoint, keys, tmp)
        scrubber = Scrubber([*keys.values(), *([endpoint.key] if endpoint else [])])
        bar = stack.enter_context(_bar())
        shown = bar.add_task(f"τ-bench {policy.name}", total=planned)
        run_job(
            job,
            tau2.python,
            environment,
            folder,
            tmp,
            tau,
            scrubber,
            lambda done: bar.update(shown, completed=done),
        )


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("episodes"),
        TimeElapsedColumn(),
        console=PlainConsole(stderr=True, soft_wrap=False),
        disable=not sys.stderr.isatty() or os.environ.get("TERM") == "dumb",
    )


def _note_errors(name: str, found: dict[str, Any]) -> None:
    lost = found["infrastructure_errors"] + found["missing"]
    if lost:
        log.warning(
            "%s: %d of %d episodes are infrastructure errors and %d are missing (%.1f %%); they count as failures",
            name,
            found["infrastructure_errors"],
            found["episodes"],
            found["missing"],
            100 * lost / found["episodes"],
        )
