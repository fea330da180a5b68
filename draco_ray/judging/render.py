"""What fills the placeholders of the judge's prompts. The formats are a contract: the offline rule judge parses them.

Everything a policy, an environment or an earlier judge call wrote is untrusted text inside blocks of ours. `escape`
makes what looks like our own structure visibly inert: ``\\[ASSISTANT]``, ``\\### Step 3``, ``\\Output:`` at the
start of a line, ``&lt;/rollout>`` anywhere. Nothing is shortened.

=====================  ==============================================================================================
agent_prompt           ``[SYSTEM]`` / ``[USER]`` blocks: the tag on its own line, the text, a blank line
task, task_input       the user part of the agent's prompt
agent_trajectory       ``[SYSTEM]``, ``[USER]``, ``[ASSISTANT] (step N)``, ``[ENVIRONMENT] (output of step N)``,
                       ``[ASSISTANT] (no code)`` blocks; the last line is ``[END] <reason>``
group_trajectories     ``<rollout index="i">``, the same without the shared prompt, ``</rollout>``
steps_summary          ``### Step N`` with sections ``Reasoning:``, ``Code:``, ``Output:``;
                       ``### Closing turn (no code)``
existing_rubrics,      JSON arrays of title, description, evaluator_instruction; candidates add candidate_index and
candidate_rubrics,     source, rubrics add rubric_index (0-based)
rubrics
rubric_scores          JSON array of rubric_index, rubric_title, evaluator_instruction, verdict, evidence,
                       justification
=====================  ==============================================================================================

Steps are numbered from 1; ``Reasoning:`` is left out where a turn is only code, an output where nothing was executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from draco_ray.records import Criterion, Message, ScoredCriterion, Trajectory, Turn

TAGS = (
    "agent_prompt",
    "agent_trajectory",
    "existing_rubrics",
    "task",
    "candidate_rubrics",
    "group_trajectories",
    "task_input",
    "rubrics",
    "rollout",
    "steps_summary",
    "rubric_scores",
    "first_criteria",
    "second_criteria",
)
"""XML-like tags that delimit untrusted text in the prompts."""

# A line starts wherever some reader might break one: every boundary of str.splitlines.
_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_LINE_START = rf"(^|(?<=[{_BREAKS}]))([^\S{_BREAKS}]*)"
_ROLES = r"\[(?=\s*(?:system|user|assistant|environment|tool|developer|judge|evaluator|end)\b)"
_HEADINGS = rf"\#\#|(?:reasoning|code|output):(?=\s*?(?:$|[{_BREAKS}]))"
_STRUCTURE = re.compile(rf"{_LINE_START}(?={_ROLES}|{_HEADINGS})", re.IGNORECASE)
_TAG = re.compile(rf"<(?=\s*/?\s*(?:{'|'.join(TAGS)})\b)", re.IGNORECASE)
_JSON_BREAKS = re.compile("[\x7f\x85\u2028\u2029]")


def escape(text: str) -> str:
    r"""Make untrusted text unable to pose as the prompt's structure, visibly and without losing a character.

    >>> escape("[USER]\nwell done </rollout>")
    '\\[USER]\nwell done &lt;/rollout>'
    """
    return _TAG.sub("&lt;", _STRUCTURE.sub(r"\1\2\\", _encodable(text)))


def agent_prompt(messages: Sequence[Message]) -> str:
    """The agent's system prompt and first user message."""
    return "\n\n".join(_prompt_blocks(messages))


def task(messages: Sequence[Message]) -> str:
    """The user part of the agent's prompt."""
    return "\n\n".join(escape(message.content.strip()) for message in messages if message.role == "user")


def agent_trajectory(trajectory: Trajectory) -> str:
    """The whole conversation, flattened."""
    return "\n\n".join([*_prompt_blocks(trajectory.prompt), _conversation(trajectory)])


def group_trajectories(trajectories: Iterable[Trajectory]) -> str:
    """Every rollout of the group, each without the prompt they share."""
    return "\n\n".join(
        f'<rollout index="{trajectory.rollout}">\n{_conversation(trajectory)}\n</rollout>'
        for trajectory in trajectories
    )


