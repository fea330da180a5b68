"""The rules: each a function from a case to a verdict with the steps that decided it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.case import Case, Finding, first_failure, makes_change, not_applicable
from draco_ray.sandbox.rule_judge.demands import DONE_LISTS, PAGED, Limit, NamedList
from draco_ray.sandbox.rule_judge.trace import EMPTY_VALUE, ApiCall, Selection

_NARROWING = re.compile(r"(?!access_token|page_index|page_limit|sort_by|direction|#|\*)")
_FULL_PAGE = 5
"""Number of results on a full page of AppWorld."""
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def _steps(found: Iterable[ApiCall | Selection]) -> set[int]:
    return {each.step for each in found}


def _names(calls: Iterable[ApiCall]) -> str:
    return ", ".join(sorted({call.name for call in calls}))


# --- rules about the data that the result is computed from ---


def judge_source(case: Case) -> Finding:
    """Rule: the result comes from the lists that the task names."""
    if not case.demands.lists:
        return not_applicable("The task names no list that these rules know.")
    reads = {entry.name: [call for call in case.sources if _reads(case, entry, call)] for entry in case.demands.lists}
    right = [call for calls in reads.values() for call in calls]
    missing = [entry for entry in case.demands.lists if not reads[entry.name]]
    if not missing:
        return case.passed(f"The result comes from {_names(right)}, which is what the task names.", _steps(right))
    lists = " and ".join(entry.name for entry in missing)
    if others := [call for call in case.sources if call.about_data and not call.changes and call not in right]:
        because = f"The result comes from {_names(others)}; it should have come from {lists}."
        return case.failed(because, _steps(others))
    apis = [api for entry in missing for api in entry.apis]
    return case.failed(f"Nothing in the result comes from {lists}; it should have been read.", case.omission(*apis))


def _reads(case: Case, entry: NamedList, call: ApiCall) -> bool:
    """Whether a call reads the list, and asks for the right items of it.

    Wrong are sent items instead of received ones, or the reverse, and items filtered by a text that the task does not
    mention.
    """
    if call.app != entry.app or call.api not in entry.apis:
        return False
    other = {"received": "sent", "sent": "received"}.get(case.demands.direction or "")
    if entry.directed and other and (f"_{other}_" in call.api or call.text("direction") == other):
        return False
    narrowing = {name: call.text(name) for name in call.arguments if _NARROWING.match(name)}
    said = [text.rstrip("/").rpartition("/")[2] for text in narrowing.values() if text and not text.isdigit()]
    return all(text in {"True", "False"} or case.demands.mentions(text) for text in said)


def judge_pages(case: Case) -> Finding:
    """Rule: every page of the lists that the task needs is read."""
    wanted = {api for entry in case.demands.lists for api in entry.apis if api in PAGED}
    wanted |= {DONE_LISTS[call.api] for call in case.changes if call.api in DONE_LISTS}
    paged = [call for call in case.sources if call.api in PAGED]
    read = [call for call in paged if call.api in wanted]
    if not wanted:
        return not_applicable("The task needs no list that comes in pages.")
    if not read and paged:
        return not_applicable("The list the task needs was not read, so its pages do not matter.")
    if not read:
        return case.failed("The list the task needs was never read to its end.", case.omission(*wanted))
    names = _names(read)
    if cut := [call for call in read if not call.page_varies and not _is_short(case, call)]:
        return case.failed(f"Only one page of {names} was read; keep asking until a page is empty.", _steps(cut))
    return case.passed(f"{names} was read page by page to the end.", _steps(read))


def _is_short(case: Case, call: ApiCall) -> bool:
    """Whether the step printed only a number that is less than the length of a full page."""
    output = next((step.output or "" for step in case.run.steps if step.number == call.step), "")
    return output.strip() in map(str, range(1, _FULL_PAGE))


def judge_selection(case: Case) -> Finding:
    """Rule: items are chosen by the condition that the task states, and by no other."""
    demands = case.demands
    done = {DONE_LISTS[call.api] for call in case.changes if call.api in DONE_LISTS}
    done &= {call.api for call in case.sources}
    stray = next((test for test in case.conditions if _is_stray(case, test)), None)
    if not demands.conditions and not done and not stray:
        return not_applicable("The task wants everything in the list, so there is nothing to select by.")
    findings = [_by_limit(case, limit) for limit in demands.limits]
    findings += [_by_name(case, name) for name in demands.names]
    findings += [_by_extreme(case, demands.extreme)] if demands.extreme else []
    findings += [_leaves_out_done(case)] if demands.excludes_done or done else []
    for finding in findings:
        if finding.verdict is not Verdict.PASS:
            return finding
    if stray:
        return case.failed(f"`{stray.source}` is a condition the task does not state.", stray.step)
    words = "; ".join(demands.conditions)
    return case.passed(f"The code selects by what the task states: {words}.", *(each.steps for each in findings))


def _by_limit(case: Case, limit: Limit) -> Finding:
    wrong: Finding | None = None
    for test in case.conditions:
        value, operator = test.right, test.operator
        if value.calls:
            value, operator = test.left, _FLIPPED.get(operator, "")
        if operator not in _FLIPPED or value.calls:
            continue
        if value.text is not None and not _same(value.text, limit.value):
            how = f"compares with {value.text!r} instead of {limit.value!r}"
            wrong = wrong or case.failed(f"`{test.source}` {how}.", test.step)
        elif operator == limit.operator:
            return case.passed("", test.step)
        else:
            how = f'compares with `{operator}`, where "{limit.words}" means `{limit.operator}`'
            wrong = case.failed(f"`{test.source}` {how}.", test.step)
    return wrong or _unselected(case, f'"{limit.words}"')


def _by_name(case: Case, name: str) -> Finding:
    tests = [test for test in case.conditions if _same(test.left.text, name) or _same(test.right.text, name)]
    good = [test.step for test in tests if test.operator in {"==", "in", "endswith", "startswith"}]
    good += [call.step for call in case.sources for value in call.arguments.values() if _same(value.text, name)]
    fault = f"`{tests[-1].source}` takes the opposite of {name!r}." if tests else ""
    return _selected(case, good[:1], [test.step for test in tests[-1:]], fault, repr(name))


def _by_extreme(case: Case, extreme: str) -> Finding:
    other = "min" if extreme == "max" else "max"
    good = [test.step for test in case.conditions if test.operator in {extreme, "sorted"}]
    wrong = [test.step for test in case.conditions if test.operator == other]
    fault = f"The task asks for the {extreme}; the code takes the {other}."
    return _selected(case, good, wrong, fault, f"the {extreme}")


def _leaves_out_done(case: Case) -> Finding:
    lists = set(DONE_LISTS.values())
    tests = [each for each in case.conditions if any(case.trace.calls[i].api in lists for i in each.right.calls)]
    kept = [each.step for each in tests if each.operator in {"in", "&", "intersection"}]
    dropped = [each.step for each in tests if each.operator in {"not in", "-", "difference"}]
    fault = "What is done already was kept instead of left out."
    return _selected(case, [] if kept else dropped, kept, fault, "what is not done yet")


def _selected(case: Case, right: list[int], wrong: list[int], fault: str, words: str) -> Finding:
    """A pass for the steps that select rightly, else a fail for those with the ``fault``, else `_unselected`."""
    if right:
        return case.passed("", right)
    return case.failed(fault, wrong) if wrong else _unselected(case, words)


def _unselected(case: Case, words: str) -> Finding:
    if not case.result.calls:
        return case.failed(f"The run never selects by {words}.", case.omission("if ", "max(", "min("))
    if judge_source(case).verdict is Verdict.FAIL:
        return not_applicable("The list the task needs was not read, so there was nothing to select from.")
    return case.failed(f"No condition in the code selects by {words}.", case.result_step)


def _is_stray(case: Case, test: Selection) -> bool:
    """Whether ``test`` compares data with a literal that the task does not mention."""
    for data, value in ((test.left, test.right), (test.right, test.left)):
        if data.calls and not value.calls and not value.from_task and value.text and "account_name" not in test.source:
            known = value.text in {"0", "1", "True", "False"} or case.demands.mentions(value.text)
            return not known
    return False


def _same(found: str | None, wanted: str) -> bool:
    return found is not None and found.strip().strip(".").lower() == wanted.strip().strip(".").lower()


# --- rules about what the run changes, how it closes the task, and its outcome ---


def judge_actions(case: Case) -> Finding:
    """Rule: the changes that the task asks for are made, and no others."""
    demands = case.demands
    if demands.question and not case.changes:
        return not_applicable("The task asks for an answer, not for a change.")
    for action in demands.actions:
        if any(makes_change(action, call) for call in case.changes):
            continue
        if tried := [call for call in case.trace.calls if call.failed and makes_change(action, call)]:
            return case.failed(f"The call to {action.name} ended in an error.", blamed_steps(case) or _steps(tried))
        used = _names(case.changes) or "nothing"
        steps = _steps(case.changes) or case.omission(*action.apis.split("|"))
        return case.failed(f"The task asks to {action.name}; the run called {used} instead.", steps)
    if extra := [call for call in case.changes if (demands.question or demands.actions) and call not in case.demanded]:
        return case.failed(f"{_names(extra)} changes something the task does not ask for.", _steps(extra))
    if not case.changes:
        return case.failed("The task asks for a change and none was made.", case.omission())
    return case.passed("The run makes each change that the task asks for, and no other.", _steps(case.changes))


def judge_completion(case: Case) -> Finding:
    """Rule: the task is closed once, after the work, with an answer if and only if the task asks for one."""
    if not case.completions:
        tried = {call.step for call in case.trace.calls if call.api == "complete_task"}
        because = "complete_task never succeeded; the run should have called it once the work was done."
        return case.failed(because, tried)
    call = case.completions[-1]
    if call.text("status") not in {"success", None}:
        return case.failed("The task was given up although it can be done.", call.step)
    if case.demands.question and not case.answer.calls:
        because = "The task was closed without an answer that comes from the data."
        return case.failed(because, (case.answer != EMPTY_VALUE and blamed_steps(case)) or call.step)
    if not case.demands.question and case.answer != EMPTY_VALUE and case.answer.text not in {"None", ""}:
        return case.failed("The task asks for a change, but it was closed with an answer.", call.step)
    if not case.demands.question and not any(change.step <= call.step for change in case.changes):
        return case.failed("The task was closed before anything was done.", blamed_steps(case) or call.step)
    return case.passed("complete_task was called after the work, in the form the task asks for.", call.step)


def judge_outcome(case: Case) -> Finding:
    """Rule: the run shows no fault that keeps it from the requested result."""
    findings = [part(case) for part in (judge_source, judge_pages, judge_selection, judge_actions, judge_completion)]
    if fault := first_failure(findings):
        return fault
    good = [finding.steps for finding in findings if finding.verdict is Verdict.PASS]
    return case.passed("The run reads, selects, acts and closes as the task asks.", case.result_step, *good)


# --- rules about errors, secrets, and steps after the task is closed ---


def judge_errors(case: Case) -> Finding:
    """Rule: no step ends in an error."""
    if not case.run.steps:
        return case.failed("The run has no step at all.")
    if failed := case.trace.failed:
        first = min(failed)
        return case.failed(f"Step {first} ends in an error: {failed[first]}.", failing_steps(case))
    return case.passed("Every step ran without an error.", (step.number for step in case.run.steps))


def judge_secrets(case: Case) -> Finding:
    """Rule: no password and no token is printed or typed."""
    held = {call.step for call in case.trace.calls if call.api in {"login", "show_account_passwords"}}
    typed = {call.step for call in case.trace.calls if call.text("password") or call.text("access_token")}
    if shown := case.trace.leaks | typed:
        return case.failed("A password or access token was shown; it belongs in calls only.", shown)
    if not held:
        return not_applicable("The run never held a password or token.")
    return case.passed("Passwords and tokens were only passed from variables to calls.", held)


def judge_stop(case: Case) -> Finding:
    """Rule: nothing is executed once the task is closed."""
    if not case.completions:
        return not_applicable("The task was never closed.")
    closed = case.completions[0].step
    if later := [step.number for step in case.run.steps if step.number > closed]:
        return case.failed("Code was executed after complete_task had succeeded; the run should have stopped.", later)
    return case.passed("Nothing was executed after complete_task.", closed)


# --- the first cause: if an earlier mistake led to a failure, the step of that mistake is blamed ---


def wrong_data(case: Case) -> tuple[int, ...]:
    """Steps that read or chose the wrong data; empty if the data is right."""
    fault = first_failure(judge(case) for judge in (judge_source, judge_pages, judge_selection))
    return fault.steps if fault else ()


def failing_steps(case: Case) -> set[int]:
    """Steps to blame for errors: for a missing variable the failed step that should have set it, for a refused change
    of wrong items the step that chose them."""
    failed, wrong = case.trace.failed, wrong_data(case)
    codes = {step.number: step.code for step in case.run.steps}
    blamed: set[int] = set()
    for step, error in failed.items():
        undefined = re.search(r"NameError: name '(\w+)'", error)
        sets = undefined and re.compile(rf"\b{undefined[1]}\b\s*(?:=|,|\+=)")
        if sets and any(sets.search(codes[earlier]) for earlier in failed if earlier < step):
            continue
        refused = [call for call in case.trace.calls if call.step == step and call.failed and call.changes]
        before = {cause for cause in wrong if cause < step}
        blamed |= before if before and any(call.subject.calls for call in refused) else {step}
    return blamed


def blamed_steps(case: Case) -> tuple[int, ...]:
    """Steps to blame for what the run did not achieve; empty if neither wrong data nor errors explain it."""
    return wrong_data(case) or tuple(sorted(failing_steps(case)))
