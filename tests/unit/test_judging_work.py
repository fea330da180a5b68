"""Work on untrusted text grows with its length, not with the square of it: 20 KB of output, 80 KB of a reply."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from draco_ray.errors import ReplyError
from draco_ray.judging.phases import parse_attributions, parse_criteria, parse_scores
from draco_ray.records import Criterion
from tests.support import hostile_texts

RUBRIC = (Criterion(title="A", description="d", evaluator_instruction="e"),)


@pytest.mark.parametrize("part", hostile_texts.PARTS)
def test_no_text_makes_reading_it_quadratic(part: str) -> None:
    """The kernel ends the process if it computes for much longer than linear work takes, on however busy a machine."""
    command = [sys.executable, "-m", "tests.support.hostile_texts", part]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.startswith("read")


def calls(read: Callable[[], object]) -> int:
    """Calls of functions, Python's and C's, that ``read`` makes."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        read()
    except ReplyError:
        pass
    finally:
        sys.setprofile(None)
    return count


def entries(number: int) -> str:
    return ", ".join(
        f'{{"title": "t{index}", "description": "a "b" c", "evaluator_instruction": "e",}}' for index in range(number)
    )


@pytest.mark.parametrize(
    "read",
    [
        lambda size: parse_criteria(f"[{entries(size)}]", limit=9, source="s"),
        lambda size: parse_scores(" ".join(f'[{{"score": {index}}}]' for index in range(size)), RUBRIC),
        lambda size: parse_scores(" ".join(['[{"score": 1}]'] * size), RUBRIC),
        lambda size: parse_scores(" ".join(f'[{{"other": {index}}}]' for index in range(size)), RUBRIC),
        lambda size: parse_attributions(f'[{{"verdict": "PASS", "relevant_steps": [{"1," * size}]}}]', RUBRIC, 9),
        lambda size: parse_scores('[{"evidence": "' + '" ' * size + '", "score": 1}]', RUBRIC),
        lambda size: parse_scores('[{"a" ' * size + "</think>" + json.dumps([{"score": 1}]), RUBRIC),
    ],
    ids=["broken entries", "different arrays", "equal arrays", "other arrays", "steps", "quotes", "beginnings"],
)
def test_the_calls_that_reading_takes_grow_with_the_reply(read: Callable[[int], object]) -> None:
    few, many = calls(lambda: read(100)), calls(lambda: read(800))
    assert many <= 8.5 * few + 100


def test_thousands_of_arrays_are_compared_with_the_first_only() -> None:
    text = " ".join(f'[{{"score": {index % 2}}}]' for index in range(3200))
    assert calls(lambda: parse_scores(text, RUBRIC)) < 60 * 3200
    with pytest.raises(ReplyError, match="several different"):
        parse_scores(text, RUBRIC)
