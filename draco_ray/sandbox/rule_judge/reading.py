"""Parses a judge prompt: the inverse of `draco_ray.judging.render`.

Evidence blocks are found by the secret code in their markers, so the text that they quote cannot imitate a marker. The
parser works for any prompt set, because all sets have the same formats for placeholders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from draco_ray.judging.phases import Credit, Proposals, Score, Stage1, Stage2, Union, Verdicts
from draco_ray.judging.render import unescape
from draco_ray.judging.reply import ENTRIES_KEY, TAG
from draco_ray.rollout.code_block import extract_code

_EVIDENCE = re.compile(r"^\[BEGIN EVIDENCE ([0-9a-f]{8})\]", re.MULTILINE)
_TASK = re.compile(r"^.*?\btask(?: for you)?(?: is)?:[ ]*(.+?)(?=\n\s*\n|\Z)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One action (code or tool calls), or a message, whose text is in ``code``; ``number`` is 1-based."""

    number: int
    code: str
    output: str | None
    message: bool = False
    asked: str = ""
    """What users said between the previous step and this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One rollout as a judge sees it."""

    steps: tuple[Step, ...]
    ended: str = ""
    """Why the rollout ended (`draco_ray.records.EpisodeEnd`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCriterion:
    """One criterion as a prompt lists it, with the scoring verdict in the credit prompt."""

    index: int
    title: str
    description: str = ""
    instruction: str = ""
    verdict: str = ""
    evidence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePrompt:
    """The content of a judge prompt, as `read_prompt` finds it."""

    phase: str
    task: str = ""
    """The instruction alone; empty if the prompt does not show it."""
    runs: tuple[Run, ...] = ()
    """One run in stage2, score, verdicts and credit; all runs of the group in proposals and union."""
    rubrics: tuple[PromptCriterion, ...] = ()
    """The criteria that the prompt lists: the existing ones in stage2 and proposals, the candidates in union, and the
    rubric in score, verdicts and credit."""


def read_prompt(prompt: str) -> JudgePrompt | None:
    """Recognise a phase by what its prompt shows; None for any other text."""
    found = _EVIDENCE.search(prompt)
    if found is None:
        return None
    code = found[1]
    block = re.compile(rf"^\[BEGIN EVIDENCE {code}\][^\n]*\n(.*?)\n?^\[END EVIDENCE {code}\]", re.MULTILINE | re.DOTALL)
    ours = block.sub("", prompt)
    quoted = [match[1] for match in block.finditer(prompt)]
    runs = tuple(run for text in quoted for run in _runs(text, code))
    task = _task(quoted, code)
    scoring = Verdicts if '"relevant_steps":' in ours.rpartition("</rubrics>")[2] else Score
    adding = Stage2 if _tagged(ours, "group_trajectories") is None else Proposals
    for phase, tag in ((Union, "candidate_rubrics"), (scoring, "rubrics"), (adding, "existing_rubrics")):
        if (listed := _tagged(ours, tag)) is not None and (runs or phase is Union):
            return JudgePrompt(phase=phase.name, task=task, runs=runs, rubrics=_rubrics(listed))
    if scores := _scores(ours):
        return JudgePrompt(phase=Credit.name, task=task, runs=runs or (Run(steps=()),), rubrics=scores)
    return JudgePrompt(phase=Stage1.name, task=task) if _tagged(ours, "agent_prompt") is not None else None


def read_pairing(prompt: str) -> tuple[tuple[PromptCriterion, ...], tuple[PromptCriterion, ...]] | None:
    """The two lists of a prompt that asks which of their criteria are pairs; None for any other text."""
    first, second = _tagged(prompt, "first_criteria"), _tagged(prompt, "second_criteria")
    return None if first is None or second is None else (_rubrics(first), _rubrics(second))


def format_reply(entries: Sequence[Any], tag: str = "") -> str:
    """A judge's answer: one JSON object with the request's tag and the entries. Every reply of the rule judge is built
    here."""
    named = {TAG: tag} if tag else {}
    return json.dumps({**named, ENTRIES_KEY: entries}, indent=1, ensure_ascii=False)


def extract_instruction(user_text: str) -> str:
    """The task itself, without the introduction and the instructions around it.

    >>> extract_instruction("My name is Ada. Your task is: Pin all my notes.")
    'Pin all my notes.'
    """
    text = unescape(user_text).strip()
    match = _TASK.match(text)
    return " ".join((match[1] if match else text).split())


def _tagged(prompt: str, tag: str) -> str | None:
    match = re.search(rf"^<{tag}>\n(.*?)\n?^</{tag}>$", prompt, re.MULTILINE | re.DOTALL)
    return match[1] if match else None


def _task(quoted: Sequence[str], code: str) -> str:
    """The task block, else the first user message of a conversation."""
    for text in quoted:
        user = [body for role, _, body in _parts(rf"^\[([A-Z ]+) {code}\](.*)$", text) if role == "USER"]
        if user or (f"{code}]" not in text and f'code="{code}"' not in text):
            return extract_instruction(user[0] if user else text)
    return ""


def _parts(heading: str, text: str) -> list[tuple[str, str, str]]:
    """For every match of ``heading``: its two regex groups, and the text below it."""
    found = list(re.finditer(heading, text, re.MULTILINE))
    ends = [match.start() for match in found[1:]] + [len(text)]
    return [(match[1], match[2], text[match.end() : end]) for match, end in zip(found, ends, strict=False)]


def _runs(text: str, code: str) -> list[Run]:
    """The runs in an evidence block, which shows a group's rollouts, one conversation, or one summary of a rollout.

    Empty if the block shows something else, such as the task.
    """
    rollout = rf'^<rollout index="\d+" code="{code}">\n(.*?)\n</rollout code="{code}">$'
    rollouts = re.findall(rollout, text, re.MULTILINE | re.DOTALL)
    runs: list[Run] = []
    for shown in rollouts or [text]:
        played, ended, *_ = *re.split(rf"^\[END {code}\] (\w+)", shown, maxsplit=1, flags=re.MULTILINE), ""
        summarized = re.search(rf"^### [^\n]* \[{code}\]$", played, re.MULTILINE)
        if rollouts or summarized or ended:
            steps = _summary(played, code) if summarized else _conversation(played, code)
            runs.append(Run(steps=tuple(steps), ended=ended))
    return runs


def _conversation(text: str, code: str) -> Iterator[Step]:
    turns = [
        (role, re.search(r"step (\d+)(, message)?\)$", rest), unescape(body))
        for role, rest, body in _parts(rf"^\[([A-Z ]+) {code}\](.*)$", text)
    ]
    outputs = {found[1]: body.strip("\n") for role, found, body in turns if found and role == "ENVIRONMENT"}
    asked = ""
    for role, found, body in turns:
        if role == "USER":
            asked += body
        elif found and role == "ASSISTANT":
            message, output, told = found[2] is not None, outputs.get(found[1]), asked.strip()
            action = body.rpartition("</think>")[2].strip() if message else _code(body.strip("\n"))
            yield Step(number=int(found[1]), code=action, output=output, message=message, asked=told)
            asked = ""


def _code(turn: str) -> str:
    """What a turn executed: its code block, or the whole turn if it called tools instead.

    The chat template may already open the reasoning, so that the turn has only the closing tag.
    """
    thinking = "</think>" in turn and "<think>" not in turn.partition("</think>")[0]
    code = extract_code(turn, thinking=thinking)
    return turn if code is None else code


def _summary(text: str, code: str) -> Iterator[Step]:
    asked = ""
    for title, number, body in _parts(rf"^### (?:(Step|USER)(?: (\d+))?|[A-Z][^\n]*) \[{code}\]$", text):
        if title == "USER":
            asked += unescape(body)
        elif title:
            parts = _parts(rf"^(Reasoning|Action|Message|Output) (\[{code}\]):$", body)
            said = {name: unescape(content.strip("\n")) for name, _, content in parts}
            message, output, told = "Message" in said, said.get("Output"), asked.strip()
            action = said.get("Message", said.get("Action", ""))
            yield Step(number=int(number), code=action, output=output, message=message, asked=told)
            asked = ""


def _rubrics(text: str) -> tuple[PromptCriterion, ...]:
    with suppress(ValueError):
        return tuple(_rubric(index, entry) for index, entry in enumerate(json.loads(text)) if isinstance(entry, dict))
    return ()


def _scores(prompt: str) -> tuple[PromptCriterion, ...]:
    """The last array of verdicts in the prompt."""
    for text in reversed(re.findall(r"^\[\n.*?^\]$", prompt, re.MULTILINE | re.DOTALL)):
        if (found := _rubrics(text)) and all(rubric.verdict for rubric in found):
            return found
    return ()


def _rubric(index: int, entry: dict[str, Any]) -> PromptCriterion:
    return PromptCriterion(
        index=int(entry.get("rubric_index", index)),
        title=str(entry.get("title", entry.get("rubric_title", ""))),
        description=str(entry.get("description", "")),
        instruction=str(entry.get("evaluator_instruction", "")),
        verdict=str(entry.get("verdict", "")),
        evidence=str(entry.get("evidence", "")),
    )
