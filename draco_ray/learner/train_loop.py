"""The Ray Train loop: one per worker, alive for a whole run, which executes the commands of the feed.

Ray Train starts the workers, joins them in a process group (gloo on CPUs, nccl on GPUs) and restarts them when one
dies. Where they begin is asked from the feed and not from `ray.train.get_checkpoint`: a checkpoint is useful only with
its position in the feed, and both must change in one place. `PassWatch` ends a worker whose passes hang.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from draco_ray.config.machine import set_threads
from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.engine.actor import CoreWatch
from draco_ray.errors import DracoError
from draco_ray.learner.base import Failed, Start, Stop

LOOK_SECONDS = 5.0


class PassWatch:
    """Looks from a thread of its own whether a command comes any further.

    Ray Train asks the process, which answers beside the thread that computes; so it sees a process that is stopped, and
    not a pass that is.
    """

    def __init__(
        self,
        seconds: float,
        progress: Callable[[], int],
        end: Callable[[], object],
        *,
        look_seconds: float | None = None,
    ) -> None:
        """
        Args:
            seconds: without progress, after which a command counts as hung.
            progress: grows while a command comes further.
            end: called then, once, in the watch's thread.
            look_seconds: between two looks; None: `LOOK_SECONDS`.
        """
        self._look_seconds = LOOK_SECONDS if look_seconds is None else look_seconds
        self._watch = CoreWatch(seconds, self._look_seconds)
        self._progress, self._end = progress, end

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look for as long as the block runs."""
        over = threading.Event()
        thread = threading.Thread(target=self._look, args=(over,), name="pass watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def command(self) -> Iterator[None]:
        """A command is carried out inside the block."""
        with self._watch.call():
            yield

    def _look(self, over: threading.Event) -> None:
        while not over.wait(self._look_seconds):
            if self._watch.stands_still(self._progress()):
                self._end()
                return


TELL_SECONDS = 10.0
"""For the feed to take why a worker ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What every worker needs to begin."""

    feed: Any
    """Handle of the LearnerFeed actor."""
    node: str
    """Ray's id of the driver's."""
    model: ModelConfig
    config: LearnerConfig
    seed: int
    storage: str
    """Folder for Ray Train's own files."""


class FeedLost(Exception):
    """The feed has died, and with it what there was to do: workers that are started anew would find none either."""


def train_loop(settings: dict[str, LoopSettings]) -> None:
    """Carry out the feed's commands until Stop, or until there is no feed: Ray Train's `train_loop_per_worker`."""
    given = settings["settings"]
    try:
        # Before anything that can fail, because the feed counts the starts.
        start = _start(given.feed)
        if start is not None:
            _carry_out(given, start)
    except FeedLost:
        # No error: Ray Train would start workers without end.
        return
    except Exception as error:
        with suppress(FeedLost):
            _told(given.feed.trouble.remote(_one_line(error)))
        raise


def _start(feed: Any) -> Start | None:
    """Where the workers begin; None: nowhere.

    One asks and tells the others. If each asked, some might hear that the workers are given up and others, who asked
    sooner, not: these would wait in a collective operation for those that have ended.
    """
    import ray.train
    import ray.train.torch
    import torch.distributed

    context = ray.train.get_context()
    told: list[Start | None] = [None]
    if context.get_world_rank() == 0:
        with suppress(FeedLost):
            told = [_told(feed.start.remote())]
    if context.get_world_size() > 1:
        torch.distributed.broadcast_object_list(told, device=ray.train.torch.get_device())
    return told[0]


def _told(answer: Any) -> Any:
    """What the feed says. Raises: FeedLost."""
    import ray

    try:
        return ray.get(answer)
    except ray.exceptions.ActorDiedError as error:
        raise FeedLost from error


def _carry_out(given: LoopSettings, start: Start) -> None:
    import ray
    import ray.train.torch
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh

    from draco_ray.learner.carried import checkpoints_of
    from draco_ray.learner.context import rows_shared
    from draco_ray.learner.lora_learner import LoraLearner
    from draco_ray.learner.worker import LearnerWorker
    from draco_ray.observability.logs import private_files

    private_files()
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    if given.config.gpus_per_worker == 0:
        set_threads(given.config.cpus_per_worker)
    checkpoints = checkpoints_of(given.node)
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
            context=rows_shared(workers, given.config.context_parallel, device.type),
        )
        if start.checkpoint is not None:
            checkpoints.load(learner, Path(start.checkpoint))
    except DracoError as error:
        _told(given.feed.fail.remote(str(error)))
        return
    worker = LearnerWorker(
        learner,
        rank=rank,
        workers=workers,
        fetch=lambda groups: ray.get(list(groups)),
        publish=ray.put,
        save=checkpoints.save,
    )
    seconds = given.config.hang_seconds
    watch = PassWatch(seconds, lambda: learner.policy.progress, partial(_end_hung, given.feed, seconds))
    position = start.position
    with watch.watching():
        while True:
            command = _told(given.feed.next.remote(position))
            try:
                with watch.command():
                    answer = worker.execute(command)
            except (DracoError, ValueError, OSError) as error:
                # Answered rather than raised: a worker started anew would fail at the same command again.
                answer = Failed(message=str(error))
            if isinstance(answer, Future):
                answer.add_done_callback(partial(_send_later, given.feed, rank, position))
            else:
                _told(given.feed.answer.remote(rank, position, (answer,)))
            if isinstance(command, Stop):
                return
            position += 1


def _end_hung(feed: Any, seconds: float) -> None:
    """End this process, which nothing else may do: Ray Train then starts all workers anew."""
    import ray

    with suppress(ray.exceptions.RayError):
        told = feed.trouble.remote(f"a worker ran no layer for learner.hang_seconds={seconds:g}: its kernel hangs")
        # Not its answer, which waits for whoever reads something in this process, and that is who may hang.
        ray.wait([told], timeout=TELL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _send_later(feed: Any, rank: int, position: int, done: Future[Any]) -> None:
    error = done.exception()
    answer = done.result() if error is None else Failed(message=_one_line(error))
    with suppress(FeedLost):
        _told(feed.answer.remote(rank, position, (answer,)))


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def fit(settings: LoopSettings) -> None:
    """Run the loop on all workers until it ends; blocks. Workers that fail are started anew as long as the feed says.

    So are those of which one does not answer for ``learner.stall_seconds``, or stands still (`PassWatch`).

    Raises: ray.train.TrainingFailedError when they cannot be started.
    """
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    class Trainer(TorchTrainer):
        """Without the actor that asks Ray's state API whether the controller lives, and else ends the workers.

        A Ray without a dashboard names the default port as that API's, where another Ray of the machine may listen,
        which knows nothing of the controller; so healthy workers were ended. Their place is given back by
        `RayLoraLearner.stop`, or with the job.
        """

        def _create_default_callbacks(self) -> list[Any]:
            callbacks: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]  # mypy sees Ray Train v1's
            return [each for each in callbacks if type(each).__name__ != "PlacementGroupCleanerCallback"]

    config = settings.config
    # Ray Train's controller asks every process how it does, beside the thread that trains, and takes it from here.
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
            # The feed counts: Ray Train would count over the whole run, however many weeks it takes.
            failure_config=FailureConfig(max_failures=-1),
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
    ).fit()
