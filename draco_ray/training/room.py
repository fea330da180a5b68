"""Waiting until a run has room on a cluster that others use, or that an autoscaler has yet to grow."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import RayError
from rich.console import Console

from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ClusterError
from draco_ray.judging.outage import span
from draco_ray.placement import beside_the_driver

log = logging.getLogger(__name__)

Bundle = tuple[float, float]
"""GPUs and CPUs that one process asks for on one node."""
LOOK_SECONDS = 5.0
"""Between two looks at what is free."""
SAY_SECONDS = 60.0
"""Between two lines on what is waited for."""
PARTS = 1e-6
"""Ray counts resources in ten-thousandths; sums of floats are off by less than this."""
ASK_SECONDS = 5
"""In which Ray's head has to answer what waits for a place."""
TURN, NAMESPACE = "begins", "draco-ray"
"""Name of the actor of the run that begins, and where all runs of a cluster look for it."""
_turns: list[Any] = []
"""This process's."""


class Turn:
    """Is there for as long as a run begins, and ends with its driver: Ray gives its name to one at a time."""

    def __init__(self, who: str) -> None:
        self._who = who

    def who(self) -> str:
        """Whose it is."""
        return self._who


def wait_for_turn(config: DracoConfig, console: Console | None) -> None:
    """Return once no other run of the cluster begins, and let none begin until `begun`.

    Of two that count what is free at the same moment both would find room, and each might get half of what it needs.

    Raises:
        ClusterError: another one begins for longer than ``watch.start_seconds``.
    """
    me = f"{config.run.name or config.setting} on {platform.node()}, process {os.getpid()}"
    asked = ray.remote(Turn).options(
        name=TURN, namespace=NAMESPACE, num_cpus=0, scheduling_strategy=beside_the_driver()
    )
    began, said, limit = time.monotonic(), -float("inf"), config.watch.start_seconds
    while True:
        try:
            _turns[:] = [asked.remote(me)]
            return
        except ValueError:
            other = _whose_turn()
        now = time.monotonic()
        if limit is not None and now - began >= limit:
            raise ClusterError(
                f"another run still begins on the Ray cluster after watch.start_seconds={limit:g}: {other}"
            )
        if console is not None and now - said >= SAY_SECONDS:
            said = now
            line = f"waiting until another run has begun on the Ray cluster, for {span(now - began)}: {other}"
            console.print(line)
        time.sleep(LOOK_SECONDS)


def begun() -> None:
    """Let the next run count what is free: the processes of this one have their places."""
    while _turns:
        # One that is left of a run which ended before it had begun may be of a Ray that is gone.
        with contextlib.suppress(RayError):
            ray.kill(_turns.pop())


def _whose_turn() -> str:
    try:
        return str(ray.get(ray.get_actor(TURN, namespace=NAMESPACE).who.remote(), timeout=ASK_SECONDS))
    except (ValueError, RayError) as error:  # it has just ended, or has no process yet
        log.debug("the run that begins does not say which it is: %s", error)
        return "it does not say which"


def bundles(config: DracoConfig, *, judges: bool = True) -> dict[str, list[Bundle]]:
    """What the processes that a run begins with ask for, by what they are called; those that need none are left out."""
    engine, learner, environment, local = config.engine, config.learner, config.environment, config.judge.local
    sets = 2 if config.train.evaluate_before_after else 1
    rollouts = sets * environment.min_workers
    served = local.replicas if local.enabled and judges and config.algorithm.reward == "rubric" else 0
    asked: dict[str, list[Bundle]] = {
        "engines": [(engine.gpus_per_engine, engine.cpus_per_engine)] * engine.fewest,
        "learner workers": [(learner.gpus_per_worker, learner.cpus_per_worker)] * learner.workers,
        "judge servers": [(local.gpus_per_replica, local.cpus_per_replica)] * served,
        "rollout workers": [(0.0, environment.cpus_per_worker)] * rollouts,
    }
    return {name: each for name, each in asked.items() if each and any(each[0])}


