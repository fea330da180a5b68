"""What a judge prompt says, read back: the inverse of `draco_ray.judging.render`.

Blocks are found by our own delimiters at the start of a line, with the code that the first evidence block names;
rendering has made every imitation of them inert. The same reading does for any prompt set, because the placeholders'
formats are the same in all of them. A prompt without evidence blocks, as runs recorded before there were any hold them,
has the same delimiters without a code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draco_ray.judging.escaping import unescape
from draco_ray.judging.phases.credit import Credit
from draco_ray.judging.phases.score import Score
from draco_ray.judging.phases.stage1 import Stage1
from draco_ray.judging.phases.stage2 import Stage2
from draco_ray.judging.phases.union import Union
from draco_ray.judging.reply import ENTRIES
from draco_ray.rollout.code_block import extract_code

_EVIDENCE = re.compile(r"^\[BEGIN EVIDENCE ([0-9a-f]{8})\]", re.MULTILINE)
_ARRAY = re.compile(r"^\[(?=\s*+[{\]])", re.MULTILINE)
_TASK = re.compile(r"^.*?\btask(?: for you)?(?: is)?:[ ]*(.+?)(?=\n\s*\n|\Z)", re.IGNORECASE | re.DOTALL)
MOST_ARRAYS = 50
"""Arrays of a prompt that are looked at, from its end, for those that the grader wrote."""
TASK_MARK = "The task reads: "
"""Our criteria that depend on the task end with it, after these words: the credit prompt shows no task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One action, by code or by calls of tools; ``number`` is 1-based."""

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

    phase: str
    task: str = ""
    """The bare instruction; empty where the prompt does not show it."""
    runs: tuple[Run, ...] = ()
    """One run in stage2, score and credit, the group's in union."""
    rubrics: tuple[Rubric, ...] = field(default=())
    """Existing ones in stage2, candidates in union, the rubric in score and credit."""


class _Marks:
    """Patterns of the delimiters in one prompt: they carry its code, if it has one."""

    def __init__(self, prompt: str) -> None:
        found = _EVIDENCE.search(prompt)
        code = found[1] if found else ""
        word, bracketed, attribute = (f" {code}", rf" \[{code}\]", f' code="{code}"') if code else ("", "", "")
        # With a code any role is one that we wrote.
        roles = "[A-Z][A-Z ]*?" if code else "SYSTEM|USER|ASSISTANT|ENVIRONMENT|END|END EVIDENCE"
        self.block = re.compile(rf"^\[({roles}){word}\][ ]?(.*)$", re.MULTILINE)
        self.rollout = re.compile(
            rf'^<rollout index="(\d+)"{attribute}>\n(.*?)\n</rollout{attribute}>$', re.MULTILINE | re.DOTALL
        )
        self.step = re.compile(rf"^### (?:Step (\d+)|Closing turn \(no action\)){bracketed}$", re.MULTILINE)
        self.section = re.compile(rf"^(Reasoning|Action|Output){bracketed}:$", re.MULTILINE)
        # Without a block's end the next heading is the prompt's own: inside a step every imitation is escaped.
        self.end = re.compile(rf"^\[END EVIDENCE{word}\]" if code else "^## ", re.MULTILINE)

    def inside(self, text: str) -> str:
        """``text`` without the lines that delimit evidence."""
        begin = _EVIDENCE.match(text)
        return self.end.split(text[text.find("\n") + 1 :], maxsplit=1)[0].rstrip("\n") if begin else text

    def outside(self, prompt: str) -> str:
        """``prompt`` without what is quoted in it."""
        parts = []
        position = 0
        while begin := _EVIDENCE.search(prompt, position):
            end = self.end.search(prompt, begin.end())
            parts.append(prompt[position : begin.start()])
            position = end.end() if end else len(prompt)
        return "".join([*parts, prompt[position:]])


