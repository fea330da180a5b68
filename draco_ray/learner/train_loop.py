"""The Ray Train loop: one per worker, which runs the command log's commands until the run ends.

Ray Train starts the workers, joins them in a process group (gloo on CPUs, nccl on GPUs) and restarts all of them when
one dies. Their starting point comes from the command log, not from `ray.train.get_checkpoint`, because a checkpoint is
useful only together with its position in the log. `end_if_hung` ends a worker whose kernel hangs.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from draco_ray.config.machine import set_threads
from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.engine.actor import StallDetector
from draco_ray.errors import DracoError, LearnerError
from draco_ray.learner.command_log import StartPosition
from draco_ray.records import Adapter

LOOK_SECONDS = 5.0


def end_if_hung(watch: StallDetector, progress: Callable[[], int], end: Callable[[], object]) -> None:
    """Call ``end`` when the running call makes no progress. Run in a daemon thread, which lasts as long as the process.

    Ray Train's own health check is answered by another thread of the process, so it does not see that a kernel hangs.

    Args:
        watch: counts the calls.
        progress: a counter that grows while a call makes progress.
    """
    while not watch.stands_still(progress()):
        time.sleep(LOOK_SECONDS)
    end()


TELL_SECONDS = 10.0
"""Timeout for telling the command log why a worker ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """The settings that every worker needs to start."""

    log: Any
    """Handle of the CommandLog actor."""
    model: ModelConfig
    config: LearnerConfig
    seed: int
    storage: str
    """Folder for Ray Train's own files."""


class LogLost(Exception):
    """The command log has died: restarted workers would find no commands either."""


def train_loop(settings: dict[str, LoopSettings]) -> None:
    """Run the command log's commands until it ends or is lost: Ray Train's `train_loop_per_worker`."""
    given = settings["settings"]
    try:
        # Ask for the starting point first, because the command log counts the starts of the workers.
        start = _start(given.log)
        if start is not None:
            _run(given, start)
    except LogLost:
        # Do not raise LogLost again: Ray Train would restart the workers forever.
        return
    except Exception as error:
        with suppress(LogLost):
            _get(given.log.report_failure.remote(" ".join(f"{type(error).__name__}: {error}".split())))
        raise


def _start(log: Any) -> StartPosition | None:
    """The workers' starting point in the command log; None: the workers end at once.

    Rank 0 asks the log and broadcasts the answer. If each worker asked, only some might learn that the log has given
    up, and the others would wait for them in a collective operation.
    """
    import ray.train
    import ray.train.torch
    import torch.distributed

    context = ray.train.get_context()
    told: list[StartPosition | None] = [None]
    if context.get_world_rank() == 0:
        with suppress(LogLost):
            told = [_get(log.start.remote())]
    if context.get_world_size() > 1:
        torch.distributed.broadcast_object_list(told, device=ray.train.torch.get_device())
    return told[0]


def _get(reply: Any) -> Any:
    """The command log's reply. Raises: LogLost."""
    import ray

    try:
        return ray.get(reply)
    except ray.exceptions.ActorDiedError as error:
        raise LogLost from error


def _run(given: LoopSettings, start: StartPosition) -> None:
    import ray
    import ray.train.torch
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh

    from draco_ray.learner.context_parallel import context_group
    from draco_ray.learner.lora_learner import LoraLearner
    from draco_ray.learner.worker import LearnerWorker
    from draco_ray.observability.logs import set_private_umask

    # Keep the files private that Ray Train writes into the run directory.
    set_private_umask()
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    if given.config.gpus_per_worker == 0:
        set_threads(given.config.cpus_per_worker)
    device = ray.train.torch.get_device()
    sharded = given.config.sharding == "full" and workers > 1
    try:
        learner = LoraLearner(
            given.model,
            given.config,
            seed=given.seed,
            device=device,
            reduce=torch.distributed.all_reduce if workers > 1 else None,
            mesh=init_device_mesh(device.type, (workers,)) if sharded else None,
            context=context_group(workers, given.config.context_parallel, device.type),
        )
        if start.checkpoint is not None:
            snapshot = _get(given.log.read_checkpoint.remote(start.checkpoint))
            if isinstance(snapshot, LearnerError):
                raise snapshot
            learner.restore(snapshot, start.checkpoint)
    except DracoError as error:
        _get(given.log.fail.remote(str(error)))
        return
    worker = LearnerWorker(learner, rank=rank, workers=workers)
    seconds = given.config.hang_seconds
    watch = StallDetector(seconds, LOOK_SECONDS)
    hung = (watch, lambda: learner.policy.progress, partial(_end_hung, given.log, seconds))
    threading.Thread(target=end_if_hung, args=hung, name="hang watch", daemon=True).start()
    position = start.position
    while (command := _get(given.log.next.remote(position))) is not None:
        try:
            with watch.call():
                result = getattr(worker, command.method)(*ray.get(list(command.groups)), **command.options)
                if isinstance(result, Adapter):
                    result = ray.put(result)
        except (DracoError, ValueError, OSError) as error:
            # Return the error instead of raising it: a restarted worker would fail at the same command again.
            result = LearnerError(str(error))
        _get(given.log.finish.remote(rank, position, (result,)))
        position += 1
    _get(given.log.finish.remote(rank, position, (None,)))


def _end_hung(log: Any, seconds: float) -> None:
    """End this process; Ray Train then restarts all workers."""
    import ray

    with suppress(ray.exceptions.RayError):
        reason = f"a worker completed no layer for learner.hang_seconds={seconds:g}, so a kernel probably hangs"
        # ray.wait, because ray.get may wait for the thread that hangs.
        ray.wait([log.report_failure.remote(reason)], timeout=TELL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def fit(settings: LoopSettings) -> None:
    """Run the Ray Train loop on all workers; returns when it has ended.

    All workers restart when one dies, does not answer for ``learner.stall_seconds``, or hangs (`end_if_hung`), until
    the command log gives up.

    Raises: ray.train.TrainingFailedError if the workers cannot be started.
    """
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    class Trainer(TorchTrainer):
        """TorchTrainer without Ray Train's placement group cleaner, an actor that may end healthy workers.

        The cleaner asks Ray's state API for Ray Train's controller, and ends the workers if the API does not know it.
        Without a dashboard, Ray reports the default port for this API, where another Ray on the same machine may
        answer. Without the cleaner, `RayLoraLearner.stop` or the end of the job frees the workers' placement group.
        """

        def _create_default_callbacks(self) -> list[Any]:
            callbacks: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]  # mypy sees Ray Train v1's
            return [each for each in callbacks if type(each).__name__ != "PlacementGroupCleanerCallback"]

    config = settings.config
    # Timeout of Ray Train's health check, which another thread than the training thread answers.
    os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] = str(config.stall_seconds)
    on_gpu = config.gpus_per_worker > 0
    resources = {"CPU": config.cpus_per_worker} | ({"GPU": config.gpus_per_worker} if on_gpu else {})
    Trainer(
        train_loop,
        train_loop_config={"settings": settings},
        torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=config.workers, use_gpu=on_gpu, resources_per_worker=resources),
        run_config=RunConfig(  # type: ignore[call-arg]  # mypy sees Ray Train v1's
            name="ray_train",
            storage_path=settings.storage,
            # The command log counts failures since the last checkpoint; Ray Train would count over the whole run.
            failure_config=FailureConfig(max_failures=-1),
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
    ).fit()
