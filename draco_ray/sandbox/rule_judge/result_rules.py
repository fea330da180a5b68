"""Rules about what a run hands in: changes, an answer, the closing call, and the result as a whole."""

from __future__ import annotations

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.case import EMPTY_TEXTS, EVERY, Case, Finding, bare_code, does, not_applicable
from draco_ray.sandbox.rule_judge.causes import causes, wrong_data
from draco_ray.sandbox.rule_judge.data_rules import judge_pages, judge_selection, judge_source
from draco_ray.sandbox.rule_judge.traces import EMPTY
from draco_ray.sandbox.rule_judge.vocabulary import MAKING


def judge_items(case: Case) -> Finding:
    """The run works on something: what it selected is not empty."""
    empty = [
        shown.step
        for shown in case.trace.shown
        if shown.text in EMPTY_TEXTS and case.trace.depends(shown.value) and shown.value.calls & case.data_calls
    ]
    full = [
        shown.step
        for shown in case.trace.shown
        if shown.text is not None and shown.text not in EMPTY_TEXTS and shown.value.calls & case.data_calls
    ]
    if empty:
        because = "A list or selection came out empty, and the run went on as if it had found something."
        return case.failed(because, wrong_data(case) or empty)
    if full:
        return case.passed("What the run worked on was not empty.", full)
    return not_applicable("The run shows no size of what it worked on.")


def judge_actions(case: Case) -> Finding:
    """The changes that the task asks for are made, to everything selected."""
    demands = case.demands
    if demands.question:
        return not_applicable("The task asks for an answer, not for a change.")
    done: set[int] = set()
    for action in demands.actions:
        made = [call for call in case.changes if does(action, call)]
        if not made:
            tried = [call for call in case.trace.calls if call.changes and call.failed and does(action, call)]
            if tried:
                steps = causes(case) or {call.step for call in tried}
                return case.failed(f"The call to {action.name} ended in an error.", steps)
            if case.changes:
                used = ", ".join(sorted({call.name for call in case.changes}))
                return case.failed(
                    f"The task asks to {action.name}; the run called {used} instead.", (c.step for c in case.changes)
                )
            return case.failed(
                f"Nothing was done to {action.name}.", case.omission(action.apis.pattern.strip("^$(?:)"))
            )
        if not action.once and EVERY.search(demands.text) and len(made) == 1 and not made[0].looped:
            return case.failed(f"Only one item was dealt with to {action.name}; the task means all.", made[0].step)
        if not any(case.trace.depends(call.subject) for call in made) and not action.once:
            return case.failed("What was changed does not come from anything the run had read.", made[0].step)
        done |= {call.step for call in made}
    if not demands.actions:
        if case.changes:
            return case.passed("The run changed something as the task asks.", (call.step for call in case.changes))
        return case.failed("The task asks for a change and none was made.", case.omission())
    return case.passed("Each change the task asks for has a call that succeeded.", done)


def judge_targets(case: Case) -> Finding:
    """Nothing is changed that the task does not ask for."""
    if not case.changes:
        return not_applicable("The run changed nothing.")
    if case.demands.question:
        extra = case.changes
    elif case.demands.actions:
        extra = [call for call in case.changes if not case.demanded(call)]
    else:
        extra = []
    if extra:
        names = ", ".join(sorted({call.name for call in extra}))
        return case.failed(f"{names} changes something the task does not ask for.", (call.step for call in extra))
    if again := _made_again(case):
        return case.failed("A change that had been made was made once more.", again)
    return case.passed("Only what the task asks for was changed, once.", (call.step for call in case.changes))


def _made_again(case: Case) -> list[int]:
    """Steps whose code repeats an earlier step's change on the same data, where doing it twice makes two of it."""
    made: dict[tuple[str, str], int] = {}
    again = []
    for step in case.run.steps:
        changes = sorted(
            f"{call.name} {sorted(call.subject.calls)}"
            for call in case.changes
            if call.step == step.number and MAKING.search(call.api)
        )
        if not changes:
            continue
        key = (bare_code(step.code), ";".join(changes))
        if key in made:
            again.append(step.number)
        made.setdefault(key, step.number)
    return again


