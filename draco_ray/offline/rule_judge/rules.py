"""The rules: each looks at one thing a run can do well or badly and says which steps decided it.

A rule reads what the task demands (`demands`) and what the run's code did with it (`tracing`). What a run merely claims,
in a comment or a closing sentence, is never looked at, so it cannot be rewarded. Every pass and every fail cites at least
one step, unless the run has none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from draco_ray.offline.rule_judge.demands import Demands, Limit, read_demands
from draco_ray.offline.rule_judge.reading import TASK_MARK, Run
from draco_ray.offline.rule_judge.tracing import EMPTY, Call, Test, Value, trace
from draco_ray.offline.rule_judge.vocabulary import (
    DONE_LISTS,
    MOST_ON_A_PAGE,
    PAGE_LIMIT,
    SUPPORT_APPS,
    ActionWords,
    ListWords,
    is_list,
    is_paged,
)
from draco_ray.records import Verdict

_PASSES_UNNOTICED = frozenset({"access_token", "page_index", "page_limit", "sort_by", "direction"})
_EVERY = re.compile(r"\b(?:all|every|each|any|those|others)\b", re.IGNORECASE)
_EMPTY_TEXTS = frozenset({"0", "[]", "{}", "set()", "None", "''", '""', ""})
_MISUSE = re.compile(r"SyntaxError|IndentationError|NameError|TypeError|AttributeError|KeyError|IndexError|ValueError")
_BAD_CALL = re.compile(
    r"No API named|No app named|not found in (?:the )?app|422|unexpected keyword|field required|extra fields"
    r"|validation error|does not exist",
    re.IGNORECASE,
)
_FORBIDDEN = re.compile(
    r"^\s*(?:import|from)\s+(?:os|sys|subprocess|socket|shutil|pathlib|spotipy)\b|\bopen\(", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule says of a run."""

    verdict: Verdict
    steps: tuple[int, ...]
    """1-based steps that decided it."""
    because: str
    """One sentence; for a fail also what should have been done."""


class Case:
    """One run under one task, and what several rules want to know of it."""

    def __init__(self, run: Run, task: str) -> None:
        self.run = run
        self.demands: Demands = read_demands(task)
        self.trace = trace(run, task)

    @cached_property
    def changes(self) -> list[Call]:
        """Calls that changed something."""
        return [call for call in self.trace.calls if call.changes and not call.failed]

    @cached_property
    def completions(self) -> list[Call]:
        """Successful complete_task calls."""
        return [
            call
            for call in self.trace.calls
            if call.app == "supervisor" and call.api == "complete_task" and not call.failed
        ]

    @cached_property
    def result(self) -> Value:
        """What the run worked out: its answer, or what it changed; failing that, the last data it had in hand."""
        if self.demands.question:
            answer = self.answer
            if answer.calls:
                return answer
        else:
            demanded = [call for call in self.changes if self.demanded(call)]
            value = EMPTY
            for call in demanded or self.changes:
                value |= self.grounded(call.subject, call.step)
            if value.calls or value.tests:
                return value
        return self.trace.last_data[1] if self.trace.last_data else EMPTY

    @cached_property
    def answer(self) -> Value:
        """The answer handed in, traced back to what was printed if it was typed in."""
        for call in self.completions:
            given = call.arguments.get("answer", call.arguments.get("#0", EMPTY))
            return self.grounded(given, call.step)
        return EMPTY

    @cached_property
    def result_step(self) -> int:
        """The step in which the result came about."""
        demanded = [call.step for call in self.changes if self.demanded(call)]
        if not self.demands.question and demanded:
            return demanded[0]
        return self.trace.last_data[0] if self.trace.last_data else self.last_step

    @cached_property
    def sources(self) -> list[Call]:
        """Calls that the result was computed from."""
        return [self.trace.calls[index] for index in sorted(self.trace.depends(self.result))]

    @cached_property
    def conditions(self) -> list[Test]:
        """Conditions behind the result."""
        return [self.trace.tests[index] for index in sorted(self.trace.all_tests(self.result))]

    @property
    def last_step(self) -> int:
        """The last step, 0 in a run without any."""
        return self.run.steps[-1].number if self.run.steps else 0

    def grounded(self, value: Value, step: int) -> Value:
        """``value``, joined with what was printed before if it repeats that as a literal."""
        if value.calls or value.text is None or value.from_task or value.text in _EMPTY_TEXTS:
            return value
        for shown in reversed(self.trace.shown):
            if shown.step < step and shown.value.calls and value.text in (self.output(shown.step) or ""):
                return shown.value
        return value

    def output(self, step: int) -> str | None:
        """What a step printed."""
        return next((found.output for found in self.run.steps if found.number == step), None)

    def demanded(self, call: Call) -> bool:
        """Whether the task asks for this change."""
        return any(_does(action, call) for action in self.demands.actions)

    def steps(self, *numbers: int | Iterable[int]) -> tuple[int, ...]:
        """Citable steps: within the run, ascending, each once."""
        flat: set[int] = set()
        for number in numbers:
            flat |= {number} if isinstance(number, int) else set(number)
        valid = {step.number for step in self.run.steps}
        return tuple(sorted(flat & valid))

    def omission(self, *words: str) -> tuple[int, ...]:
        """Where something that never happened should have: a failed try, else the first error, else before the end."""
        failed = [step for step in self.run.steps if step.number in self.trace.failed]
        for step in failed:
            if any(word in step.code for word in words):
                return (step.number,)
        if failed:
            return (failed[0].number,)
        if self.completions:
            return (self.completions[0].step,)
        return self.steps(self.last_step)

    def passed(self, because: str, *steps: int | Iterable[int]) -> Finding:
        """A pass."""
        return Finding(Verdict.PASS, self.steps(*steps) or self.steps(self.last_step), because)

    def failed(self, because: str, *steps: int | Iterable[int]) -> Finding:
        """A fail."""
        return Finding(Verdict.FAIL, self.steps(*steps) or self.steps(self.last_step), because)


