"""ART's ``ruler_score_group``, with a rubric, verdicts and step advantages behind the reward.

    from draco_ray.adapters.art import draco_score_group

    judged_group = await draco_score_group(group, "openai/gpt-5.4", budget=5.0)

As with RULER, the result is ``None`` for a group that could not be judged, and the earlier rewards are kept in the
metric ``independent_reward``. Verdicts are in the logs, step advantages in ``metadata["step_advantages"]``.
"""

from __future__ import annotations

import json
from typing import Any

from draco_ray.adapters.conversations import judge_conversations
from draco_ray.errors import DracoError
from draco_ray.traces.results import JudgedTrace


async def draco_score_group(
    group: Any, judge_model: str = "openai/gpt-5.4", *, swallow_exceptions: bool = False, **options: Any
) -> Any:
    """Score a trajectory group.

    Args:
        group: an ``art.TrajectoryGroup``; it is not changed.
        judge_model: LiteLLM's name of the judge.
        swallow_exceptions: return None instead of raising.
        options: options of `draco_ray.judge`.

    Returns: a new group with rewards; None if it could not be judged.

    Raises: as `draco_ray.judge`, unless swallowed.
    """
    import art

    trajectories = [each.model_copy(deep=True) for each in group.trajectories]
    records = [{"task_id": "group", "messages": each.messages(), "tools": each.tools} for each in trajectories]
    try:
        judged = await judge_conversations(records, judge_model, **options)
    except DracoError:
        if swallow_exceptions:
            return None
        raise
    if any(each is None or each.trace.reward is None for each in judged):
        return None
    for trajectory, each in zip(trajectories, judged, strict=True):
        if each is not None:
            _write(trajectory, each.trace)
    return art.TrajectoryGroup(trajectories)


def _write(trajectory: Any, trace: JudgedTrace) -> None:
    trajectory.metrics["independent_reward"] = trajectory.reward
    trajectory.metrics["draco_score"] = trace.reward
    trajectory.reward = trace.reward
    # ART's metadata can hold plain values only.
    trajectory.metadata["step_advantages"] = json.dumps([step.advantage for step in trace.steps])
    for each in trace.verdicts:
        steps = f" (steps {', '.join(map(str, each.steps))})" if each.steps else ""
        trajectory.log(f"{each.verdict}: {each.title}{steps}: {each.justification}")
