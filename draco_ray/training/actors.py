"""The actors of a run: engines, judge, rollout workers and run store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import ray

from draco_ray.config.schema import DracoConfig
from draco_ray.engine.actor import EngineClient, start_policy_engines
from draco_ray.engine.fleet import EngineFleet
from draco_ray.engine.tokenizer import load_tokenizer
from draco_ray.judging.actors import requests_name, start_judge_limiter, start_replies
from draco_ray.judging.judge_context import context_tokens, uses_self_judge
from draco_ray.judging.local.actor import start_judge_servers
from draco_ray.judging.outage import Pause
from draco_ray.judging.pool import JudgePool
from draco_ray.judging.worker import PolicyJudge, judge_starter
from draco_ray.rollout.pool import RolloutPool, RolloutWorkers
from draco_ray.rollout.tokens import EnginePolicies
from draco_ray.rollout.worker import EPISODES, rollout_starter
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store_actor import start_run_store
from draco_ray.training.preflight import check_session
from draco_ray.training.watchdog import Pending


async def _awaited(work: Awaitable[Any], pending: Pending, what: str) -> Any:
    with pending.of(what):
        return await work


class Actors:
    """Engines, judge, rollout workers and run store of one run."""

    def __init__(
        self,
        config: DracoConfig,
        run: RunDirectory,
        *,
        engines: Sequence[Any] | None = None,
    ) -> None:
        """Create them; they begin to load at once.

        Args:
            config: the final one, of `draco_ray.training.session.opened`.
            run: where the run store writes; its name is part of the actors' names.
            engines: policy engine actors that exist already, as many and under the same names; None starts vLLM.

        Raises:
            ConfigError, ClusterError: the cluster cannot carry the run (`draco_ray.training.preflight`).
        """
        check_session(config, run.path)
        judge, name = config.judge, run.path.name
        self._config = config
        self._name = name
        self._kept = run.path.resolve() / EPISODES
        self._ready = False
        length = config.agent.max_prompt_length + config.agent.max_response_length
        if uses_self_judge(config):
            length = max(length, context_tokens(config))
        self.fleet = EngineFleet(
            engines
            if engines is not None
            else start_policy_engines(
                config.engine,
                config.model,
                max_model_len=length,
                lora_rank=config.learner.lora_rank,
                seed=config.seed,
                run_name=name,
                staleness=config.train.staleness,
            ),
            config.engine,
        )
        number = len(self.fleet.engines)
        self.clients = [EngineClient(index, name, number) for index in range(number)]
        judged = config.algorithm.reward == "rubric"
        self._limiter = start_judge_limiter(judge, run.path, name) if judged else None
        self._servers = start_judge_servers(judge, run.path, name) if judged else None
        self._replies = start_replies(judge, name) if judged else None
        self._tokenizer = load_tokenizer(config.model.path, config.model.chat_template)
        policy = PolicyJudge(samplers=self.clients, tokenizer=self._tokenizer, name=Path(config.model.path).name)
        leases = None if self._limiter is None else self._limiter[1]
        servers = None if self._servers is None else self._servers[1]
        replies = None if self._replies is None else self._replies[1]
        own = not requests_name(judge, run.path)
        starter = judge_starter(judge, policy, leases, name, servers, replies, own_replies=own)
        self.judges = JudgePool(starter, judge)
        if judged:
            self.judges.open()
        self.workers = self._rollout_workers(ground_truth=config.algorithm.reward == "outcome")
        self.store = start_run_store(run.path, name, requests_name(judge, run.path))

    async def start(self, pending: Pending | None = None) -> None:
        """Return once the judge and every engine answer; ``pending`` is told what is waited for.

        Raises:
            JudgeUnavailable: the judge cannot be reached from where its worker runs; not asked where no rubric is used.
            ClusterError: no judge worker came up.
            EngineError: the model cannot be loaded.
        """
        pending = pending or Pending()
        ready: list[Awaitable[Any]] = [_awaited(self.fleet.start(), pending, "the engines' start")]
        if self._config.algorithm.reward == "rubric":
            ready.insert(
                0, _awaited(self.judges.ready(), pending, "the first judge worker, and the judge's answer to it")
            )
        if self._servers is not None:
            ready.insert(0, _awaited(self._servers[0].ready.remote(), pending, "the first of the judge's vLLM servers"))
        await asyncio.gather(*ready)
        self._ready = True

    async def judge_pause(self) -> Pause | None:
        """The outage of the judge, if there is one and the limiter is there to tell."""
        if self._limiter is None:
            return None
        try:
            pause: Pause | None = await self._limiter[0].pause.remote()
        except ray.exceptions.RayError:
            return None
        return pause

    def evaluation_workers(self) -> RolloutWorkers:
        """New workers for ``environment.slots`` that see the ground truth, beside those of training."""
        return self._rollout_workers(ground_truth=True, kind="EvaluationWorker")

    def _rollout_workers(self, *, ground_truth: bool, kind: str = "RolloutWorker") -> RolloutWorkers:
        config = self._config
        start = rollout_starter(
            EnginePolicies(samplers=self.clients, tokenizer=self._tokenizer),
            agent=config.agent,
            environment=config.environment,
            data=config.data,
            ground_truth=ground_truth,
            run_name=self._name,
            kind=kind,
            kept=self._kept,
        )
        workers = RolloutWorkers(start, config.environment)
        workers.open()
        return workers

    def pool(self, workers: RolloutWorkers) -> RolloutPool:
        """A pool over ``workers``, on every engine."""
        return RolloutPool(workers, self.fleet.workers, self._config.environment.rollout_retries, self._config.seed)

    async def stop(self) -> None:
        """End what holds processes of its own; Ray ends the rest."""
        self.judges.close()
        stops: list[Awaitable[Any]] = [self.fleet.stop(), self.workers.stop()]
        if self._ready:
            stops += [self.store.settle.remote()]
            stops += [] if self._servers is None else [self._servers[0].stop.remote()]
        with contextlib.suppress(Exception):
            await asyncio.wait_for(asyncio.gather(*stops), timeout=20)
