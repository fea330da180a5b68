"""Rules about what a result rests on: the right list, all of it, the right items of it."""

from __future__ import annotations

import ast
import re

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.case import Case, Finding, not_applicable
from draco_ray.sandbox.rule_judge.demands import Limit
from draco_ray.sandbox.rule_judge.traces import EMPTY, Call, Test, number_in
from draco_ray.sandbox.rule_judge.vocabulary import (
    DONE_LISTS,
    MOST_ON_A_PAGE,
    PAGE_LIMIT,
    SUPPORT_APPS,
    ListWords,
    is_list,
    is_paged,
)

_PASSES_UNNOTICED = frozenset({"access_token", "page_index", "page_limit", "sort_by", "direction"})


def judge_source(case: Case) -> Finding:
    """The lists that the task names are the ones the result comes from."""
    wanted = case.demands.lists
    if not wanted:
        return not_applicable("The task names no list that these rules know.")
    accepted: list[Call] = []
    complaints: list[str] = []
    missing: list[ListWords] = []
    for entry in wanted:
        found = [call for call in case.sources if call.app == entry.app and call.api in entry.apis]
        wrong = {call: complaint for call in found if (complaint := _wrong_side(case, entry, call))}
        accepted += [call for call in found if call not in wrong]
        complaints += wrong.values()
        if len(wrong) == len(found):
            missing.append(entry)
    if not missing:
        named = ", ".join(sorted({call.name for call in accepted}))
        return case.passed(f"The result comes from {named}, which is what the task names.", (c.step for c in accepted))
    names = " and ".join(entry.name for entry in missing)
    others = [
        call for call in case.sources if is_list(call.api) and call.app not in SUPPORT_APPS and call not in accepted
    ]
    if complaints:
        misread = [call for call in others if any(call.api in entry.apis for entry in missing)]
        return case.failed(f"{complaints[0]} The task means {names}.", (call.step for call in misread or others))
    if others:
        used = ", ".join(sorted({call.name for call in others}))
        return case.failed(
            f"The result comes from {used}; it should have come from {names}.", (call.step for call in others)
        )
    apis = [api for entry in missing for api in entry.apis]
    return case.failed(f"Nothing in the result comes from {names}; it should have been read.", case.omission(*apis))


def _wrong_side(case: Case, entry: ListWords, call: Call) -> str | None:
    """Why a call of the right API still reads the wrong things."""
    direction = case.demands.direction
    if entry.directed and direction:
        other = "sent" if direction == "received" else "received"
        said = call.arguments.get("direction", EMPTY).text
        if other in call.api or said == other:
            return f"{call.name} was asked for what was {other}, not {direction}."
        if (
            "direction" not in call.arguments
            and call.api == "show_transactions"
            and not any(
                re.search("receiver|sender|direction", test.left_source + test.right_source) for test in case.conditions
            )
        ):
            return f"{call.name} was asked for both directions, not for what was {direction}."
    for name, value in call.arguments.items():
        if name in _PASSES_UNNOTICED or value.text is None or value.from_task or value.text in {"True", "False", ""}:
            continue
        said = value.text.rstrip("/").rpartition("/")[2] or value.text
        if not case.demands.mentions(said) and not said.isdigit():
            return f"{call.name} was narrowed to {name}={value.text!r}, of which the task says nothing."
    return None