def not_applicable(because: str) -> Finding:
    """Neither."""
    return Finding(Verdict.NOT_APPLICABLE, (), because)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule with the criterion that states it."""

    key: str
    title: str
    description: str
    instruction: Callable[[Demands], str]
    judge: Callable[[Case], Finding]
    proposed: Callable[[Demands], bool] | None = None
    """Whether stage1 proposes it for a task; None leaves it to stage2, which proposes it when a run fails it."""
    task_dependent: bool = True
    words: str = ""
    """Regular expression for other people's criteria about the same thing."""

    def criterion(self, demands: Demands) -> dict[str, str]:
        """The criterion in the form the prompts ask for."""
        instruction = self.instruction(demands)
        if self.task_dependent:
            instruction = f"{instruction} {TASK_MARK}{demands.text}"
        return {"title": self.title, "description": self.description, "evaluator_instruction": instruction}


# --- what the result rests on -----------------------------------------------------------------------------------------


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
        good = [
            call for call in found if not (complaint := _wrong_side(case, entry, call)) or complaints.append(complaint)
        ]
        accepted += good
        if not good:
            missing.append(entry)
    if not missing:
        named = ", ".join(sorted({call.name for call in accepted}))
        return case.passed(f"The result comes from {named}, which is what the task names.", (c.step for c in accepted))
    names = " and ".join(entry.name for entry in missing)
    others = [
        call for call in case.sources if is_list(call.api) and call.app not in SUPPORT_APPS and call not in accepted
    ]
    if complaints:
        wrong = [call for call in others if any(call.api in entry.apis for entry in missing)]
        return case.failed(f"{complaints[0]} The task means {names}.", (call.step for call in wrong or others))
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
    right += [call for call in paged if call not in right and any(call.api in done for done in DONE_LISTS.values())]
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
    limit = call.arguments.get("page_limit", EMPTY).text
    size = min(int(limit), MOST_ON_A_PAGE) if limit and limit.isdigit() else PAGE_LIMIT
    return any(
        shown.step >= call.step
        and shown.text is not None
        and shown.text.isdigit()
        and 0 < int(shown.text) < size
        and "len" in shown.value.operations
        and not shown.value.tests
        and {case.trace.calls[index] for index in shown.value.calls} == {call}
        for shown in case.trace.shown
    )


def judge_selection(case: Case) -> Finding:
    """Items are chosen by the condition that the task states, and by no other."""
    demands = case.demands
    done = {api for call in case.changes for api in DONE_LISTS.get(call.api, ())} & {call.api for call in case.sources}
    if not demands.selects and not done:
        stray = _stray(case)
        if stray:
            return case.failed(
                f"`{stray.left_source} {stray.operator} {stray.right_source}` leaves items out; the task wants all of them.",
                stray.step,
            )
        return not_applicable("The task wants everything in the list, so there is nothing to select by.")
    good: set[int] = set()
    for limit in demands.limits:
        finding = _meets_limit(case, limit)
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
        return case.failed(
            f"`{stray.left_source} {stray.operator} {stray.right_source}` is a condition the task does not state.",
            stray.step,
        )
    return case.passed(f"The code selects by what the task states: {'; '.join(demands.conditions())}.", good)


