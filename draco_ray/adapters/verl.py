"""Step credit in verl 0.9's trainer: rewards from the judge, and per-token advantages for the actor.

Two entries of verl's configuration, and the judge's:

    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=draco_ray.adapters.verl.StepCreditManager
    algorithm.adv_estimator=draco
    +draco.model=openai/gpt-5.4 +draco.store=/data/run/verdicts.sqlite +draco.missing=error

An agent loop worker generates all trajectories of a prompt; when they are complete, it judges them, and every
trajectory gets its reward. In the trainer, verl computes its GRPO advantage A_i from those rewards, which is then
spread over the tokens of each step. A trajectory that could not be judged is not trained on and counts in no baseline.
Validation is not judged. All processes need access to the store, so they run on one machine; each agent loop worker may
spend an equal share of the budget.
"""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import agent_loop_tq, trainer_base

from draco_ray.adapters.credit import ArrivingGroup, CreditJudge, conversation_of_tokens
from draco_ray.adapters.verdicts import MissingVerdict, StepVerdict, TrajectoryKey, VerdictStore
from draco_ray.errors import ConfigError

__all__ = [
    "CreditJudge",
    "MissingVerdict",
    "StepCreditManager",
    "StepCreditWorker",
    "attach_verdict_store",
    "compute_advantage",
]
ESTIMATOR = "draco"


def draco_section(config: Any) -> dict[str, Any]:
    """The section ``draco`` of verl's configuration: arguments of `CreditJudge`."""
    found = OmegaConf.to_container(OmegaConf.create(config.get("draco") or {}), resolve=True)
    assert isinstance(found, dict)
    if "store" not in found:
        raise ConfigError(
            "verl: draco.store is missing; expected a file that all of verl's processes can open, for example "
            "+draco.store=/data/run/verdicts.sqlite"
        )
    if "out" in found:
        raise ConfigError(
            "verl: draco.out: verl's workers judge in parallel and cannot share a run directory; leave draco.out out"
        )
    return {str(name): value for name, value in found.items()}


