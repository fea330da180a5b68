"""A scorer for Inspect and a scanner for Inspect Scout: the rubric's pass share, and the verdicts as metadata.

    from draco_ray.adapters.inspect_scorer import draco_scanner, draco_scorer

    @task
    def booking():
        return Task(dataset=..., solver=..., scorer=draco_scorer("openai/gpt-5.4", budget=5.0))

    scan([draco_scanner("openai/gpt-5.4", budget=5.0)], transcripts=transcripts_from("logs"))

Both see one run at a time: the rubric is written from its task and this one run, without a group to compare it with.
`draco judge LOG.eval` judges all epochs of a sample together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draco_ray.adapters.conversations import Judging
from draco_ray.errors import TraceError


def draco_scorer(model: str | None = None, **options: Any) -> Any:
    """A ``@scorer`` whose value is the share of criteria that pass, 0 .. 1.

    Args:
        model: LiteLLM's name of the judge; None: the model in ``config``.
        options: options of `draco_ray.judge`: budget (of all samples together), rubric, api_base, out, ...

    Raises: see `Judging`.
    """
    from inspect_ai.scorer import Score, mean, scorer, stderr

    judging = Judging(model, **options)

    @scorer(metrics=[mean(), stderr()], name="draco")
    def draco() -> Any:
        async def score(state: Any, target: Any) -> Any:
            value, explanation, metadata = await _judged(judging, str(state.sample_id), state.messages)
            return Score(value=float("nan") if value is None else value, explanation=explanation, metadata=metadata)

        return score

    return draco()


def draco_scanner(model: str | None = None, **options: Any) -> Any:
    """A Scout ``@scanner`` over whole transcripts; the arguments and the value are `draco_scorer`'s."""
    from inspect_scout import Result, Transcript, scanner

    judging = Judging(model, **options)

    @scanner(messages="all", name="draco")
    def draco() -> Any:
        async def scan(transcript: Any) -> Any:
            task = transcript.task_id or transcript.transcript_id
            value, explanation, metadata = await _judged(judging, str(task), transcript.messages)
            return Result(value=value, explanation=explanation, metadata=metadata)

        # Scout reads the parameter's type, and cannot resolve the name of a class imported in this function.
        scan.__annotations__["transcript"] = Transcript
        return scan

    return draco()


async def _judged(
    judging: Judging, task: str, messages: Sequence[Any]
) -> tuple[float | None, str, dict[str, Any] | None]:
    """A run's pass share, a line per criterion, and its verdicts; None and the reason if it could not be judged."""
    record = {"task_id": task, "messages": [each.model_dump(mode="json", exclude_none=True) for each in messages]}
    try:
        (judged,) = await judging([record])
    except TraceError as error:
        return None, str(error), None
    if judged is None or judged.trace.reward is None:
        return None, f"not judged: {'this is not a trace' if judged is None else judged.trace.error}", None
    trace = judged.trace
    explanation = "\n".join(f"{each.verdict}: {each.title}: {each.justification}" for each in trace.verdicts)
    verdicts = [
        {"title": each.title, "verdict": each.verdict, "evidence": each.evidence, "steps": list(each.steps)}
        for each in trace.verdicts
    ]
    quality = [step.quality for step in trace.steps]
    return trace.pass_share, explanation, {"reward": trace.reward, "verdicts": verdicts, "step_quality": quality}