def judge_pages(case: Case) -> Finding:
    """Every page of those lists is read."""
    wanted = {api for entry in case.demands.lists for api in entry.apis if is_paged(api)}
    paged = [call for call in case.sources if is_paged(call.api) and call.app not in SUPPORT_APPS]
    right = [call for call in paged if call.api in wanted] or ([] if wanted and case.demands.lists else paged)
    done = {api for change in case.changes for api in DONE_LISTS.get(change.api, ())}
    right += [call for call in paged if call not in right and call.api in done]
    if not right:
        if not wanted:
            return not_applicable("The task needs no list that comes in pages.")
        if paged:
            return not_applicable("The list the task needs was not read, so its pages are not the question.")
        return case.failed("The list the task needs was never read to its end.", case.omission(*wanted))
    cut = [call for call in right if not call.page_varies and not _proven_short(case, call)]
    if cut:
        names = ", ".join(sorted({call.name for call in cut}))
        return case.failed(
            f"{names} was asked for one page only; it should have asked on until an empty page.",
            (call.step for call in cut),
        )
    names = ", ".join(sorted({call.name for call in right}))
    return case.passed(f"{names} was read page by page to the end.", (call.step for call in right))


def _proven_short(case: Case, call: Call) -> bool:
    """Whether the run saw that the only page it read was not full."""
    limit = number_in(call.arguments.get("page_limit", EMPTY).text)
    size = PAGE_LIMIT if limit is None else min(limit, MOST_ON_A_PAGE)
    return any(
        shown.step >= call.step
        and 0 < (number_in(shown.text) or 0) < size
        and shown.value.operations == {"len"}
        and not shown.value.tests
        and {case.trace.calls[index] for index in shown.value.calls} == {call}
        for shown in case.trace.shown
    )


def judge_selection(case: Case) -> Finding:
    """Items are chosen by the condition that the task states, and by no other."""
    demands = case.demands
    done = {api for call in case.changes for api in DONE_LISTS.get(call.api, ())} & {call.api for call in case.sources}
    if not demands.selects and not done:
        if stray := _stray(case):
            return case.failed(f"`{stray.source}` leaves items out; the task wants all of them.", stray.step)
        return not_applicable("The task wants everything in the list, so there is nothing to select by.")
    good: set[int] = set()
    for limit in demands.limits:
        finding = meets_limit(case, limit)
        if finding.verdict is not Verdict.PASS:
            return finding
        good |= set(finding.steps)
    wanted = [(name, f'"{name}"') for name in demands.names]
    wanted += [(demands.relation, f"being a {demands.relation}")] if demands.relation else []
    for text, words in wanted:
        finding = _meets_name(case, text, words)
        if finding.verdict is not Verdict.PASS:
            return finding
        good |= set(finding.steps)
    for finding in (_leaves_out_done(case, bool(done)), _takes_extreme(case)):
        if finding.verdict is Verdict.FAIL:
            return finding
        good |= set(finding.steps)
    if stray := _stray(case):
        return case.failed(f"`{stray.source}` is a condition the task does not state.", stray.step)
    return case.passed(f"The code selects by what the task states: {'; '.join(demands.conditions())}.", good)


def meets_limit(case: Case, limit: Limit) -> Finding:
    flipped = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
    wrong: tuple[Test, str] | None = None
    for test in case.conditions:
        if test.operator not in flipped:
            continue
        data, value, operator, source = test.left, test.right, test.operator, test.left_source
        if not data.calls and value.calls:
            data, value, operator, source = test.right, test.left, flipped[test.operator], test.right_source
        if not data.calls or value.calls:
            continue
        if value.text is not None and not _same(value.text, limit.value):
            wrong = wrong or (test, f"compares with {value.text!r} instead of {limit.value!r}")
        elif limit.field is not None and "[" in source and not limit.field.search(source):
            wrong = wrong or (test, f"compares {source}, another field than the task speaks of")
        elif operator == limit.comparison:
            return case.passed("", test.step)
        else:
            wrong = (test, f'compares with `{operator}`, where "{limit.words}" means `{limit.comparison}`')
    if wrong:
        test, how = wrong
        return case.failed(f"`{test.source}` {how}.", test.step)
    return _unselected(case, f'"{limit.words}"')