def _meets_limit(case: Case, limit: Limit) -> Finding:
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
        return case.failed(f"`{test.left_source} {test.operator} {test.right_source}` {how}.", test.step)
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
        return case.failed(
            f"`{negative.left_source} {negative.operator} {negative.right_source}` takes the opposite of {words}.",
            negative.step,
        )
    return _unselected(case, words)


def _unselected(case: Case, words: str) -> Finding:
    if case.result.calls:
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


def judge_items(case: Case) -> Finding:
    """The run works on something: what it selected is not empty."""
    empty = [
        shown.step
        for shown in case.trace.shown
        if shown.text in _EMPTY_TEXTS and case.trace.depends(shown.value) and shown.value.calls & _data_calls(case)
    ]
    full = [
        shown.step
        for shown in case.trace.shown
        if shown.text is not None and shown.text not in _EMPTY_TEXTS and shown.value.calls & _data_calls(case)
    ]
    if empty:
        return case.failed(
            "A list or selection came out empty, and the run went on as if it had found something.", empty
        )
    if full:
        return case.passed("What the run worked on was not empty.", full)
    return not_applicable("The run shows no size of what it worked on.")


def _data_calls(case: Case) -> frozenset[int]:
    return frozenset(
        index for index, call in enumerate(case.trace.calls) if call.app not in SUPPORT_APPS and call.api != "login"
    )


# --- what it hands in -------------------------------------------------------------------------------------------------


def _does(action: ActionWords, call: Call) -> bool:
    return action.apis.search(call.api) is not None and all(
        (value := call.arguments.get(name)) is not None and value.text in {str(wanted), None}
        for name, wanted in action.settings
    )


def judge_actions(case: Case) -> Finding:
    """The changes that the task asks for are made, to everything selected."""
    demands = case.demands
    if demands.question:
        return not_applicable("The task asks for an answer, not for a change.")
    steps: set[int] = set()
    for action in demands.actions:
        made = [call for call in case.changes if _does(action, call)]
        if not made:
            tried = [call for call in case.trace.calls if call.changes and call.failed and _does(action, call)]
            if tried:
                return case.failed(f"The call to {action.name} ended in an error.", (call.step for call in tried))
            if case.changes:
                used = ", ".join(sorted({call.name for call in case.changes}))
                return case.failed(
                    f"The task asks to {action.name}; the run called {used} instead.", (c.step for c in case.changes)
                )
            return case.failed(
                f"Nothing was done to {action.name}.", case.omission(action.apis.pattern.strip("^$(?:)"))
            )
        if not action.once and _EVERY.search(demands.text) and len(made) == 1 and not made[0].looped:
            return case.failed(f"Only one item was dealt with to {action.name}; the task means all.", made[0].step)
        if not any(case.trace.depends(call.subject) for call in made) and not action.once:
            return case.failed("What was changed does not come from anything the run had read.", made[0].step)
        steps |= {call.step for call in made}
    if not demands.actions:
        if case.changes:
            return case.passed("The run changed something as the task asks.", (call.step for call in case.changes))
        return case.failed("The task asks for a change and none was made.", case.omission())
    return case.passed("Each change the task asks for has a call that succeeded.", steps)


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
    return case.passed("Only what the task asks for was changed.", (call.step for call in case.changes))


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
    call = case.completions[0]
    if (status := call.arguments.get("status")) and status.text not in {"success", None}:
        return case.failed("The task was given up although it can be done.", call.step)
    given = call.arguments.get("answer", call.arguments.get("#0", EMPTY))
    nothing = given == EMPTY
    if case.demands.question:
        if nothing or not case.answer.calls:
            return case.failed("The task was closed without an answer that comes from the data.", call.step)
    else:
        if not nothing and given.text not in {"None", ""}:
            return case.failed("The task asks for a change, but it was closed with an answer.", call.step)
        if not any(change.step <= call.step for change in case.changes):
            return case.failed("The task was closed before anything was done.", call.step)
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
        return case.failed(faults[0].because, *(fault.steps for fault in faults[:2]))
    good = [finding.steps for finding in findings if finding.verdict is Verdict.PASS]
    return case.passed("The run reads, selects, acts and closes as the task asks.", *good)