class StepCreditWorker(agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's agent loop worker, which also has each trajectory judged with its group."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        judge = draco_section(config)
        if judge.get("budget") is not None:
            judge["budget"] /= config.actor_rollout_ref.rollout.agent.num_workers
        self._credit = CreditJudge(**judge)
        self._groups: dict[str, ArrivingGroup] = {}

    async def _run_prompt(self, prompt: dict[str, Any], *arguments: Any, **options: Any) -> None:
        uid = prompt["uid"]
        size = prompt.get("__rollout_n__", self.config.actor_rollout_ref.rollout.n)
        self._groups[uid] = ArrivingGroup(size, functools.partial(self._judge_group, uid))
        try:
            await super()._run_prompt(prompt, *arguments, **options)
        finally:
            del self._groups[uid]

    async def _run_agent_loop(self, *arguments: Any, uid: str, session_id: int, **options: Any) -> None:
        try:
            await super()._run_agent_loop(*arguments, uid=uid, session_id=session_id, **options)
        finally:
            # The group does not wait for a session that crashed or returned nothing.
            self._groups[uid].settle(session_id)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        outputs = output if isinstance(output, list) else [output]
        if outputs and not validate:
            await self._judge(outputs, kwargs)
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def _judge(self, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        if len(outputs) > 1:
            raise ConfigError(
                f"verl {version('verl')}: an agent loop that returns {len(outputs)} outputs for one trajectory gets "
                "no step credit, because the turns in each output are unknown; expected one output"
            )
        conversation = conversation_of_tokens(
            list(kwargs["raw_prompt"]),
            outputs[0].response_ids,
            outputs[0].response_mask,
            functools.partial(self.tokenizer.decode, skip_special_tokens=True),
            outputs[0].prompt_ids,
        )
        verdict = await self._groups[kwargs["uid"]].verdict(kwargs["session_id"], conversation)
        # verl needs a number here; the estimator leaves out trajectories without a reward.
        outputs[0].reward_score = 0.0 if verdict.reward is None else verdict.reward
        outputs[0].extra_fields["reward_extra_info"] = {"draco_failed": float(verdict.reward is None)}

    async def _judge_group(self, uid: str, conversations: dict[int, Any]) -> list[StepVerdict]:
        keys = [TrajectoryKey(str(uid), "", str(session)) for session in conversations]
        records = [{"task_id": str(uid), "messages": messages} for messages, _ in conversations.values()]
        return await self._credit.judge(keys, records, [counts for _, counts in conversations.values()])


class StepCreditManager(agent_loop_tq.AgentLoopManagerTQ):
    """verl's agent loop manager with `StepCreditWorker`; importing this module also registers the estimator."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        if config.algorithm.adv_estimator != ESTIMATOR:
            raise ConfigError(
                f"verl: algorithm.adv_estimator={config.algorithm.adv_estimator} does not use step credit; expected "
                f"{ESTIMATOR}"
            )
        attach_verdict_store(config)
        super().__init__(config, *arguments, **options)
        self.agent_loop_workers_class = ray.remote(StepCreditWorker)


@core_algos.register_adv_est(ESTIMATOR)
def _no_keys(**_: Any) -> Any:
    """Refuse to run: verl passes the trajectory keys only to `compute_advantage`, not to an estimator."""
    raise ConfigError(
        f"verl {version('verl')}: this trainer gives advantage estimators no trajectory keys; expected the trainer of "
        "trainer.use_v1=True"
    )


def compute_advantage(host: Any, data: Any, batch_keys: list[str], adv_estimator: Any, **options: Any) -> Any:
    """verl's ``compute_advantage_for_multi_trajectories`` with the estimator ``draco``.

    Args:
        host: verl's own function.
        data: a DataProto; batch has token_level_rewards and response_mask, both (B, T).
        batch_keys: B keys, ``{uid}_{session}_{output}``.
        adv_estimator: any estimator; those other than ``draco`` are left to verl.
        options: verl's options.

    Returns: the DataProto, with ``advantages`` and ``returns``. Raises: MissingVerdict: see `VerdictStore.spread`.
    """
    if adv_estimator != ESTIMATOR:
        return host(data, batch_keys, adv_estimator, **options)
    store: VerdictStore | None = _attached.get("store")
    if store is None:
        raise ConfigError("verl: no verdict store; expected agent_loop_manager_class=...StepCreditManager, or attach()")
    keys = [TrajectoryKey(uid, "", session) for uid, session, _ in (each.rsplit("_", 2) for each in batch_keys)]
    verdicts = store.get(keys)
    judged = [row for row, each in enumerate(verdicts) if each is None or each.reward is not None]
    mask = data.batch["response_mask"]
    uniform = torch.zeros(len(keys))
    if judged:
        part = host(
            data.select_idxs(judged),
            [batch_keys[row] for row in judged],
            core_algos.AdvantageEstimator.GRPO,
            **options,
        )
        first = part.batch["response_mask"].argmax(dim=1)
        uniform[judged] = part.batch["advantages"][torch.arange(len(judged)), first].float()
    spread = torch.as_tensor(store.spread(keys, uniform.numpy(), mask.numpy())).to(mask.device)
    data.batch["advantages"], data.batch["returns"] = spread, spread.clone()
    return data


_attached: dict[str, VerdictStore] = {}


def attach_verdict_store(config: Any) -> VerdictStore:
    """Make this process's trainer read the store of the configuration's section ``draco``."""
    judge = draco_section(config)
    _attached["store"] = VerdictStore(judge["store"], missing=judge.get("missing", "error"))
    host = trainer_base.compute_advantage_for_multi_trajectories
    if not isinstance(host, functools.partial):
        trainer_base.compute_advantage_for_multi_trajectories = functools.partial(compute_advantage, host)
    return _attached["store"]