def _meets_name(case: Case, text: str, words: str) -> Finding:
    negative: Test | None = None
    for test in case.conditions:
        if not any(_same(value.text, text) for value in (test.left, test.right)):
            continue
        if test.operator in {"==", "in", "endswith", "startswith"}:
            return case.passed("", test.step)
        negative = test
    for call in case.sources:
        if any(_same(value.text, text) for name, value in call.arguments.items() if name != "access_token"):
            return case.passed("", call.step)
    if negative:
        return case.failed(f"`{negative.source}` takes the opposite of {words}.", negative.step)
    return _unselected(case, words)


def _unselected(case: Case, words: str) -> Finding:
    if case.result.calls:
        if judge_source(case).verdict is Verdict.FAIL:
            return not_applicable("The list the task needs was not read, so there was nothing to select from.")
        return case.failed(f"No condition in the code selects by {words}.", case.result_step)
    return case.failed(f"The run never got to selecting by {words}.", case.omission("if ", "max(", "min("))


def _leaves_out_done(case: Case, used: bool) -> Finding:
    if not used and not case.demands.excludes_done:
        return not_applicable("")
    operations = case.result.operations
    where = case.trace.operated_in
    done = {api for apis in DONE_LISTS.values() for api in apis}

    def with_done(test: Test, operator: str) -> bool:
        return test.operator == operator and any(
            case.trace.calls[i].api in done for i in test.left.calls | test.right.calls
        )

    kept = {test.step for test in case.conditions if with_done(test, "in")}
    dropped = {test.step for test in case.conditions if with_done(test, "not in")}
    kept |= {step for name in {"&", "intersection"} & operations for step in where.get(name, ())}
    dropped |= {step for name in {"-", "difference"} & operations for step in where.get(name, ())}
    if kept:
        return case.failed("What is done already was kept instead of left out.", kept)
    if dropped:
        return case.passed("", dropped)
    return _unselected(case, "what is not done yet")


def _takes_extreme(case: Case) -> Finding:
    demands = case.demands
    if demands.extreme is None:
        return not_applicable("")
    operations = case.result.operations
    where = case.trace.operated_in
    ways = {
        "max": ({"max"}, {"sorted down", "[0]"}, {"sorted", "[-1]"}),
        "min": ({"min"}, {"sorted", "[0]"}, {"sorted down", "[-1]"}),
    }
    other = "min" if demands.extreme == "max" else "max"
    for way in ways[demands.extreme]:
        if way <= operations:
            name = next(operation for operation in sorted(way, reverse=True) if operation in where)
            if demands.extreme_field is not None:
                keys = [key for key in operations if " by [" in key]
                if keys and not any(demands.extreme_field.search(key) for key in keys):
                    return case.failed(f"It takes the {name} of another field than the task speaks of.", where[name])
            return case.passed("", where[name])
    for way in ways[other]:
        if way <= operations:
            name = next(operation for operation in sorted(way, reverse=True) if operation in where)
            return case.failed(
                f'"{demands.extreme_words}" asks for the {demands.extreme}; the code takes {name}.', where[name]
            )
    return _unselected(case, f'"{demands.extreme_words}"')


def _stray(case: Case) -> Test | None:
    """A comparison of data with a literal of which the task says nothing."""
    for test in case.conditions:
        for data, value, source in (
            (test.left, test.right, test.right_source),
            (test.right, test.left, test.left_source),
        ):
            if not data.calls or value.calls or value.from_task or value.text is None:
                continue
            if value.text in {"0", "1", "True", "False", "None", ""} or case.demands.mentions(value.text):
                continue
            if _literal(source) and not _about_credentials(test):
                return test
    return None


def _literal(source: str) -> bool:
    try:
        return isinstance(ast.literal_eval(source), (str, int, float))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _about_credentials(test: Test) -> bool:
    return "account_name" in test.left_source + test.right_source


def _same(found: str | None, wanted: str) -> bool:
    if found is None:
        return False
    if found.strip().strip(".").lower() == wanted.strip().strip(".").lower():
        return True
    try:
        return float(found) == float(wanted)
    except ValueError:
        return False