# --- conduct ----------------------------------------------------------------------------------------------------------


def judge_errors(case: Case) -> Finding:
    """No step ends in an error."""
    failed = case.trace.failed
    if not case.run.steps:
        return case.failed("The run has no step at all.")
    if failed:
        repeated = _repeated(case)
        first = min(failed)
        again = f" Steps {', '.join(map(str, repeated))} repeat code that had just failed." if repeated else ""
        return case.failed(f"Step {first} ends in an error: {failed[first]}.{again}", failed)
    reading = [call.step for call in case.trace.calls if is_list(call.api) and call.app not in SUPPORT_APPS]
    return case.passed("Every step ran without an error.", reading)


def _repeated(case: Case) -> list[int]:
    """Steps with the same code as a failed step before them."""
    seen: set[str] = set()
    again = []
    for step in case.run.steps:
        code = "\n".join(line for line in step.code.splitlines() if not line.lstrip().startswith("#")).strip()
        if code in seen:
            again.append(step.number)
        if step.number in case.trace.failed:
            seen.add(code)
    return again


def judge_recovery(case: Case) -> Finding:
    """After an error the run changes something and gets on."""
    failed = case.trace.failed
    if not failed:
        return not_applicable("No step failed.")
    if repeated := _repeated(case):
        return case.failed("Code that had failed was sent again unchanged.", repeated)
    if max(failed) == case.last_step:
        return case.failed("The run ended in an error that was never mended.", max(failed))
    return case.passed("After the error the run went on differently and worked.", (step + 1 for step in failed))


def judge_secrets(case: Case) -> Finding:
    """No password and no token is printed or typed."""
    obtained = [
        call.step for call in case.trace.calls if call.api in {"login", "show_account_passwords", "show_payment_cards"}
    ]
    printed = [shown.step for shown in case.trace.shown if shown.value.secret and shown.step not in case.trace.failed]
    typed = [
        call.step
        for call in case.trace.calls
        for name, value in call.arguments.items()
        if name in {"password", "access_token"} and value.text is not None and not value.from_task
    ]
    if printed or typed:
        return case.failed("A password or access token was shown; it belongs into calls only.", printed, typed)
    if not obtained:
        return not_applicable("The run never held a password or token.")
    return case.passed("Passwords and tokens went from variables into calls only.", obtained)


def judge_stop(case: Case) -> Finding:
    """Nothing is executed once the task is closed."""
    if not case.completions:
        return not_applicable("The task was never closed.")
    closed = case.completions[0].step
    later = [step.number for step in case.run.steps if step.number > closed]
    if later:
        return case.failed("Code was executed after complete_task had succeeded; the run should have stopped.", later)
    return case.passed("Nothing was executed after complete_task.", closed)


def judge_python(case: Case) -> Finding:
    """Every step is Python that can be parsed."""
    if not case.run.steps:
        return case.failed("The run has no step at all.")
    broken = set(case.trace.unparsable)
    broken |= {
        step for step, error in case.trace.failed.items() if "SyntaxError" in error or "IndentationError" in error
    }
    if broken:
        return case.failed("A step is not valid Python.", broken)
    return case.passed("Every step is valid Python.", case.run.steps[0].number)


def judge_api_calls(case: Case) -> Finding:
    """Calls go to APIs that exist, with arguments they take."""
    wrong = [
        step.number
        for step in case.run.steps
        if step.number in case.trace.failed
        and (_BAD_CALL.search(step.output or "") or _BAD_CALL.search(case.trace.failed[step.number]))
    ]
    if wrong:
        return case.failed("A call named an API or argument that does not exist.", wrong)
    if not case.trace.calls:
        return case.failed("The run calls no API.", case.omission())
    return case.passed("All calls were accepted.", {call.step for call in case.trace.calls if not call.failed})


def judge_tools(case: Case) -> Finding:
    """Only the provided APIs and harmless Python are used."""
    wrong = [step.number for step in case.run.steps if _FORBIDDEN.search(step.code)]
    if wrong:
        return case.failed("The code reaches for the operating system, files or a real service's package.", wrong)
    return case.passed("Only the provided APIs and plain Python were used.", {call.step for call in case.trace.calls})


