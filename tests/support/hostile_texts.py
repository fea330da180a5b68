"""Everything that reads what a policy or a judge wrote, on texts that make careless patterns slow.

Run as a process: ``python -m tests.support.hostile_texts PART``. Its CPU time is limited, so that work
quadratic in the length of a text ends the process; wall time does not matter.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from draco_ray.errors import ReplyError
from draco_ray.judging import render
from draco_ray.judging.example import RUBRIC, SCORES, example_trajectory
from draco_ray.judging.phases import Credit, Score, Stage1, parse_attributions, parse_criteria, parse_scores
from draco_ray.judging.prompts import load_prompts
from draco_ray.records import Criterion, Message
from draco_ray.rollout.code_block import cut_output, extract_code
from draco_ray.sandbox.rule_judge.answering import answer
from draco_ray.sandbox.rule_judge.rules import RULES

OUTPUT, REPLY = 20_000, 80_000
"""Characters of an output, and of a reply."""
PROCESSOR_SECONDS = 100
"""CPU limit, about twenty times what a part needs; one quadratic pattern needed 152 s for a single text."""

UNITS = (
    *(
        "<",
        "< ",
        "</ ",
        " ",
        "\n",
        "\n ",
        "[",
        "[ ",
        "[ \n",
        "[{",
        '{"',
        "}",
        "} ",
        "} ,",
        "]",
        '"',
        '" ',
        '",',
        '", "',
        "\\",
    ),
    *(
        '\\"',
        "&#x",
        "&amp;",
        "##\n",
        "code: ",
        "Output:\n",
        "[END ",
        "[begin a",
        "<|",
        "a|",
        "a",
        "a.",
        "a_",
        "1",
        "\u200b",
    ),
    *("\uff1c", "<think>", "</think>", "<code>", 'File "<string', "Traceback (most recent call last)\n", "import\n"),
    *(
        '[{"a": 1}] ',
        '[{"score": 1}]',
        '{"score":1}',
        '"score":  ',
        '[{"a": "',
        '{"a":',
        "[1,",
        "print(1)\n",
        "f(x)\n",
        "(",
        "-",
    ),
    *(
        "### Step 1\n",
        "[ASSISTANT] (step 1)\n",
        "\r",
        "\x85",
        "more than 1 ",
        "like ",
        "my ",
        '"a" ',
        "a\u0301",
        "x.y",
        "9",
    ),
)
PROMPTS = load_prompts(Path("prompts/judge"))
CATALOGUE = [Criterion(**rule.criterion("")) for rule in RULES]

Reader = Callable[[str], object]


def with_turn(text: str, *, output: str = "", code: str = "x = 1") -> str:
    """The scoring prompt of a run with that turn."""
    trajectory = example_trajectory()
    turn = replace(trajectory.turns[0], text=text, action=code, observation=output)
    return Score(replace(trajectory, turns=(turn, *trajectory.turns[1:])), CATALOGUE).prompt(PROMPTS)


def credit_of(output: str) -> str:
    """The credit prompt of a run with that output."""
    trajectory = example_trajectory()
    turn = replace(trajectory.turns[0], observation=output)
    return Credit(replace(trajectory, turns=(turn,)), CATALOGUE, [SCORES[0]] * len(CATALOGUE)).prompt(PROMPTS)


def criterion(text: str) -> str:
    """A rubric with that text in it."""
    return render.rubrics([replace(RUBRIC[0], title=text)])


FIELD = '[{"rubric_index": 0, "evidence": "'
PARTS: dict[str, tuple[tuple[int, Reader], ...]] = {
    "prompts": (
        (OUTPUT, lambda text: render.unescape(render.escape(text))),
        (OUTPUT, criterion),
        (OUTPUT, lambda text: render._outside_code(f"<code>{text}</code>{text}", text[: len(text) // 2])),
        (REPLY, lambda text: cut_output(extract_code(f"{text}<code>{text}") or "", OUTPUT)),
    ),
    "replies": (
        (REPLY, lambda text: parse_scores(text, RUBRIC)),
        (REPLY, lambda text: parse_scores(f'{FIELD}{text[: REPLY - 90]}", "score": 1}}]', RUBRIC[:1])),
        (
            REPLY,
            lambda text: parse_attributions(
                f'[{{"verdict": "PASS", "relevant_steps": [{text[: REPLY - 90]}', RUBRIC[:1], 9
            ),
        ),
        (REPLY, lambda text: parse_criteria(text, limit=9, source="s")),
        (REPLY, lambda text: parse_criteria(f"{text}</think>[]", limit=9, source="s")),
    ),
    "rule_judge": (
        (OUTPUT, lambda text: answer(with_turn("<code>x</code>", output=text))),
        (OUTPUT, lambda text: answer(with_turn("<code>x</code>", output=f"Execution failed. Traceback:\n{text}"))),
        (OUTPUT, lambda text: answer(with_turn(f"<code>{text}</code>", code=text))),
        (OUTPUT, lambda text: answer(with_turn(text))),
        (OUTPUT, lambda text: answer(credit_of(text))),
        (OUTPUT, answer),
        (OUTPUT, lambda text: answer(Stage1([Message(role="user", content=f"Your task is: {text}")]).prompt(PROMPTS))),
    ),
}


def main(part: str) -> None:
    """Read everything of ``part``; a reply that is refused is read as well."""
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS))
    for length, read in PARTS[part]:
        for unit in UNITS:
            try:
                read((unit * (length // len(unit) + 1))[:length])
            except ReplyError:
                continue
    print("read", resource.getrusage(resource.RUSAGE_SELF).ru_utime)


if __name__ == "__main__":
    main(sys.argv[1])
