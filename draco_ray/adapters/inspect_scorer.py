"""A scorer for Inspect: the rubric's reward, and the verdicts as metadata, which its log viewer shows.

    from draco_ray.adapters.inspect_scorer import draco_scorer

    @task
    def booking():
        return Task(dataset=..., solver=..., scorer=draco_scorer("openai/gpt-5.4", budget=5.0))

A scorer sees one sample at a time: the rubric is written for its task and its run, and there is no group to compare it
with. `draco judge LOG.eval` judges all epochs of a sample together.
"""

from __future__ import annotations

from typing import Any

from draco_ray.adapters.conversations import Judging
from draco_ray.errors import TraceError


def draco_scorer(model: str | None = None, **options: Any) -> Any:
    """A ``@scorer`` whose value is the share of criteria that pass, 0 .. 1.

    Args:
        model: LiteLLM's name of the judge; None: that of ``config``.
        options: of `draco_ray.judge`: budget (of all samples together), rubric, api_base, out, ...

    Raises: see `Judging`.
    """
    from inspect_ai.scorer import Score, mean, scorer, stderr

    judging = Judging(model, **options)

    @scorer(metrics=[mean(), stderr()], name="draco")
    def draco() -> Any:
        async def score(state: Any, target: Any) -> Any:
            messages = [message.model_dump(mode="json", exclude_none=True) for message in state.messages]
            record = {"task_id": str(state.sample_id), "messages": messages}
            try:
                (judged,) = await judging([record])
            except TraceError as error:
                return Score(value=float("nan"), explanation=str(error))
            if judged is None or judged.trace.reward is None:
                reason = "it is no trace" if judged is None else judged.trace.error
                return Score(value=float("nan"), explanation=f"not judged: {reason}")
            trace = judged.trace
            # The reward is (passed - failed) / applicable.
            return Score(
                value=(1.0 + (trace.reward or 0.0)) / 2.0,
                explanation="\n".join(f"{each.verdict}: {each.title}: {each.justification}" for each in trace.verdicts),
                metadata={
                    "reward": trace.reward,
                    "verdicts": [
                        {
                            "title": each.title,
                            "verdict": each.verdict,
                            "evidence": each.evidence,
                            "steps": list(each.steps),
                        }
                        for each in trace.verdicts
                    ],
                    "step_quality": [step.quality for step in trace.steps],
                },
            )

        return score

    return draco()
