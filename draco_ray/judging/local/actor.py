"""Ray actors of `draco_ray.judging.local.servers`: a server, the pool, and the client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.actors import LEASE_GRACE_SECONDS, OPTIONS, NamedActor
from draco_ray.judging.completion import Request
from draco_ray.judging.endpoint import Borrowed, Server
from draco_ray.judging.local.server import VllmJudgeServer
from draco_ray.judging.local.servers import JudgeServers
from draco_ray.judging.phases import phase_rank
from draco_ray.observability.logs import start_run_log
from draco_ray.placement import driver_node_affinity


class JudgeServerActor:
    """One `VllmJudgeServer` on the node that Ray chose."""

    def __init__(self, config: JudgeConfig, log: Path) -> None:
        start_run_log()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._server = VllmJudgeServer(config, ray.util.get_node_ip_address(), log)

    def look(self) -> Server | str:
        """See `VllmJudgeServer.look`."""
        return self._server.look()

    def end(self) -> None:
        """End the server."""
        self._server.end()


class JudgeServersActor(JudgeServers):
    """`JudgeServers` for callers in other processes."""

    def __init__(self, config: JudgeConfig, logs: Path, run_name: str) -> None:
        start_run_log()
        local = config.local
        remote = ray.remote(JudgeServerActor)

        def start(number: int) -> Any:
            return remote.options(
                name=f"JudgeServer-{number}@{run_name}",
                num_gpus=local.gpus_per_replica,
                num_cpus=local.cpus_per_replica,
                # Ray restarts the actor on another node if its node is lost.
                max_restarts=-1,
                max_task_retries=-1,
            ).remote(config, logs / f"judge-server-{number}.log")

        super().__init__(start, local, lease_seconds=config.request_timeout_seconds + LEASE_GRACE_SECONDS)

    async def ready(self) -> None:
        """Return once a server answers.

        Raises:
            JudgeUnavailable: no server comes up.
        """
        self.release((await self.acquire()).number)


class ServersClient(NamedActor):
    """A `draco_ray.judging.endpoint.Servers` that calls the actor."""

    @asynccontextmanager
    async def borrow(self, request: Request) -> AsyncIterator[Borrowed]:
        """See `Servers.borrow`."""
        waiting = self.acquire(request.group, phase_rank(request.phase))
        borrowed: Borrowed = await self.borrowed(waiting, lambda unused: self.release(unused.number))
        try:
            yield borrowed
        finally:
            self._handle.release.remote(borrowed.number, borrowed.lost)


def start_judge_servers(config: JudgeConfig, run: Path, run_name: str) -> tuple[Any, ServersClient] | None:
    """Start the judge servers of a run; None if the judge is served elsewhere.

    Returns: the handle, which keeps the servers alive, and the client.
    """
    if not config.local.enabled:
        return None
    name = f"JudgeServers@{run_name}"
    actor: Any = ray.remote(JudgeServersActor)
    options = {"name": name, "scheduling_strategy": driver_node_affinity(), **OPTIONS}
    handle = actor.options(**options).remote(config, run / "logs", run_name)
    # The servers load while the rest of the run starts.
    handle.open.remote()
    return handle, ServersClient(name)
