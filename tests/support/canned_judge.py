"""A stand-in for a judge of flight bookings: right in form, and as simple as the traces of tests/support/traces.

It proposes two criteria. The first passes if the run books DL9, the second always. The step that books a flight, else
the last step, is responsible.
"""

from __future__ import annotations

import json
import re

from draco_ray.judging.reply import tag_of

CHEAPEST: dict[str, object] = {
    "title": "Books the cheapest flight",
    "description": "The flight that is booked or named costs least.",
    "evaluator_instruction": "Pass if it is DL9.",
}
SEARCHES: dict[str, object] = {
    "title": "Searches before it answers",
    "description": "A search comes first.",
    "evaluator_instruction": "Pass if it searches.",
}
RUN = re.compile(r"^\[ASSISTANT|^### ", re.MULTILINE)


def answer(prompt: str) -> str:
    """The reply to a rendered prompt of ``prompts/judge``."""
    return json.dumps({"request_tag": tag_of(prompt), "entries": _answer(prompt)})


def _answer(prompt: str) -> list[dict[str, object]]:
    run = prompt.partition("## The criteria")[0]
    if prompt.startswith("You grade one run"):
        return [
            {
                "rubric_index": index,
                "rubric_title": criterion["title"],
                "evidence": "as it says",
                "justification": "because",
                "score": _score(run, criterion["title"]),
            }
            for index, criterion in enumerate(_listed(prompt, "rubrics"))
        ]
    if prompt.startswith("You find out which steps"):
        steps = [int(number) for number in re.findall(r"^### Step (\d+)", prompt, re.MULTILINE)]
        booked = re.findall(r"^### Step (\d+)(?:(?!^### ).)*?book\(", prompt, re.MULTILINE | re.DOTALL)
        scores = json.JSONDecoder().raw_decode(prompt[prompt.index("noted its evidence:") + 19 :].lstrip())[0]
        return [
            {
                "rubric_index": each["rubric_index"],
                "rubric_title": each["rubric_title"],
                "verdict": each["verdict"],
                "relevant_steps": [
                    int(booked[-1]) if booked and each["rubric_title"] == CHEAPEST["title"] else steps[0]
                ],
                "explanation": "there",
            }
            for each in scores
        ]
    if prompt.startswith("You edit grading criteria"):
        return [CHEAPEST, SEARCHES]
    return [SEARCHES] if "this time with a real run" in prompt else [CHEAPEST]


def _score(run: str, title: str) -> int:
    if title == CHEAPEST["title"]:
        return 1 if "booked DL9" in run or "is DL9" in run or "confirm DL9" in run else -1
    return 1


def _listed(prompt: str, tag: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(prompt.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0])
    return found