def read_prompt(prompt: str) -> JudgePrompt | None:
    """Recognise a phase by what its prompt shows; None for any other text."""
    marks = _Marks(prompt)
    ours = marks.outside(prompt)
    told = _tagged(prompt, "task_input") or _tagged(prompt, "task")
    task = instruction(marks.inside(told) if told else _user_block(prompt, marks))
    if (candidates := _tagged(ours, "candidate_rubrics")) is not None:
        group = _tagged(prompt, "group_trajectories") or ""
        runs = tuple(_conversation(match[2], marks) for match in marks.rollout.finditer(group))
        return JudgePrompt(phase=Union.name, task=task, runs=runs, rubrics=_rubrics(candidates))
    transcript = _tagged(prompt, "agent_trajectory")
    runs = () if transcript is None else (_conversation(transcript, marks),)
    if (listed := _tagged(ours, "rubrics")) is not None:
        return JudgePrompt(phase=Score.name, task=task, runs=runs, rubrics=_rubrics(listed))
    if (existing := _tagged(ours, "existing_rubrics")) is not None:
        return JudgePrompt(phase=Stage2.name, task=task, runs=runs, rubrics=_rubrics(existing))
    scores = _scores(ours)
    if scores is not None:
        if not runs:
            runs = (_summary(prompt, marks),)
        elif marks.step.search(prompt):
            # Both forms are there; the summary is what the numbers refer to, the transcript knows the end.
            runs = (replace(_summary(prompt, marks), ended=runs[0].ended),)
        return JudgePrompt(phase=Credit.name, task=task, runs=runs, rubrics=scores)
    if _tagged(ours, "agent_prompt") is not None:
        return JudgePrompt(phase=Stage1.name, task=task)
    return None


def read_pairing(prompt: str) -> tuple[tuple[Rubric, ...], tuple[Rubric, ...]] | None:
    """The two lists of a prompt that asks which of their criteria are pairs; None for any other text."""
    first, second = _tagged(prompt, "first_criteria"), _tagged(prompt, "second_criteria")
    return None if first is None or second is None else (_rubrics(first), _rubrics(second))


def reply(entries: Sequence[Any]) -> str:
    """What a judge answers: one JSON object that holds the entries."""
    return json.dumps({ENTRIES: entries}, indent=1, ensure_ascii=False)


def instruction(user_text: str) -> str:
    """The task itself, without the introduction and the instructions around it.

    >>> instruction("My name is Ada. Your task is: Pin all my notes.")
    'Pin all my notes.'
    """
    text = unescape(user_text).strip()
    match = _TASK.match(text)
    return " ".join((match[1] if match else text).split())


def _tagged(prompt: str, tag: str) -> str | None:
    match = re.search(rf"^<{tag}>\n(.*?)\n?^</{tag}>$", prompt, re.MULTILINE | re.DOTALL)
    return match[1] if match else None


def _user_block(prompt: str, marks: _Marks) -> str:
    """The first user message of whatever flattened conversation the prompt holds."""
    blocks = list(marks.block.finditer(prompt))
    for index, block in enumerate(blocks):
        if block[1] == "USER":
            end = blocks[index + 1].start() if index + 1 < len(blocks) else len(prompt)
            return prompt[block.end() : end].partition("\n</agent_prompt>")[0]
    return ""


def _conversation(text: str, marks: _Marks) -> Run:
    codes: dict[int, str] = {}
    outputs: dict[int, str] = {}
    ended = None
    blocks = list(marks.block.finditer(text))
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
    """What a turn executed; of one without a code block, which called tools or spoke to somebody, all of it.

    A chat template may have opened the reasoning, which the turn then only closes.
    """
    thinking = "</think>" in turn and "<think>" not in turn.partition("</think>")[0]
    code = extract_code(turn, thinking=thinking)
    return turn if code is None else code


def _summary(prompt: str, marks: _Marks) -> Run:
    steps = []
    headings = list(marks.step.finditer(prompt))
    for index, heading in enumerate(headings):
        if heading[1] is None:
            continue
        if index + 1 < len(headings):
            end = headings[index + 1].start()
        else:
            following = marks.end.search(prompt, heading.end())
            end = following.start() if following else len(prompt)
        sections: dict[str, str] = {}
        body = prompt[heading.end() : end]
        sections_at = list(marks.section.finditer(body))
        for position, mark in enumerate(sections_at):
            until = sections_at[position + 1].start() if position + 1 < len(sections_at) else len(body)
            sections[mark[1]] = unescape(body[mark.end() : until].strip("\n"))
        steps.append(Step(number=int(heading[1]), code=sections.get("Action", ""), output=sections.get("Output")))
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
    for match in list(_ARRAY.finditer(prompt))[: -MOST_ARRAYS - 1 : -1]:
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