def judge_login(case: Case) -> Finding:
    """Each app that needs it is logged in to, and its token passed on."""
    used = {call.app for call in case.trace.calls if call.app not in SUPPORT_APPS and call.api != "login"}
    if not used:
        return not_applicable("No app that needs a login was used.")
    logins = {call.app: call.step for call in case.trace.calls if call.api == "login" and not call.failed}
    refused = [
        step.number
        for step in case.run.steps
        if step.number in case.trace.failed and re.search(r"\b401\b", step.output or "")
    ]
    if missing := sorted(used - set(logins)):
        return case.failed(
            f"{missing[0]} was used without a login.", (c.step for c in case.trace.calls if c.app in missing)
        )
    if len(refused) > 1:
        return case.failed("Calls were refused for want of a valid token, more than once.", refused)
    return case.passed("Every app in use was logged in to.", logins.values())


def judge_credentials(case: Case) -> Finding:
    """Passwords come from the supervisor app."""
    logins = [call for call in case.trace.calls if call.api == "login"]
    if not logins:
        return not_applicable("No login was attempted.")
    read = [call.step for call in case.trace.calls if call.api == "show_account_passwords" and not call.failed]
    typed = [call.step for call in logins if (value := call.arguments.get("password")) and value.text is not None]
    if typed:
        return case.failed("A password was typed in.", typed)
    if not read:
        return case.failed(
            "Passwords were used that had not been read from the supervisor app.", (c.step for c in logins)
        )
    return case.passed("Passwords were read from the supervisor app.", read)


def judge_live_data(case: Case) -> Finding:
    """Results come out of the returned objects, not off the screen."""
    values = [
        (call.step, value) for call in case.changes for name, value in call.arguments.items() if name.endswith("_id")
    ]
    if case.demands.question:
        values += [(call.step, call.arguments.get("answer", EMPTY)) for call in case.completions]
    if not values:
        return not_applicable("No value derived from data was handed in.")
    typed = [step for step, value in values if not value.calls and not value.from_task]
    if typed:
        return case.failed("An id or answer was typed in instead of taken from the returned data.", typed)
    return case.passed("Ids and answers come from variables that hold API results.", (step for step, _ in values))


def judge_time(case: Case) -> Finding:
    """Dates and times are the task's own, compared the way it says."""
    timed = [limit for limit in case.demands.limits if re.search("[-:]", limit.value)]
    if not timed:
        return not_applicable("The task involves no date or time.")
    for limit in timed:
        finding = _meets_limit(case, limit)
        if finding.verdict is Verdict.FAIL:
            return finding
    steps = [step for limit in timed for step in _meets_limit(case, limit).steps]
    return case.passed("The period is drawn as the task says.", steps)


def judge_every_item(case: Case) -> Finding:
    """Every selected item is dealt with."""
    if "slice" in case.result.operations:
        return case.failed("A slice leaves items out.", case.result_step)
    finding = judge_actions(case) if not case.demands.question else judge_answer(case)
    if not _EVERY.search(case.demands.text) and not case.demands.question:
        return not_applicable("The task is about a single item.")
    return finding


def judge_working_set(case: Case) -> Finding:
    """What was fetched because it matters is used."""
    lists = [
        (index, call)
        for index, call in enumerate(case.trace.calls)
        if is_list(call.api) and call.app not in SUPPORT_APPS and not call.failed
    ]
    if not lists:
        return not_applicable("No list was fetched.")
    used = case.trace.depends(case.result)
    if "slice" in case.result.operations:
        return case.failed("Only a slice of what was fetched was used.", case.result_step)
    if not used & {index for index, _ in lists}:
        return case.failed("What was fetched never entered the result.", (call.step for _, call in lists))
    return case.passed(
        "The fetched list entered the result as a whole.", (c.step for index, c in lists if index in used)
    )


def judge_verification(case: Case) -> Finding:
    """After a change the run looks whether it took effect."""
    if not case.changes:
        return not_applicable("Nothing was changed.")
    steps = {call.step for call in case.changes}
    changed = {index for index, call in enumerate(case.trace.calls) if call.changes and not call.failed}
    seen = [shown.step for shown in case.trace.shown if shown.value.calls & changed]
    closed = case.completions[0].step if case.completions else case.last_step + 1
    reread = [
        call.step
        for call in case.trace.calls
        if is_list(call.api) and call.app not in SUPPORT_APPS and max(steps) < call.step < closed
    ]
    if seen or reread:
        return case.passed("The run looked at the outcome of its change.", seen, reread)
    return case.failed("The responses to the change were thrown away and nothing was read back.", steps)


