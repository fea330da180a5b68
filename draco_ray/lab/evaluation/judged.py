"""`draco evaluate` in an environment without an evaluator: the judge's pass rate on a split, reported as such.

Judge calls and tables are those of `draco_ray.training.held_out`, written to a run directory without training steps.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

import ray
from rich.console import Console

from draco_ray.config.load import dump_config, load_config
from draco_ray.config.schema import DracoConfig
from draco_ray.environments.base import Environment
from draco_ray.errors import ConfigError
from draco_ray.lab.evaluation.policies import EvaluatedPolicy, load_adapter
from draco_ray.runs.directory import RunDirectory, lock_run
from draco_ray.runs.evaluations import JudgedRates, judged_rates
from draco_ray.terminal import PlainConsole
from draco_ray.training.cluster import release_start_lock
from draco_ray.training.held_out import HeldOutJudgeEvaluator
from draco_ray.training.progress import StepProgress
from draco_ray.training.resume import config_changes
from draco_ray.training.session import (
    Actors,
    open_run_session,
    resolve_config,
    start_actors,
    static_criteria,
    task_prompts,
)


def judge_policy(
    policy: EvaluatedPolicy,
    config: DracoConfig,
    *,
    split: str,
    runs: int,
    out: Path,
    cache: Path | None = None,
) -> dict[str, JudgedRates]:
    """Play a split with every checkpoint of a policy and have the judge score it; rollouts in ``out`` are reused.

    Args:
        policy: weights; API models are rejected.
        config: everything except the policy; ``data.eval_tasks`` limits the split to its first tasks.
        split: split of the environment's tasks.
        runs: rollouts per task.
        out: run directory of this evaluation.
        cache: a training run's judge reply cache, to get the same criteria; None uses a cache in ``out``.

    Returns: checkpoint -> its rates.
    Raises: ConfigError, and the errors of playing and judging; finished rollouts are kept in ``out``.
    """
    console = PlainConsole()
    use = config.environment.use
    if policy.api_model is not None:
        raise ConfigError(
            f"--policy {policy.name}: environment.use={use} has no evaluator; expected a model directory, because API "
            "models cannot be judged"
        )
    if config.algorithm.reward != "rubric" or config.judge.self_judge.enabled:
        raise ConfigError(
            f"draco evaluate: environment.use={use} has no evaluator, and the judge that replaces it "
            "needs algorithm.reward=rubric and judge.self_judge.enabled=false; set both"
        )
    measured = {"evaluate_before_after": True, "evaluation_runs": runs}
    config, environment = resolve_config(config.updated(data={"eval_split": split}, train=measured))
    run = _directory(out, config)
    console.print(f"environment.use={use} has no evaluator: the judge's pass rate is reported instead")
    with lock_run(run), open_run_session(config, run, console, cache=cache) as final:
        rates = asyncio.run(_judge(policy, final, environment, run, console))
    numbers = {name: asdict(found) for name, found in rates.items()}
    summary = {
        "measure": "judge's pass rate (a stand-in, because there is no evaluator)",
        "split": split,
        "checkpoints": numbers,
    }
    (run.path / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return rates


def _directory(path: Path, config: DracoConfig) -> RunDirectory:
    if not (path / "config.yaml").is_file():
        return RunDirectory.create(path, dump_config(config))
    run = RunDirectory.open(path)
    if changes := config_changes(load_config(str(path), trust=True), config):
        raise ConfigError(f"--out {path}: contains another evaluation: {'; '.join(changes)}; choose another folder")
    return run


async def _judge(
    policy: EvaluatedPolicy, config: DracoConfig, environment: Environment, run: RunDirectory, console: Console
) -> dict[str, JudgedRates]:
    actors, progress = Actors(config, run), StepProgress(console)
    measured = HeldOutJudgeEvaluator(
        config,
        actors,
        run,
        progress,
        console,
        prompts=lambda tasks: task_prompts(config, environment, tasks)[0],
        static=static_criteria(config),
    )
    rates = {}
    try:
        await start_actors(actors, config, console)
        release_start_lock()
        for checkpoint in policy.checkpoints:
            if checkpoint.adapter is not None:
                await actors.fleet.load(ray.put(load_adapter(checkpoint)))
            found = await measured.measure(checkpoint.version, checkpoint.version)
            rates[checkpoint.name] = judged_rates(found or [])
    finally:
        progress.stop()
        await actors.stop()
    return rates
