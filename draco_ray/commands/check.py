"""``draco check``: reports everything that would stop a run on this machine, all findings at once."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys

import psutil

from draco_ray.commands.plan import host_bytes, host_problems, memory_problems
from draco_ray.config.schema import DracoConfig, LearnerConfig
from draco_ray.environments.base import Environment, make_environment
from draco_ray.errors import ConfigError, DracoError, EnvironmentCrashed
from draco_ray.lab.planning.memory import GIB
from draco_ray.lab.planning.model_shape import model_shape
from draco_ray.lab.planning.step_time import Assumptions
from draco_ray.terminal import console, counted
from draco_ray.training.checks import CHECKS, CheckContext, check_root, run_checks
from draco_ray.training.session import open_judge
from draco_ray.training.sizes import ray_address

JUDGE_SECONDS = 60.0
"""Time that the judge has for its first answer, unless ``watch.start_seconds`` is set."""


def check(config: DracoConfig) -> None:
    """Check a configuration and print what was found, a line for each finding.

    Raises: ConfigError if there are findings.
    """
    start = CheckContext(config, console)
    found = run_checks(start, (*CHECKS, check_root, check_memory, check_task_start, check_judge))
    for number, error in enumerate(found, start=1):
        console.print(f"{number}. {error}")
    if (address := ray_address(config)) is not None:
        console.print(
            f"not checked: whether the Ray cluster at {address} has enough resources; the run checks this when it "
            "starts"
        )
    if found:
        raise ConfigError(f"{counted(len(found), 'finding')} would stop this run")
    console.print(f"ready to run: {len(start.prompts or ())} training tasks, model {start.config.model.path}")


def check_memory(start: CheckContext) -> None:
    """Check that learner, engines and Ray fit into the memory of the GPUs or of this machine."""
    config = start.config
    # The memory that a user's own learner needs is unknown.
    if not start.has_model or ray_address(config) is not None or config.learner.use != LearnerConfig().use:
        return
    try:
        shape = model_shape(config.model.path)
    except ConfigError as error:
        start.console.print(f"not checked: memory ({error})")
        return
    gpu = 0
    if config.learner.gpus_per_worker > 0 or config.engine.gpus_per_engine > 0:
        gpu = _gpu_bytes()
        if not gpu:
            return  # `check_machine` reports the missing GPU.
    short = host_problems(config, shape)
    problems = memory_problems(config, shape, gpu, int(Assumptions().reserved_gib * GIB)) + short
    needed, free = host_bytes(config, shape), psutil.virtual_memory().available
    if not short and needed > free:
        start.console.print(
            f"warning: engines, learner and Ray may need {needed / GIB:.1f} GiB of memory, but only {free / GIB:.1f} "
            "GiB are free"
        )
    if problems:
        raise ConfigError("; ".join(problems))


def _gpu_bytes() -> int:
    """Bytes of the first GPU's memory, 0 without one; read in a subprocess, since CUDA holds memory until exit."""
    code = "import torch; print(torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.replace("False", "0"))


def check_task_start(start: CheckContext) -> None:
    """Check that a task can be started, with its tools and servers."""
    config = start.config
    if start.environment is None or not (tasks := start.environment.tasks(config.data.train_split)):
        return
    task = tasks[0]
    environment = make_environment(config.environment, config.data, name="check")
    try:
        asyncio.run(_begin(environment, task, 2 * config.environment.start_timeout_seconds))
    except DracoError:
        raise
    except TimeoutError:
        raise EnvironmentCrashed(
            f"environment.use={config.environment.use}: task {task} did not start within twice "
            f"environment.start_timeout_seconds={config.environment.start_timeout_seconds:g}; raise the limit, or "
            "find out what the task's tools wait for"
        ) from None
    except Exception as error:
        # The environment is the user's code, which may raise any error.
        raise EnvironmentCrashed(
            f"environment.use={config.environment.use}: task {task} cannot be started: {type(error).__name__}: {error}"
        ) from error


async def _begin(environment: Environment, task: str, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            world = await environment.open(task)
            await world.close()
    finally:
        with contextlib.suppress(Exception):
            await environment.stop()


def check_judge(start: CheckContext) -> None:
    """Check that the judge answers."""
    watch = start.config.watch
    seconds = watch.start_seconds or JUDGE_SECONDS
    config = start.config.model_copy(update={"watch": watch.model_copy(update={"start_seconds": seconds})})
    with open_judge(config, start.console):
        pass
