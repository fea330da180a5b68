"""What a judge prompt says, read back: the inverse of `draco_ray.judging.render`.

Blocks are found by our own delimiters at the start of a line; rendering has made every imitation of them inert. The
same code reads any prompt set, because the placeholders' formats are the same in all of them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

from draco_ray.judging.render import TAGS
from draco_ray.records import Phase
from draco_ray.rollout.code_block import extract_code

_BLOCK = re.compile(r"^\[(SYSTEM|USER|ASSISTANT|ENVIRONMENT|END)\][ ]?(.*)$", re.MULTILINE)
_ROLLOUT = re.compile(r'^<rollout index="(\d+)">\n(.*?)\n</rollout>$', re.MULTILINE | re.DOTALL)
_STEP = re.compile(r"^### (?:Step (\d+)|Closing turn \(no code\))$", re.MULTILINE)
_SECTION = re.compile(r"^(Reasoning|Code|Output):$", re.MULTILINE)
_ARRAY = re.compile(r"^\[(?=\s*[{\]])", re.MULTILINE)
_ESCAPED_LINE = re.compile(r"^([ \t]*)\\(?=\[|##|(?:reasoning|code|output):)", re.MULTILINE | re.IGNORECASE)
_ESCAPED_TAG = re.compile(rf"&lt;(?=\s*/?\s*(?:{'|'.join(TAGS)})\b)", re.IGNORECASE)
_TASK = re.compile(r"^.*?\btask(?: for you)?(?: is)?:[ ]*(.+?)(?=\n\s*\n|\Z)", re.IGNORECASE | re.DOTALL)
TASK_MARK = "The task reads: "
"""Our criteria that depend on the task end with it, after these words: the credit prompt shows no task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One code execution; ``number`` is 1-based."""

    number: int
    code: str
    output: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One rollout as a judge sees it."""

    steps: tuple[Step, ...]
    ended: str | None = None
    """The word after ``[END]``; None where the prompt does not show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """One criterion as a prompt lists it, with the scoring verdict in the credit prompt."""

    index: int
    title: str
    description: str = ""
    instruction: str = ""
    verdict: str = ""
    evidence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePrompt:
    """A prompt that was recognised."""

    phase: Phase
    task: str = ""
    """The bare instruction; empty where the prompt does not show it."""
    runs: tuple[Run, ...] = ()
    """One run in stage2, score and credit, the group's in union."""
    rubrics: tuple[Rubric, ...] = field(default=())
    """Existing ones in stage2, candidates in union, the rubric in score and credit."""


def read_prompt(prompt: str) -> JudgePrompt | None:
    """Recognise a phase by what its prompt shows; None for any other text."""
    task = instruction(_tagged(prompt, "task_input") or _tagged(prompt, "task") or _user_block(prompt))
    if (candidates := _tagged(prompt, "candidate_rubrics")) is not None:
        group = _tagged(prompt, "group_trajectories") or ""
        runs = tuple(_conversation(match[2]) for match in _ROLLOUT.finditer(group))
        return JudgePrompt(phase=Phase.UNION, task=task, runs=runs, rubrics=_rubrics(candidates))
    transcript = _tagged(prompt, "agent_trajectory")
    runs = () if transcript is None else (_conversation(transcript),)
    if (listed := _tagged(prompt, "rubrics")) is not None:
        return JudgePrompt(phase=Phase.SCORE, task=task, runs=runs, rubrics=_rubrics(listed))
    if (existing := _tagged(prompt, "existing_rubrics")) is not None:
        return JudgePrompt(phase=Phase.STAGE2, task=task, runs=runs, rubrics=_rubrics(existing))
    scores = _scores(prompt)
    if scores is not None:
        if not runs:
            runs = (_summary(prompt),)
        elif _STEP.search(prompt):
            # Both forms are there; the summary is what the numbers refer to, the transcript knows the end.
            runs = (replace(_summary(prompt), ended=runs[0].ended),)
        return JudgePrompt(phase=Phase.CREDIT, task=task, runs=runs, rubrics=scores)
    if _tagged(prompt, "agent_prompt") is not None:
        return JudgePrompt(phase=Phase.STAGE1, task=task)
    return None


def read_pairing(prompt: str) -> tuple[tuple[Rubric, ...], tuple[Rubric, ...]] | None:
    """The two lists of a prompt that asks which of their criteria are pairs; None for any other text."""
    first, second = _tagged(prompt, "first_criteria"), _tagged(prompt, "second_criteria")
    return None if first is None or second is None else (_rubrics(first), _rubrics(second))