def judge_content(case: Case) -> Finding:
    """Texts that go into what is made are exactly those of the task."""
    demands = case.demands
    if not demands.contents and not demands.in_order:
        return not_applicable("The task gives no text to be used.")
    carried = [
        (call, value) for call in case.changes for name, value in call.arguments.items() if name != "access_token"
    ]
    steps: set[int] = set()
    for content in demands.contents:
        exact = [call.step for call, value in carried if value.text == content]
        if not exact:
            wrong = [call.step for call, value in carried if value.text is not None or value.from_task]
            if wrong:
                return case.failed(f"No change carries exactly {content!r}.", wrong)
            return case.failed(f"Nothing was made with {content!r}.", case.omission("create_", "send_"))
        steps |= set(exact)
    if demands.in_order:
        ordered = [call.step for call, value in carried if value.operations & {"sorted", "sort"}]
        if not ordered:
            return case.failed("The items were not put in order.", (call.step for call, _ in carried))
        steps |= set(ordered)
    return case.passed("What was made carries the task's own text.", steps)


def judge_answer(case: Case) -> Finding:
    """The answer is computed from the data, and is the kind of thing that was asked for."""
    demands = case.demands
    if not demands.question:
        return not_applicable("The task asks no question.")
    value = case.result
    if not value.calls:
        return case.failed("No answer was worked out from data.", case.omission("answer"))
    kinds: dict[str | None, tuple[frozenset[str], str]] = {
        "count": (frozenset({"len", "sum", "count", "+"}), "a count"),
        "total": (frozenset({"sum", "+"}), "a sum"),
        "name": (frozenset({"[title]", "[name]", ".title", ".name", "get"}), "a title or name"),
    }
    wanted, words = kinds.get(demands.computes, (frozenset(), ""))
    operations = value.operations - ({"+"} if "len" not in value.operations and demands.computes == "count" else set())
    if wanted and not operations & wanted:
        return case.failed(f"The answer is not {words} of what was read.", case.result_step)
    if demands.computes == "total" and operations & {"len"} and "sum" not in operations:
        return case.failed("The answer counts where the amounts should be added up.", case.result_step)
    computed = [step for name in sorted(operations & wanted) for step in case.trace.operated_in.get(name, ())]
    return case.passed("The answer was computed from what the APIs returned.", computed[-1:] or case.result_step)


def judge_completion(case: Case) -> Finding:
    """The task is closed once, after the work, with an answer exactly if one was asked for."""
    if not case.completions:
        tried = [call.step for call in case.trace.calls if call.api == "complete_task"]
        return case.failed(
            "complete_task never succeeded; the run should have called it once the work was done.",
            tried or case.steps(case.last_step),
        )
    # A later call replaces an earlier one.
    call = case.completions[-1]
    if (status := call.arguments.get("status")) and status.text not in {"success", None}:
        return case.failed("The task was given up although it can be done.", call.step)
    given = call.arguments.get("answer", call.arguments.get("#0", EMPTY))
    nothing = given == EMPTY
    if case.demands.question:
        if nothing or not case.answer.calls:
            because = "The task was closed without an answer that comes from the data."
            return case.failed(because, (nothing and call.step) or causes(case) or call.step)
    else:
        if not nothing and given.text not in {"None", ""}:
            return case.failed("The task asks for a change, but it was closed with an answer.", call.step)
        if not any(change.step <= call.step for change in case.changes):
            return case.failed("The task was closed before anything was done.", causes(case) or call.step)
    return case.passed("complete_task was called after the work, in the form the task asks for.", call.step)


def judge_outcome(case: Case) -> Finding:
    """Nothing that is visible stands between the run and the requested result."""
    parts = (
        judge_source,
        judge_pages,
        judge_selection,
        judge_items,
        judge_actions,
        judge_targets,
        judge_content,
        judge_answer,
        judge_completion,
    )
    findings = [part(case) for part in parts]
    faults = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    if faults:
        return case.failed(faults[0].because, faults[0].steps)
    good = [finding.steps for finding in findings if finding.verdict is Verdict.PASS]
    return case.passed("The run reads, selects, acts and closes as the task asks.", *good)