def without_place(asked: Mapping[str, Sequence[Bundle]], free: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """How many processes of each kind no node has room for; the largest are placed first, where few GPUs are left.

    So GPUs that are free but lie on too many nodes are seen: an engine of two needs both on one.
    """
    left = [[node.get("GPU", 0.0), node.get("CPU", 0.0)] for node in free]
    missing: Counter[str] = Counter()
    every = sorted(((bundle, name) for name, of in asked.items() for bundle in of), reverse=True)
    for (gpus, cpus), name in every:
        fits = [node for node in left if node[0] + PARTS >= gpus and node[1] + PARTS >= cpus]
        if not fits:
            missing[name] += 1
            continue
        node = min(fits, key=lambda each: each[0])
        node[0], node[1] = node[0] - gpus, node[1] - cpus
    return dict(missing)


def wait_for_room(
    config: DracoConfig,
    console: Console | None,
    *,
    judges: bool = True,
    autoscaled: bool = False,
    free: Callable[[], Sequence[Mapping[str, float]]] | None = None,
    ask: Callable[[Sequence[Mapping[str, float]]], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Return once every process of a run has a place on some node, the autoscaler having been asked for them all.

    What is free is counted and not what there is: of two runs that each hold half of what they need, none would end.

    Args:
        config: the run's.
        console: is told what is waited for; None for nobody.
        judges: as of `draco_ray.training.preflight.check_resources`.
        autoscaled: whether nodes come as they are asked for.
        free: what is free on each node; None asks Ray. The next three are for tests, too.
        ask: asks the autoscaler for bundles.
        clock: seconds.
        sleep: waits for so many.

    Raises:
        ClusterError: there is no room after ``watch.start_seconds``.
    """
    free, ask = free or _free, ask or (lambda wanted: request_resources(bundles=[dict(each) for each in wanted]))
    asked, began, said, requested = bundles(config, judges=judges), clock(), -float("inf"), False
    try:
        while missing := without_place(asked, found := free()):
            if autoscaled and not requested:
                requested = True
                ask([{"GPU": gpus, "CPU": cpus} for of in asked.values() for gpus, cpus in of])
            waited, limit = clock() - began, config.watch.start_seconds
            waiting = _waiting(asked, missing, found)
            if limit is not None and waited >= limit:
                raise ClusterError(f"no room on the Ray cluster after watch.start_seconds={limit:g}: {waiting}")
            if console is not None and clock() - said >= SAY_SECONDS:
                said = clock()
                nodes = "nodes were asked for" if autoscaled else "another run may hold the rest (`ray status`)"
                line = f"waiting for room on the Ray cluster, for {span(waited)}: {waiting}; {nodes}"
                console.print(line)
            sleep(LOOK_SECONDS)
    finally:
        if requested:
            # The run's own processes ask from here on.
            ask([])


def unplaced() -> str:
    """What waits for a node with room for it, e.g. ``no node has room for 2 x 1 CPU``; empty where nothing is known to.

    Of every run on the cluster. Waits for Ray's head, at most `ASK_SECONDS`.
    """
    try:
        status = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=ASK_SECONDS)
    except Exception as error:  # a head that is gone is said elsewhere
        log.debug("Ray's head does not say what waits for a place: %s", error)
        return ""
    demands = [*status.resource_demands.placement_group_demand, *status.resource_demands.ray_task_actor_demand]
    counts: Counter[str] = Counter()
    for demand in demands:
        for asked in demand.bundles_by_count:
            named = [f"{asked.bundle[kind]:g} {kind}" for kind in ("GPU", "CPU") if asked.bundle.get(kind)]
            counts[" and ".join(named)] += asked.count
    del counts[""]
    return f"no node has room for {', '.join(f'{count} x {what}' for what, count in counts.items())}" if counts else ""


def _free() -> list[Mapping[str, float]]:
    """Free resources of each node."""
    status = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=ASK_SECONDS)
    return [node.available_resources() for node in (*status.active_nodes, *status.idle_nodes)]


def _waiting(
    asked: Mapping[str, Sequence[Bundle]], missing: Mapping[str, int], free: Sequence[Mapping[str, float]]
) -> str:
    parts = []
    for name, number in missing.items():
        gpus, cpus = asked[name][0]
        parts.append(f"{number} of {len(asked[name])} {name} ({gpus:g} GPUs and {cpus:g} CPUs each, on one node)")
    gpus_free, cpus_free = (sum(node.get(kind, 0) for node in free) for kind in ("GPU", "CPU"))
    return f"{', '.join(parts)} have no place; free are {gpus_free:g} GPUs and {cpus_free:g} CPUs on {len(free)} nodes"
