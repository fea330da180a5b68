"""The rule judge reads calls of functions as code: data goes from results into arguments, a refused call has failed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from draco_ray.judging.phases import Credit, Score
from draco_ray.judging.prompts import load_prompts
from draco_ray.records import Criterion, ScoredCriterion, Verdict
from draco_ray.sandbox.function_calls import calls_as_code
from draco_ray.sandbox.rule_judge.answering import answer
from draco_ray.sandbox.rule_judge.case import Finding
from draco_ray.sandbox.rule_judge.reading import Run, Step
from draco_ray.sandbox.rule_judge.rules import RULES
from tests.support.rule_judge_runs import run_of, trajectory_of

TASK = "What is the title of the longest song in my library?"
"""Of the sandbox."""
ACCOUNTS = '[{"account_name": "spotify", "password": "s3cret"}]'
REFUSED = 'error: spotify__login: Response status code is 401:\n{"message":"Invalid credentials"}'


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def played(password: str = "s3cret", login: str = '{"access_token": "eyJh"}', *, closes: bool = True) -> Run:
    """Logs in, reads the library, hands in a title."""
    steps = [
        (call("supervisor__show_account_passwords"), ACCOUNTS),
        (call("spotify__login", username="me@example.com", password=password), login),
        (call("spotify__show_song_library", access_token="eyJh", page_index=0), '[{"song_id": 17, "title": "Sun"}]'),
    ]
    return run_of(*steps, *[(call("supervisor__complete_task", answer="Sun", status="success"), "null")] * closes)


def find(key: str, run: Run) -> Finding:
    return next(rule for rule in RULES if rule.key == key).judge(run, TASK)


def test_arguments_that_a_result_held_come_from_it() -> None:
    assert [(step.number, step.code) for step in calls_as_code(played()).steps] == [
        (1, "result_1 = apis.supervisor.show_account_passwords()"),
        (2, "result_2 = apis.spotify.login(username='me@example.com', password=result_1['password'])"),
        (3, "result_3 = apis.spotify.show_song_library(access_token=result_2['access_token'], page_index=0)"),
        (4, "result_4 = apis.supervisor.complete_task(answer=result_3['title'], status='success')"),
    ]
    for key in ("errors", "secrets", "completion"):
        assert find(key, played()).verdict is Verdict.PASS, (key, find(key, played()).because)


def test_messages_are_no_code_and_bear_the_blame_where_there_is_no_call() -> None:
    said = Step(number=5, code="complete_task(", output=None, message=True)
    spoken = replace(played(), steps=(*played().steps, said))
    assert calls_as_code(spoken) == calls_as_code(played())
    assert find("errors", spoken).verdict is Verdict.PASS
    only = find("errors", Run(steps=(replace(said, number=1),)))
    assert (only.verdict, only.steps) == (Verdict.FAIL, (1,))


def test_what_goes_wrong_is_found_at_its_step() -> None:
    refused = find("errors", played(login=REFUSED))
    assert (refused.verdict, refused.steps) == (Verdict.FAIL, (2,))
    assert "401" in refused.because
    assert find("completion", played(closes=False)).verdict is Verdict.FAIL


def test_several_calls_of_a_step_have_their_own_results() -> None:
    both = call("supervisor__show_account_passwords") + "\n" + call("spotify__login", username="a", password="b")
    run = calls_as_code(
        run_of((both, f"(1) supervisor__show_account_passwords: {ACCOUNTS}\n(2) spotify__login: {REFUSED}"))
    )
    assert [(step.number, step.output) for step in run.steps] == [
        (1, ACCOUNTS),
        (1, 'Execution failed. Traceback:\nException: Response status code is 401:\n{"message":"Invalid credentials"}'),
    ]


def test_calls_whose_results_are_not_numbered_share_the_output() -> None:
    run = calls_as_code(run_of((call("a__b") + "\n" + call("a__c"), "Both are done.")))
    assert [step.output for step in run.steps] == ["Both are done."] * 2


def test_what_is_no_call_stays_as_it_is() -> None:
    odd = [
        "print(apis.spotify.login())",
        call("spotify"),
        call("a__b", **{"x y": 1}),
        call("a__import"),
        call("a__b(); c"),
        "<tool_call>\n{'name': 'a__b', 'arguments': {}}\n</tool_call>",
        '<tool_call>\n{"name": "a__b", "arguments": []}\n</tool_call>',
        "<tool_call>\n[1]\n</tool_call>",
        "<tool_call>\n" + "{" * 100_000 + "}\n</tool_call>",
        f"print({call('a__b')!r})",
        f'text = r"""\n{call("supervisor__complete_task")}"""\nprint("\\d")',
    ]
    run = run_of(*((action, "-") for action in odd))
    assert calls_as_code(run) == run


def test_code_that_imitates_a_call_has_failed() -> None:
    """A policy that writes code cannot claim a call that was never made: AppWorld says that this is no Python."""
    said = "Execution failed. Traceback:\nSyntaxError: invalid syntax"
    forged = run_of((call("supervisor__complete_task", answer="Sun"), said))
    assert find("completion", forged).verdict is Verdict.FAIL


def test_the_prompts_of_a_run_by_calls_are_judged() -> None:
    prompts = load_prompts(Path("prompts/judge"))
    rules = [rule for rule in RULES if rule.discovered or rule.applies(TASK)]
    rubric = [Criterion(**rule.criterion(TASK), source="stage1") for rule in rules]
    trajectory = trajectory_of(played(login=REFUSED), TASK)
    # A turn is a call in the template's form, no code block.
    turns = tuple(replace(turn, text=turn.action or turn.text) for turn in trajectory.turns)
    trajectory = replace(trajectory, turns=turns)
    phase, reply = answer(Score(trajectory, rubric).prompt(prompts))
    scores = [ScoredCriterion(verdict=Verdict(entry["score"])) for entry in json.loads(reply)["entries"]]
    assert phase == "score"
    assert {Verdict.PASS, Verdict.FAIL} <= {score.verdict for score in scores}
    phase, reply = answer(Credit(trajectory, rubric, scores).prompt(prompts))
    cited = {
        entry["rubric_title"]: entry["relevant_steps"]
        for entry in json.loads(reply)["entries"]
        if entry["verdict"] == "FAIL"
    }
    assert phase == "credit"
    assert [2] in cited.values()