def judge_docs(case: Case) -> Finding:
    """Where the run does not know an API, it reads its documentation."""
    docs = [call.step for call in case.trace.calls if call.app == "api_docs" and not call.failed]
    wrong = judge_api_calls(case)
    if wrong.verdict is Verdict.FAIL and not any(step <= max(wrong.steps) + 1 for step in docs):
        return case.failed("Names or arguments were guessed instead of looked up.", wrong.steps)
    if docs:
        return case.passed("The documentation was read.", docs)
    return not_applicable("Every call was right without reading.")


# --- the catalogue ----------------------------------------------------------------------------------------------------


def _always(demands: Demands) -> bool:
    return True


def _plain(text: str) -> Callable[[Demands], str]:
    return lambda demands: text


def _source_instruction(demands: Demands) -> str:
    names = " and ".join(entry.name for entry in demands.lists) or "the list the task names"
    apis = ", ".join(sorted({api for entry in demands.lists for api in entry.apis}))
    side = f" Of lists with two sides the {demands.direction} one is meant." if demands.direction else ""
    return (
        f"Follow the answer, or the items that were changed, back to the call that returned them. Pass if they come from "
        f"{names} ({apis}), not narrowed by anything the task does not say.{side} Fail if they come from another list or "
        "from none."
    )


def _selection_instruction(demands: Demands) -> str:
    conditions = "; ".join(demands.conditions()) or "everything in the list"
    return (
        f"Read the code that filters, matches or ranks. The task's condition: {conditions}. Pass if the code states it "
        "with the right field and direction. Fail if it is reversed, missing, about another value or field, or joined by "
        "a condition the task does not state."
    )


def _actions_instruction(demands: Demands) -> str:
    wanted = "; ".join(action.name for action in demands.actions) or "the change the task asks for"
    return (
        f"Look for calls that do this: {wanted}. Pass if they succeeded, in a loop over everything selected. Fail if they "
        "are missing, ended in an error, covered one item only, or another change was made instead."
    )