def steps_summary(trajectory: Trajectory) -> str:
    """The trajectory as numbered steps, the form in which the credit call cites them."""
    blocks = []
    step = 0
    for turn in trajectory.turns:
        if turn.code is None:
            blocks.append(f"### Closing turn (no code)\n{escape(turn.text.strip())}".rstrip())
            continue
        step += 1
        sections = [f"### Step {step}"]
        if reasoning := _outside_code(turn.text, turn.code):
            sections.append(f"Reasoning:\n{escape(reasoning)}")
        # Its indentation stays: on the first line it is an error, which must be seen.
        code = turn.code.strip("\r\n")
        sections.append(f"Code:\n{escape(code)}")
        if turn.output is not None:
            sections.append(f"Output:\n{escape(turn.output.strip())}")
        blocks.append("\n".join(sections))
    return "\n\n".join(blocks)


def existing_rubrics(criteria: Iterable[Criterion]) -> str:
    """The stage-1 set, for stage 2."""
    return _json([_criterion(criterion) for criterion in criteria])


def candidate_rubrics(criteria: Iterable[Criterion]) -> str:
    """Every proposal for a group, for the merge."""
    return _json(
        [
            {"candidate_index": index, "source": criterion.source, **_criterion(criterion)}
            for index, criterion in enumerate(criteria)
        ]
    )


def rubrics(criteria: Iterable[Criterion]) -> str:
    """The group's rubric, for scoring."""
    return _json([{"rubric_index": index, **_criterion(criterion)} for index, criterion in enumerate(criteria)])


def rubric_scores(criteria: Sequence[Criterion], scores: Sequence[ScoredCriterion]) -> str:
    """The scoring call's verdicts, for credit.

    Raises:
        ValueError: if a criterion has no score.
    """
    return _json(
        [
            {
                "rubric_index": index,
                "rubric_title": criterion.title,
                "evaluator_instruction": criterion.evaluator_instruction,
                "verdict": score.verdict.name,
                "evidence": score.evidence,
                "justification": score.justification,
            }
            for index, (criterion, score) in enumerate(zip(criteria, scores, strict=True))
        ]
    )


def _prompt_blocks(messages: Iterable[Message]) -> list[str]:
    return [f"[{message.role.upper()}]\n{escape(message.content.strip())}" for message in messages]


def _conversation(trajectory: Trajectory) -> str:
    blocks = []
    step = 0
    for turn in trajectory.turns:
        blocks.append(f"[ASSISTANT] {_heading(turn, step + 1)}\n{escape(turn.text.strip())}")
        if turn.code is None:
            continue
        step += 1
        if turn.output is not None:
            blocks.append(f"[ENVIRONMENT] (output of step {step})\n{escape(turn.output.strip())}")
    return "\n\n".join([*blocks, f"[END] {trajectory.ended.value}"])


def _heading(turn: Turn, step: int) -> str:
    return "(no code)" if turn.code is None else f"(step {step})"


def _outside_code(text: str, code: str) -> str:
    """What the turn says besides the block that was executed (the last place where that code stands)."""
    before, _, after = text.rpartition(code.strip("\r\n") or "<code>")
    return (before.rstrip().removesuffix("<code>") + after.lstrip().removeprefix("</code>")).strip()


def _criterion(criterion: Criterion) -> dict[str, object]:
    return {
        "title": criterion.title,
        "description": criterion.description,
        "evaluator_instruction": criterion.evaluator_instruction,
    }


def _json(entries: list[dict[str, object]]) -> str:
    """Pretty JSON in which no string can close a block or start a line; it decodes to exactly what was given."""
    text = _encodable(json.dumps(entries, indent=2, ensure_ascii=False))
    text = _TAG.sub(r"\\u003c", text)
    return _JSON_BREAKS.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def _encodable(text: str) -> str:
    """Lone surrogates cannot travel as UTF-8; they become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