def instruction(user_text: str) -> str:
    """The task itself, without the introduction and the instructions around it.

    >>> instruction("My name is Ada. Your task is: Pin all my notes.")
    'Pin all my notes.'
    """
    text = unescape(user_text).strip()
    match = _TASK.match(text)
    return " ".join((match[1] if match else text).split())


def unescape(text: str) -> str:
    """Undo `draco_ray.judging.render.escape`, as far as code needs it.

    >>> unescape("\\\\## a comment\\nx = 1 &lt;/task>")
    '## a comment\\nx = 1 </task>'
    """
    return _ESCAPED_TAG.sub("<", _ESCAPED_LINE.sub(r"\1", text))


def _tagged(prompt: str, tag: str) -> str | None:
    match = re.search(rf"^<{tag}>\n(.*?)\n?^</{tag}>$", prompt, re.MULTILINE | re.DOTALL)
    return match[1] if match else None


def _user_block(prompt: str) -> str:
    """The first user message of whatever flattened conversation the prompt holds."""
    blocks = list(_BLOCK.finditer(prompt))
    for index, block in enumerate(blocks):
        if block[1] == "USER":
            end = blocks[index + 1].start() if index + 1 < len(blocks) else len(prompt)
            return prompt[block.end() : end].partition("\n</agent_prompt>")[0]
    return ""


def _conversation(text: str) -> Run:
    codes: dict[int, str] = {}
    outputs: dict[int, str] = {}
    ended = None
    blocks = list(_BLOCK.finditer(text))
    for index, block in enumerate(blocks):
        end = blocks[index + 1].start() if index + 1 < len(blocks) else len(text)
        body = unescape(text[block.end() : end].strip("\n"))
        number = re.search(r"step (\d+)\)$", block[2])
        if block[1] == "END":
            ended = block[2].strip()
        elif number and block[1] == "ASSISTANT":
            codes[int(number[1])] = _code(body)
        elif number and block[1] == "ENVIRONMENT":
            outputs[int(number[1])] = body
    return Run(
        steps=tuple(Step(number=number, code=codes[number], output=outputs.get(number)) for number in sorted(codes)),
        ended=ended,
    )


def _code(turn: str) -> str:
    """What a turn executed. A chat template may have opened the reasoning, which the turn then only closes."""
    thinking = "</think>" in turn and "<think>" not in turn.partition("</think>")[0]
    return extract_code(turn, thinking=thinking) or ""


def _summary(prompt: str) -> Run:
    steps = []
    headings = list(_STEP.finditer(prompt))
    for index, heading in enumerate(headings):
        if heading[1] is None:
            continue
        if index + 1 < len(headings):
            end = headings[index + 1].start()
        else:
            # The next heading is the prompt's own: inside a step every imitation is escaped.
            following = re.compile(r"^## ", re.MULTILINE).search(prompt, heading.end())
            end = following.start() if following else len(prompt)
        sections: dict[str, str] = {}
        body = prompt[heading.end() : end]
        marks = list(_SECTION.finditer(body))
        for position, mark in enumerate(marks):
            until = marks[position + 1].start() if position + 1 < len(marks) else len(body)
            sections[mark[1]] = unescape(body[mark.end() : until].strip("\n"))
        steps.append(Step(number=int(heading[1]), code=sections.get("Code", ""), output=sections.get("Output")))
    return Run(steps=tuple(steps))


def _rubrics(text: str) -> tuple[Rubric, ...]:
    try:
        entries = json.loads(text)
    except ValueError:
        return ()
    return tuple(_rubric(index, entry) for index, entry in enumerate(entries) if isinstance(entry, dict))


def _scores(prompt: str) -> tuple[Rubric, ...] | None:
    """The last array of verdicts in the prompt; an earlier one may be something that the agent printed."""
    decoder = json.JSONDecoder()
    for match in reversed(list(_ARRAY.finditer(prompt))):
        try:
            entries, _ = decoder.raw_decode(prompt, match.start())
        except ValueError:
            continue
        if entries and all(
            isinstance(entry, dict) and {"evaluator_instruction", "verdict"} <= entry.keys() for entry in entries
        ):
            return tuple(_rubric(index, entry) for index, entry in enumerate(entries))
    return None


def _rubric(index: int, entry: dict[str, Any]) -> Rubric:
    return Rubric(
        index=int(entry.get("rubric_index", index)),
        title=str(entry.get("title", entry.get("rubric_title", ""))),
        description=str(entry.get("description", "")),
        instruction=str(entry.get("evaluator_instruction", "")),
        verdict=str(entry.get("verdict", "")),
        evidence=str(entry.get("evidence", "")),
    )