RULES = (
    Rule(
        "outcome",
        "Reaches the requested result",
        "The end state or answer has to be the one asked for. A good run reads the right data whole, selects by the stated "
        "condition, does what is asked and closes the task; a poor one breaks off or goes astray somewhere on that way.",
        _plain(
            "Go through the run from the data to the closing call. Pass if nothing visible is wrong with the list that was "
            "read, its completeness, the selection, the change or the answer, and complete_task succeeded. Fail at the "
            "first of these that is wrong or missing."
        ),
        judge_outcome,
        _always,
        words=r"final result|requested result|end state|overall (?:success|correctness)|achieves? the (?:task|goal)"
        r"|correct (?:final )?(?:answer|result|outcome)",
    ),
    Rule(
        "source",
        "Uses the list the task names",
        "Another list gives another result. The data has to come from the list that the task speaks of.",
        _source_instruction,
        judge_source,
        lambda demands: bool(demands.lists),
        words=r"(?:correct|right) (?:data )?(?:source|list|app|endpoint|library)|data source|list the task names"
        r"|evidence comes from|where the (?:task's )?data lives",
    ),
    Rule(
        "pages",
        "Reads every page of the list",
        "Lists come in pages. Whoever reads the first one only misses most of the items.",
        _plain(
            "Find the calls that fetch the lists the result depends on. Pass if they ask for page after page until none is "
            "left, or if a printed length proves that the only page was not full. Fail if one page was taken for the "
            "whole. Not applicable if no list that comes in pages is needed."
        ),
        judge_pages,
        lambda demands: any(is_paged(api) for entry in demands.lists for api in entry.apis),
        words=r"\bpages?\b|paginat|complete data|all (?:relevant )?records|page_index|entire list",
    ),
    Rule(
        "selection",
        "Selects by the condition the task states",
        "The right items are those that meet the task's condition, no others and all of them.",
        _selection_instruction,
        judge_selection,
        lambda demands: demands.selects or bool(demands.lists),
        words=r"selection logic|filter|(?:right|correct|stated|very) condition|selects? by|comparison|matches? on|criteri[ao]n? (?:the|stated)",
    ),
    Rule(
        "answer",
        "Computes the answer from the data",
        "The question is answered by a value worked out from what the APIs returned, not by a guess.",
        _plain(
            "Follow the answer back. Pass if code computed it from returned data and it is the kind of value the question "
            "asks for: a count, a sum, a title. Fail if it is guessed, empty, or another kind of value. Not applicable if "
            "the task asks no question."
        ),
        judge_answer,
        lambda demands: demands.question,
        words=r"computes? the answer|answer (?:is|was) computed|right kind of (?:value|answer)|submits? the (?:count|answer|number|title)",
    ),
    Rule(
        "actions",
        "Makes the change the task asks for",
        "Finding the items is not enough: the change has to be made, to each of them.",
        _actions_instruction,
        judge_actions,
        lambda demands: not demands.question,
        words=r"required actions?|performs?|state changes?|really done|makes? the change|carries out",
    ),
    Rule(
        "content",
        "Uses the task's exact text",
        "Titles, messages and paths that the task gives are used word for word.",
        lambda demands: (
            "Compare the arguments of the changing calls with the task's own texts"
            f" ({'; '.join(demands.contents) or 'none quoted'}). Pass if they agree exactly and are in the order asked for."
            " Fail if a text is reworded, cut or missing. Not applicable if the task gives no text."
        ),
        judge_content,
        lambda demands: bool(demands.contents) or demands.in_order,
        words=r"exact (?:action )?(?:content|text|message|title|wording)|reworded|word for word|embellish",
    ),
    Rule(
        "completion",
        "Closes the task after the work",
        "The work counts only once complete_task has been called, with the answer if there is one.",
        lambda demands: (
            "Look for a successful complete_task call after the work. Pass if it "
            + (
                "hands in an answer that comes from the data"
                if demands.question
                else "has no answer and follows the change"
            )
            + ". Fail if it is missing, premature, reports failure"
            + (" or has no answer" if demands.question else " or carries an answer")
            + ". A closing turn without code is fine."
        ),
        judge_completion,
        _always,
        words=r"complete_task|completes? (?:the )?task|completion call|finali[sz]es?|closes? the task|task properly",
    ),
    Rule(
        "items",
        "Notices when it has nothing in hand",
        "An empty list is a sign that something before it went wrong. Going on with it leads nowhere.",
        _plain(
            "Look at the printed sizes of lists and selections. Fail if one is empty and the run goes on with it. Pass if "
            "they hold something. Not applicable if none is shown."
        ),
        judge_items,
        task_dependent=False,
        words=r"empty (?:list|result|selection)|nothing in hand|no (?:items|results) (?:were )?found",
    ),
    Rule(
        "targets",
        "Changes nothing else",
        "A change that the task did not ask for spoils the result.",
        _plain(
            "List the calls that change something. Fail if one does what the task does not ask for. Pass if all do what it "
            "asks. Not applicable if nothing was changed."
        ),
        judge_targets,
        words=r"exact items|intended items|nothing else|unintended|outside the task's scope|side effects?|collateral",
    ),
    Rule(
        "errors",
        "Runs every step without an error",
        "A step that raises does not get its work done, and sending the same code again does not help.",
        _plain(
            "Look for steps whose output is an error. Fail if there is one; sending the same failing code again is the "
            "worst case. Pass if every step ran."
        ),
        judge_errors,
        task_dependent=False,
        words=r"without (?:an )?(?:error|exception)|runs every step|raises|exceptions?\b|failing (?:call|code) (?:again|repeatedly)",
    ),
    Rule(
        "secrets",
        "Keeps passwords and tokens unprinted",
        "Secret values belong into calls. A printed one is exposed.",
        _plain(
            "Look at what is printed and typed. Fail if a password or access token, or a whole object with one, is printed "
            "or written as a literal. Pass if they stay in variables. Not applicable if the run held none."
        ),
        judge_secrets,
        task_dependent=False,
        words=r"secrets?\b|expos|leak|prints? (?:a )?(?:passwords?|tokens?)|(?:passwords?|tokens?) (?:un)?printed|card data",
    ),
    Rule(
        "stop",
        "Executes nothing after closing the task",
        "Once the task is closed, more code can only spoil it.",
        _plain(
            "Find the first successful complete_task call. Fail if any later step executes code. Pass if none does; a "
            "closing turn without code is fine. Not applicable if the task was never closed."
        ),
        judge_stop,
        task_dependent=False,
        words=r"stops? after|after (?:the )?(?:completion|complete_task|closing|task is (?:marked )?complete)|remains to be executed|further code",
    ),
    Rule(
        "live_data",
        "Computes from live data",
        "Results come out of the returned objects, by code.",
        _plain(
            "Check how ids and answers entered the calls. Pass if they came from variables. Fail if they were typed in."
        ),
        judge_live_data,
        words=r"live data|typed in again|off the screen|hard-?coded|from printed output",
    ),
    Rule(
        "time",
        "Handles time correctly",
        "Periods begin and end where the wording says.",
        _plain("Compare the code's dates and comparisons with the task's. Not applicable if there are none."),
        judge_time,
        words=r"\btime correctly|dates? (?:matter|window|range|handling)|calendar|current time|\bperiod\b|datetime",
    ),
    Rule(
        "every_item",
        "Processes items completely",
        "Every item in scope is dealt with.",
        _plain("Compare the items dealt with and the items selected. Fail if some were skipped."),
        judge_every_item,
        words=r"items? completely|every item|skipped items?|each occurrence|double counting|all items",
    ),
    Rule(
        "working_set",
        "Uses complete working set",
        "What was fetched is used as a whole.",
        _plain("Follow the fetched lists into the result. Fail if only a part of them was used."),
        judge_working_set,
        words=r"working set|fetched (?:because|items|collections?)|also used|left in a slice|slice was left",
    ),
    Rule(
        "verification",
        "Verifies action outcome",
        "After a change the run makes sure that it took effect.",
        _plain("Look for a response that was shown, or a later read. Not applicable if nothing was changed."),
        judge_verification,
        words=r"verif|took effect|read(?:s|ing)? (?:it )?back|confirm(?:s|ed)? (?:the )?(?:outcome|change|result)|re-?reads?",
    ),
    Rule(
        "login",
        "Authenticates correctly",
        "Each protected app is logged in to.",
        _plain("Look for a login to each app in use. Not applicable if none needs one."),
        judge_login,
        task_dependent=False,
        words=r"authenticat|log(?:s|ged)? in|\blogin\b|protected apis?",
    ),
    Rule(
        "credentials",
        "Retrieves needed credentials",
        "Passwords are read from the supervisor app.",
        _plain("See where the password of each login came from. Not applicable without a login."),
        judge_credentials,
        task_dependent=False,
        words=r"credentials?|where the password came from|passwords? for logins?|show_account_passwords",
    ),
    Rule(
        "python",
        "Uses runnable Python",
        "Each step is Python that can be executed.",
        _plain("Fail if a step is not valid Python."),
        judge_python,
        task_dependent=False,
        words=r"runnable|valid python|syntax|broken python|prose",
    ),
    Rule(
        "docs",
        "Checks docs when needed",
        "Unknown APIs are looked up before they are called.",
        _plain("Look at errors about unknown APIs or parameters. Not applicable if there were none and none was read."),
        judge_docs,
        task_dependent=False,
        words=r"\bdocs?\b|documentation was read|looks? (?:at|up) the documentation|show_api_doc",
    ),
    Rule(
        "recovery",
        "Recovers from failures",
        "After an error something changes and the work goes on.",
        _plain("Find every error and what came after it. Not applicable without an error."),
        judge_recovery,
        task_dependent=False,
        words=r"recover|after an error|same mistake|same obstacle|changes? (?:its )?approach|repeats? (?:a|the) failing",
    ),
    Rule(
        "api_calls",
        "Uses valid API calls",
        "Calls go to APIs that exist, with parameters they have.",
        _plain("Fail if an API or argument does not exist."),
        judge_api_calls,
        task_dependent=False,
        words=r"valid api|endpoints? that exist|invented (?:names?|arguments?)|documented ones|parameters they have|wrong parameter",
    ),
    Rule(
        "tools",
        "Uses allowed tools only",
        "The run keeps to the provided APIs and permitted Python.",
        _plain("Fail if the code reaches for the operating system, files, processes or the network."),
        judge_tools,
        task_dependent=False,
        words=r"allowed tools|permitted (?:parts|tools)|operating system|forbidden",
    ),
)
"""Strongest signal first: results, then conduct, then what only other people's rubrics ask about."""

BY_KEY = {rule.key: rule for rule in RULES}
CONDUCT = ("items", "targets", "errors", "secrets", "stop")
"""What stage2 proposes when it sees a run fail it."""
