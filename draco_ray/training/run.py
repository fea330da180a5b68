"""The driver of a training run: checks, the run directory, and clean-up.

The driver holds configuration, summaries and references; trajectories, samples and weights stay in the object store.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from rich.console import Console

from draco_ray.config.ineffective_keys import check_training_keys
from draco_ray.config.load import dump_config, load_config
from draco_ray.config.schema import DracoConfig
from draco_ray.environments.base import Environment, make_environment
from draco_ray.errors import ClusterError, ConfigError
from draco_ray.judging.build import file_digests
from draco_ray.observability.logs import start_run_log, stop_run_log
from draco_ray.records import Message
from draco_ray.runs.directory import RunDirectory, as_store_errors, lock_run
from draco_ray.runs.evaluations import read_evaluations, read_judged
from draco_ray.runs.manifest import MANIFEST_FILE, absent_tables, other_versions
from draco_ray.runs.remote.location import RunLocation, begun, open_working_folder, parse_run_location, run_location
from draco_ray.terminal import PlainConsole
from draco_ray.training.checks import CHECKS, Check, CheckContext, check_root, raise_findings, run_checks
from draco_ray.training.cluster import wait_for_head_failure
from draco_ray.training.held_out import is_complete
from draco_ray.training.preflight import check_disk, check_paid_replies, check_replies
from draco_ray.training.resume import (
    FILE_PREFIX,
    HELD_OUT,
    PROMPTS_FILE,
    TASKS_FILE,
    StartPoint,
    adopt_config,
    adopt_tasks,
    allowed_changes,
    edited_names,
    edited_tasks,
    rewind,
    write_prompts,
)
from draco_ray.training.session import open_run_session, training_session
from draco_ray.training.sizes import ray_address
from draco_ray.training.trainer import TaskOrder
from draco_ray.training.watchdog import PeakMemory, cancel_on_loss


def train(config: DracoConfig, console: Console | None = None, checks: Sequence[Check] = ()) -> Path:
    """Run a whole training run.

    Args:
        config: of the run.
        console: shows its progress.
        checks: further checks before the run starts; a run that has begun is continued without them.

    Returns: the run directory.
    Raises:
        DracoError: one line; everything finished before the error is in the run directory.
    """
    console = console or PlainConsole()
    config, prompts, order = _checked(config, console, (*CHECKS, check_root, *checks))
    name = config.run.name or name_of(config.setting, datetime.now())
    place = run_location(config.run, name)
    with open_working_folder(place, console.print, new=True) as path:
        run = _directory(path, config)
        where = f"environment {config.environment.use}, {len(prompts)} training tasks"
        console.print(f"{name}: setting {config.setting}, model {config.model.path}, {where}")
        others = _other_digests(config)
        with lock_run(run):
            with as_store_errors(run.path):
                if run.config_text() != dump_config(config):
                    run.write_config(dump_config(config))
                adopt_tasks(run, prompts, order.rules, 0, console)
                write_prompts(run, prompts, others)
            return _train(config, prompts, order, run, StartPoint(), console, place.url)


def name_of(setting: str, begins: datetime) -> str:
    """A unique name for a run without ``run.name``, even among runs started in the same second on many machines."""
    return f"{setting}-{begins:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _directory(path: Path, config: DracoConfig) -> RunDirectory:
    """A new run directory, or the one of a run that never began, so that a refused start does not use up the name."""
    if path.is_dir() and (path / "config.yaml").is_file() and (run := RunDirectory.open(path)).untouched:
        return run
    return RunDirectory.create(path, dump_config(config))


def resume_or_start(
    config: DracoConfig,
    source: str,
    overrides: Sequence[str] = (),
    setting: str | None = None,
    *,
    allow_changed: bool = False,
    trust: bool = False,
    console: Console | None = None,
    checks: Sequence[Check] = (),
) -> Path:
    """Continue the run of ``run.name`` if it has begun, else start it: one command that can be repeated.

    Args:
        config: the result of ``source``, ``overrides`` and ``setting``; the other arguments are those of `resume`.
        checks: see `train`.

    Returns: the run directory.
    Raises:
        DracoError: as `train` and `resume` do; ConfigError if ``run.name`` is not set.
    """
    if config.run.name is None:
        raise ConfigError(
            "--resume-or-start: run.name is not set; set run.name, and set run.root to a folder that outlives the job"
        )
    place = run_location(config.run, config.run.name)
    if not begun(place, (console or PlainConsole()).print):
        return train(config, console, checks)
    return resume(place, source, overrides, setting, allow_changed=allow_changed, trust=trust, console=console)


def resume(
    directory: Path | str | RunLocation,
    source: str | None = None,
    overrides: Sequence[str] = (),
    setting: str | None = None,
    *,
    allow_changed: bool = False,
    trust: bool = False,
    console: Console | None = None,
) -> Path:
    """Continue a stopped run where it stopped, even in the middle of a step.

    Args:
        directory: the run directory; or the URL of the run's copy in an object store, which is downloaded if this
            machine's folder is missing or older; or a `RunLocation` of both.
        source: a preset or YAML file that describes the same run; None: the configuration stored in the run directory.
        overrides, setting, trust: see `draco_ray.config.load.load_config`.
        allow_changed: continue even if the configuration differs from the stored one.
        console: shows the run's progress.

    Returns: the run directory.
    Raises:
        DracoError: as `train` does; ConfigError also if the configuration has changed and ``allow_changed`` is False.
    """
    console = console or PlainConsole()
    if not isinstance(directory, RunLocation):
        here = load_config(None, [each for each in overrides if each.startswith("run.local=")]).run.local
        directory = parse_run_location(directory, here, trust=trust)
    with open_working_folder(directory, console.print) as path, lock_run(run := RunDirectory.open(path.resolve())):
        old = load_config(str(run.path), trust=True)
        config = load_config(source or str(run.path), overrides, setting, trust=trust)
        check_training_keys(overrides, config)
        config, prompts, order = _checked(config, console, CHECKS)
        others = _other_digests(config)
        with as_store_errors(run.path):
            check_disk(config, run.path)
            check_paid_replies(run, old, config)
            edited, edited_others = edited_tasks(run, prompts), edited_names(run, others)
            changes = allowed_changes(run, old, config, edited_others, allow_changed=allow_changed)
            lost = (
                []
                if run.untouched
                else [name for name in (TASKS_FILE, PROMPTS_FILE, MANIFEST_FILE) if not (run.path / name).exists()]
            )
            # Recorded rollouts lack the evaluator's verdict, so if that verdict is the reward they are played again.
            reuse = not changes and not edited and config.algorithm.reward != "outcome"
            start = rewind(run, reuse=reuse, learner=config.learner.use)
            for damage in start.damage:
                console.print(damage)
            adopt_config(run, config)
            write_prompts(run, prompts, others)
            order.parts = adopt_tasks(run, prompts, order.rules, start.step, console)
        for line in run.metrics():
            order.note(line["step"], line.get("solved_tasks") or ())
        last = _steps(config, order)
        if start.step > last or (start.step == last and _measured(run, config, last)):
            beyond = f"; the configuration ends it at step {last}" if start.step > last else ""
            console.print(f"{run.path.name}: already finished at step {start.step}{beyond}")
            return run.path
        console.print(f"{run.path.name}: continues after step {start.step}")
        if edited:
            console.print(
                f"training tasks: the prompts of {len(edited)} tasks have changed, first {edited[0]}; rollouts of the "
                "interrupted step are played again"
            )
        if lost:
            console.print(
                f"missing in {run.path}: {', '.join(lost)}; restore them, otherwise edited tasks and changed files of "
                "earlier steps are not noticed"
            )
        if absent := absent_tables(run):
            console.print(absent)
        if HELD_OUT in edited_others:
            console.print(
                f"changed: the held-out tasks of {config.data.eval_split}, or their ground truth; evaluations "
                "before and after this change are not comparable"
            )
        if versions := other_versions(run):
            console.print(f"earlier steps were made with {versions}; results may differ in the last digits")
        for change in changes:
            console.print(f"changed: {change}")
        return _train(config, prompts, order, run, start, console, directory.url)


def _checked(
    config: DracoConfig, console: Console, checks: Sequence[Check]
) -> tuple[DracoConfig, dict[str, tuple[Message, ...]], TaskOrder]:
    """The resolved configuration, the prompts of usable tasks, and the order of the tasks."""
    start = CheckContext(config, console)
    raise_findings(run_checks(start, checks))
    assert start.prompts is not None
    assert start.order is not None
    return start.config, start.prompts, start.order


def _other_digests(config: DracoConfig) -> dict[str, str]:
    """`file_digests`, and a digest of the held-out tasks with their ground truth, if they are measured."""
    digests = {}
    if config.algorithm.reward == "rubric":
        digests = {f"{FILE_PREFIX}{name}": digest for name, digest in file_digests(config).items()}
    if config.train.evaluate_before_after:
        environment, tasks = _held_out_tasks(config)
        digests[HELD_OUT] = environment.digest(tasks)
    return digests


def _held_out_tasks(config: DracoConfig) -> tuple[Environment, list[str]]:
    environment = make_environment(config.environment, config.data)
    return environment, environment.tasks(config.data.eval_split)[: config.data.eval_tasks]


def _steps(config: DracoConfig, order: TaskOrder) -> int:
    train = config.train
    return train.steps if train.steps is not None else order.last_step(train.epochs)


def _measured(run: RunDirectory, config: DracoConfig, step: int) -> bool:
    """Whether the evaluation after the last step is done or disabled."""
    if not config.train.evaluate_before_after:
        return True
    (environment, tasks), policy = _held_out_tasks(config), (step, config.data.eval_split)
    if environment.evaluates:
        return policy in read_evaluations(run)
    return is_complete(read_judged(run).get(policy, []), tasks, config)


def _train(
    config: DracoConfig,
    prompts: Mapping[str, tuple[Message, ...]],
    order: TaskOrder,
    run: RunDirectory,
    start: StartPoint,
    console: Console,
    url: str | None = None,
) -> Path:
    check_disk(config, run.path)
    check_replies(config, run.path)
    # Start the log before Ray, whose processes inherit the environment variable that names the run directory.
    start_run_log(run.path)
    try:
        # The URL works on other hosts, too.
        with open_run_session(config, run, console, again=url or str(run.path)) as final:
            asyncio.run(_run(final, prompts, order, run, start, console))
    finally:
        stop_run_log()
    return run.path


async def _run(
    config: DracoConfig,
    prompts: Mapping[str, tuple[Message, ...]],
    order: TaskOrder,
    run: RunDirectory,
    start: StartPoint,
    console: Console,
) -> None:
    """Start the actors, train, and measure held-out tasks before and after."""
    started, last = time.monotonic(), _steps(config, order)

    async def work() -> None:
        async with training_session(config, prompts, order, run, start, console) as trainer:
            console.print(f"actors ready in {time.monotonic() - started:.0f}s")
            await cancel_on_loss(trainer.run_steps(start.step, last), trainer.fleet.failure())

    async def head_lost() -> None:
        try:
            await wait_for_head_failure()
        except ClusterError as error:
            # Print the error at once, because the clean-up may take a while.
            console.print(str(error))
            raise

    with PeakMemory() as memory:
        await cancel_on_loss(work(), head_lost(), cancelled=partial(_stopping, console))
    used = f"{memory.peak_bytes / 2**30:.1f} GiB {'in total' if ray_address(config) is None else 'of the driver'}"
    console.print(f"done in {time.monotonic() - started:.0f}s, peak memory {used}: {run.path}")
    console.print(f"to see the run: draco report {shlex.quote(str(run.path))}")


def _stopping(console: Console) -> None:
    """Print "stopping…" at once, since finishing and writing what is running takes a while."""
    console.print("stopping…")
    # A second interrupt abandons futures; do not print a stack trace for each of them.
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
