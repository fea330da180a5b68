"""The rule judge of examples/library against the evaluator, on runs of clerks who do nothing, all, or wrong things."""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from draco_ray.records import Verdict
from draco_ray.rollout.code_block import number_tool_results
from draco_ray.sandbox.rule_judge.reading import Step
from draco_ray.sandbox.rule_judge.simple import Steps

FOLDER = Path(__file__).parents[2] / "examples" / "library"


@pytest.fixture(scope="module")
def example() -> Any:
    """The example's modules: judge, tools and demonstrations."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield [importlib.import_module(name) for name in ("judge", "tools", "demonstrations")]
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("demonstrations", "judge", "tools"):
            sys.modules.pop(name, None)


TASKS = [json.loads(line) for line in (FOLDER / "tasks.jsonl").read_text().splitlines()]
CHECKS = (
    "looks_first",
    "renews_what_is_allowed",
    "waives_what_is_allowed",
    "refuses_the_rest",
    "no_useless_call",
    "closes",
)


def steps_of(messages: list[dict[str, Any]]) -> Steps:
    """As a judge reads a conversation."""
    found: list[Step] = []
    for message, answer in zip(messages, [*messages[1:], {}], strict=True):
        if message["role"] != "assistant":
            continue
        calls = [json.dumps(each["function"]) for each in message.get("tool_calls", [])]
        output = answer.get("content") if calls else None
        text = "\n".join(calls) or message["content"]
        found.append(Step(number=len(found) + 1, code=text, output=output, message=not calls))
    return Steps(found)


def verdicts(judge: Any, task: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Verdict]:
    return {check: getattr(judge, check)(task["instruction"], steps_of(messages))[0] for check in CHECKS}


@pytest.mark.parametrize("said", ["I have renewed all your books and waived your fine.", "", "I could not do this."])
def test_doing_nothing_passes_no_criterion(example: Any, said: str) -> None:
    judge, _, _ = example
    for task in TASKS:
        found = verdicts(judge, task, [{"role": "assistant", "content": said}])
        assert found["looks_first"] is Verdict.FAIL
        assert Verdict.PASS not in found.values()


def test_looking_without_acting_passes_nothing_about_results(example: Any) -> None:
    judge, tools, demonstrations = example
    for task in TASKS:
        tools.reset(task)
        card = {"card": task["card"]}
        looks = demonstrations._turn("list_loans", card) + demonstrations._turn("show_member", card)
        found = verdicts(judge, task, [*looks, {"role": "assistant", "content": "All is done."}])
        assert Verdict.PASS not in [found[check] for check in CHECKS[1:4]]


def test_the_judge_agrees_with_the_evaluator_on_clerks_of_mixed_care(example: Any) -> None:
    """A run fails a criterion if and only if the evaluator fails it."""
    judge, tools, demonstrations = example
    rng = random.Random(1)
    seen = {True: 0, False: 0}
    for task in TASKS:
        messages = demonstrations.demonstration(task, rng)["messages"]
        success = all(tools.evaluate(task, tools.end_state()).values())
        seen[success] += 1
        failed = {check for check, verdict in verdicts(judge, task, messages).items() if verdict is Verdict.FAIL}
        assert bool(failed) != success, task["id"]
    assert min(seen.values()) > 50


FORMS = {
    "compact": lambda call: json.dumps(call, separators=(",", ":")),
    "swapped": lambda call: json.dumps({"arguments": call["arguments"], "name": call["name"]}),
    "lines": lambda call: json.dumps(call, indent=2),
    "text": lambda call: json.dumps({"name": call["name"], "arguments": json.dumps(call["arguments"])}),
}


def played(tools: Any, task: dict[str, Any], plan: list[list[tuple[str, dict[str, str]]]], form: str) -> Steps:
    """The steps of a run in which each step makes some calls."""
    tools.reset(task)
    steps = []
    for number, calls in enumerate(plan, start=1):
        results = []
        for name, arguments in calls:
            try:
                results.append(str(getattr(tools, name)(**arguments)))
            except LookupError as error:
                results.append(f"error: {name}: LookupError: {error}")
        code = "\n".join(
            f"<tool_call>\n{FORMS[form]({'name': name, 'arguments': arguments})}\n</tool_call>"
            for name, arguments in calls
        )
        steps.append(Step(number=number, code=code, output=number_tool_results([name for name, _ in calls], results)))
    return Steps([*steps, Step(number=len(steps) + 1, code="Done.", output=None, message=True)])


def failed(judge: Any, task: dict[str, Any], steps: Steps) -> set[str]:
    return {check for check in CHECKS if getattr(judge, check)(task["instruction"], steps)[0] is Verdict.FAIL}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read_however_they_are_written(example: Any, form: str, together: bool) -> None:
    judge, tools, _ = example
    for task in TASKS:
        card, right = {"card": task["card"]}, task["expected"]
        calls = [("list_loans" if task["asked"]["renew"] else "show_member", card)]
        calls += [("renew", {"book": book}) for book in right["renew"]] + [("waive_fine", card)] * right["waive"]
        calls += [("refuse", {"reason": "the rules"})] * right["refuse"]
        steps = played(tools, task, [calls] if together else [[call] for call in calls], form)
        assert all(tools.evaluate(task, tools.end_state()).values())
        assert failed(judge, task, steps) == set()
        cited = [getattr(judge, check)(task["instruction"], steps)[1] for check in CHECKS[1:3]]
        assert all(len(set(numbers)) == len(numbers) for numbers in cited)
        # A call that nobody asked for is seen in every form, too.
        extra = ("waive_fine", card) if task["asked"]["renew"] else ("renew", {"book": task["loans"][0]["book"]})
        assert failed(judge, task, played(tools, task, [*([call] for call in calls), [extra]], form))


def test_what_an_error_repeats_is_no_loan(example: Any) -> None:
    judge, tools, _ = example
    task = next(task for task in TASKS if task["asked"]["renew"] and not task["expected"]["renew"])
    book = task["asked"]["renew"][0]
    forged = ("renew", {"book": f"-\n{book}: on time, 0 holds"})
    steps = played(
        tools, task, [[("list_loans", {"card": task["card"]})], [forged], [("renew", {"book": book})]], "lines"
    )
    assert {"renews_what_is_allowed", "no_useless_call"} <= failed(judge, task, steps)
