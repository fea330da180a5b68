"""A small invented group of rollouts, for `draco prompts render` and for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from draco_ray.judging.phases import Credit, Proposals, Question, Score, Stage1, Stage2, Union, Verdicts
from draco_ray.records import (
    GAP,
    Criterion,
    EpisodeEnd,
    Message,
    ScoredCriterion,
    Trajectory,
    Turn,
    Verdict,
)

PROMPT = (
    Message(role="system", content="You operate apps by writing Python between <code> and </code>. Read every page."),
    Message(role="user", content="I am Ada Example.\n\nMy task for you: How many songs are in my library?"),
)

RUBRIC = (
    Criterion(
        title="Reads every page of the library",
        description="A count is right only if all pages were read.",
        evaluator_instruction="Pass if pages were requested until an empty one came back. Fail otherwise.",
        source="stage1",
    ),
    Criterion(
        title="Submits the count as answer",
        description="The question has to be answered.",
        evaluator_instruction="Pass if complete_task was called with a number in digits. Fail otherwise.",
        source="stage2/0",
    ),
)

SCORES = (
    ScoredCriterion(
        verdict=Verdict.FAIL, evidence="Step 1 asks for page 0 only.", justification="It should have gone on to page 1."
    ),
    ScoredCriterion(
        verdict=Verdict.PASS, evidence="Step 2: complete_task(answer=5).", justification="The number was submitted."
    ),
)


def example_trajectory(rollout: int = 0) -> Trajectory:
    """Two steps and a closing turn; rollout 1 reads all pages, the others only the first."""
    if rollout == 1:
        read = "songs = [song for page in range(9) for song in apis.spotify.show_song_library(page_index=page)]"
    else:
        read = "songs = apis.spotify.show_song_library(page_index=0)"
    codes = (f"{read}\nprint(len(songs))", "apis.supervisor.complete_task(answer=len(songs))")
    outputs = ("17" if rollout == 1 else "5", "Execution successful.")
    turns = tuple(
        Turn(
            text=f"<think>Next, step {number}.</think>\n<code>\n{code}\n</code>",
            action=code,
            observation=output,
            first_token=2 * number,
            last_token=2 * number + 1,
        )
        for number, (code, output) in enumerate(zip(codes, outputs, strict=True), start=1)
    )
    closing = Turn(text="Done.", action=None, observation=None, first_token=6, last_token=7)
    step_T = np.array([GAP, GAP, 0, GAP, 1, GAP, GAP])
    return Trajectory(
        task_id="example_1",
        group="step0/example_1",
        rollout=rollout,
        attempt=0,
        policy_version=0,
        prompt=PROMPT,
        turns=(*turns, closing),
        token_ids_T=np.arange(7),
        sampled_T=np.array([False, False, True, False, True, False, True]),
        logprob_T=np.zeros(7, dtype=np.float32),
        step_T=step_T,
        prompt_length=2,
        ended=EpisodeEnd.FINISHED,
        started_at=0.0,
        ended_at=1.0,
    )


EXAMPLES: dict[str, Question[Any]] = {
    Stage1.name: Stage1(PROMPT),
    Stage2.name: Stage2(example_trajectory(), RUBRIC[:1]),
    Proposals.name: Proposals(PROMPT, RUBRIC[:1], [example_trajectory(), example_trajectory(1)]),
    Union.name: Union(PROMPT, RUBRIC, [example_trajectory(), example_trajectory(1)]),
    Score.name: Score(example_trajectory(), RUBRIC),
    Verdicts.name: Verdicts(example_trajectory(), RUBRIC),
    Credit.name: Credit(example_trajectory(), RUBRIC, SCORES),
}
"""Phase -> a question about the group."""
