"""Every rule, with the criterion that states it where this judge proposes it, and the words others use for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from draco_ray.sandbox.rule_judge import conduct_rules, data_rules, result_rules
from draco_ray.sandbox.rule_judge.case import Case, Finding
from draco_ray.sandbox.rule_judge.demands import Demands
from draco_ray.sandbox.rule_judge.reading import TASK_MARK
from draco_ray.sandbox.rule_judge.vocabulary import is_paged

Instruction = Callable[[Demands], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A criterion to be proposed."""

    title: str
    description: str
    instruction: Instruction
    applies: Callable[[Demands], bool] | None = None
    """Tasks for which stage1 proposes it; None leaves it to stage2, which proposes it when it sees a run fail it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule."""

    key: str
    judge: Callable[[Case], Finding]
    words: str
    """Regular expression of words by which other people's criteria speak of the same thing."""
    draft: Draft | None = None
    """None for a rule that this judge never proposes by itself."""
    needs_task: bool = False
    """Whether its verdict depends on what the task says."""

    def criterion(self, demands: Demands) -> dict[str, str]:
        """The rule's criterion for a task, as the prompts ask for it; for no text, one that fits any task.

        Raises ValueError if it has none.
        """
        if self.draft is None:
            raise ValueError(f"rule {self.key} states no criterion")
        instruction = self.draft.instruction(demands)
        if self.needs_task and demands.text:
            instruction = f"{instruction} {TASK_MARK}{demands.text}"
        return {"title": self.draft.title, "description": self.draft.description, "evaluator_instruction": instruction}


def _always(demands: Demands) -> bool:
    return True


def _names_paged_list(demands: Demands) -> bool:
    return any(is_paged(api) for entry in demands.lists for api in entry.apis)


def _plain(text: str) -> Instruction:
    return lambda demands: text


def _source_instruction(demands: Demands) -> str:
    names = " and ".join(entry.name for entry in demands.lists) or "the list the task names"
    apis = ", ".join(sorted({api for entry in demands.lists for api in entry.apis}))
    named = f"{names} ({apis})" if apis else names
    side = f" Of lists with two sides the {demands.direction} one is meant." if demands.direction else ""
    return (
        "Follow the answer, or the items that were changed, back to the call that returned them. Pass if they come "
        f"from {named}, not narrowed by anything the task does not say.{side} Fail if they come from another "
        "list or from none."
    )


def _selection_instruction(demands: Demands) -> str:
    conditions = "; ".join(demands.conditions()) or "everything in the list"
    return (
        f"Read the code that filters, matches or ranks. The task's condition: {conditions}. Pass if the code states it "
        "with the right field and direction. Fail if it is reversed, missing, about another value or field, or joined "
        "by a condition the task does not state."
    )


def _answer_instruction(demands: Demands) -> str:
    kind = {"count": "a count", "total": "a sum", "name": "a title or name"}.get(demands.computes or "", "a value")
    return (
        f"Follow the answer back. Pass if code worked it out from returned data and it is {kind}, as asked. "
        "Fail if it is guessed, empty, or another kind of value."
    )


def _actions_instruction(demands: Demands) -> str:
    wanted = "; ".join(action.name for action in demands.actions) or "the change the task asks for"
    return (
        f"Look for calls that do this: {wanted}. Pass if they succeeded, in a loop over everything selected. Fail if "
        "they are missing, ended in an error, covered one item only, or another change was made instead."
    )


def _content_instruction(demands: Demands) -> str:
    quoted = "; ".join(demands.contents) or "none is quoted"
    order = " The items must be put in the order asked for." if demands.in_order else ""
    return (
        f"Compare the arguments of the changing calls with the task's own texts: {quoted}.{order} Pass if they agree "
        "exactly. Fail if a text is reworded, cut or missing."
    )


def _completion_instruction(demands: Demands) -> str:
    good, bad = ("it hands in an answer that comes from the data", "has no answer")
    if not demands.text:
        good, bad = "it hands in an answer just where the task asks for one", "has an answer where none is asked for"
    elif not demands.question:
        good, bad = ("it has no answer and follows the change", "carries an answer")
    return (
        f"Look for a successful complete_task call after the work. Pass if {good}. Fail if it is missing, premature, "
        f"reports failure or {bad}. A closing turn without code is fine."
    )


RULES = (
    Rule(
        key="outcome",
        judge=result_rules.judge_outcome,
        needs_task=True,
        words=r"final result|requested result|end state|overall (?:success|correctness)|achieves? the (?:task|goal)"
        r"|correct (?:final )?(?:answer|result|outcome)",
        draft=Draft(
            title="Reaches the requested result",
            description="The end state or answer has to be the one asked for. A good run reads the right data whole, "
            "selects by the stated condition, does what is asked and closes the task; a poor one goes astray.",
            instruction=_plain(
                "Go through the run from the data to the closing call. Pass if nothing visible is wrong with the list "
                "that was read, its completeness, the selection, the change or the answer, and complete_task "
                "succeeded. Fail at the first of these that is wrong or missing."
            ),
            applies=_always,
        ),
    ),
    Rule(
        key="source",
        judge=data_rules.judge_source,
        needs_task=True,
        words=r"(?:correct|right) (?:data )?(?:source|list|app|endpoint|library)|data source|list the task names"
        r"|evidence comes from|where the (?:task's )?data lives",
        draft=Draft(
            title="Uses the list the task names",
            description="Another list gives another result. The data has to come from the list the task speaks of.",
            instruction=_source_instruction,
            applies=lambda demands: bool(demands.lists),
        ),
    ),
    Rule(
        key="pages",
        judge=data_rules.judge_pages,
        needs_task=True,
        words=r"\bpages?\b|paginat|complete data|all (?:relevant )?records|page_index|entire list",
        draft=Draft(
            title="Reads every page of the list",
            description="Lists come in pages. Whoever reads the first one only misses most of the items.",
            instruction=_plain(
                "Find the calls that fetch the lists the result depends on. Pass if they ask for page after page until "
                "none is left, or if a printed length proves that the only page was not full. Fail if one page was "
                "taken for the whole. Not applicable if no list that comes in pages is needed."
            ),
            applies=_names_paged_list,
        ),
    ),
    Rule(
        key="selection",
        judge=data_rules.judge_selection,
        needs_task=True,
        words=r"selection logic|filter|(?:right|correct|stated|very) condition|selects? by|comparison|matches? on"
        r"|criteri(?:on|a) (?:the|stated)",
        draft=Draft(
            title="Selects by the condition the task states",
            description="The right items are those that meet the task's condition, no others and all of them.",
            instruction=_selection_instruction,
            applies=lambda demands: demands.selects or bool(demands.lists),
        ),
    ),
    Rule(
        key="answer",
        judge=result_rules.judge_answer,
        needs_task=True,
        words=r"computes? the answer|answer (?:is|was) computed|right kind of (?:value|answer)"
        r"|submits? the (?:count|answer|number|title)",
        draft=Draft(
            title="Computes the answer from the data",
            description="The question is answered by a value worked out from what the APIs returned, not by a guess.",
            instruction=_answer_instruction,
            applies=lambda demands: demands.question,
        ),
    ),
    Rule(
        key="actions",
        judge=result_rules.judge_actions,
        needs_task=True,
        words=r"required actions?|performs?|state changes?|really done|makes? the change|carries out",
        draft=Draft(
            title="Makes the change the task asks for",
            description="Finding the items is not enough: the change has to be made, to each of them.",
            instruction=_actions_instruction,
            applies=lambda demands: not demands.question,
        ),
    ),
    Rule(
        key="content",
        judge=result_rules.judge_content,
        needs_task=True,
        words=r"exact (?:action )?(?:content|text|message|title|wording)|reworded|word for word|embellish",
        draft=Draft(
            title="Uses the task's exact text",
            description="Titles, messages and paths that the task gives are used word for word.",
            instruction=_content_instruction,
            applies=lambda demands: bool(demands.contents) or demands.in_order,
        ),
    ),
    Rule(
        key="completion",
        judge=result_rules.judge_completion,
        needs_task=True,
        words=r"complete_task|completes? (?:the )?task|completion call|finali[sz]es?|closes? the task|task properly",
        draft=Draft(
            title="Closes the task after the work",
            description="The work counts only once complete_task was called, with the answer if there is one.",
            instruction=_completion_instruction,
            applies=_always,
        ),
    ),
    Rule(
        key="items",
        judge=result_rules.judge_items,
        words=r"empty (?:list|result|selection)|nothing in hand|no (?:items|results) (?:were )?found",
        draft=Draft(
            title="Notices when it has nothing in hand",
            description="An empty list is a sign that something before it went wrong. Going on with it leads nowhere.",
            instruction=_plain(
                "Look at the printed sizes of lists and selections. Fail if one is empty and the run goes on with it. "
                "Pass if they hold something. Not applicable if none is shown."
            ),
        ),
    ),
    Rule(
        key="targets",
        judge=result_rules.judge_targets,
        needs_task=True,
        words=r"exact items|intended items|nothing else|unintended|outside the task's scope|side effects?|collateral",
        draft=Draft(
            title="Changes nothing else, and nothing twice",
            description="A change that the task did not ask for, or a second time the same one, spoils the result.",
            instruction=_plain(
                "List the calls that change something. Fail if one does what the task does not ask for, or does again "
                "what a step before it did. Pass if all do what it asks, once. Not applicable if nothing was changed."
            ),
        ),
    ),
    Rule(
        key="errors",
        judge=conduct_rules.judge_errors,
        words=r"without (?:an )?(?:error|exception)|runs every step|raises|exceptions?\b"
        r"|failing (?:call|code) (?:again|repeatedly)",
        draft=Draft(
            title="Runs every step without an error",
            description="A step that raises does not get its work done, and the same code again does not help.",
            instruction=_plain(
                "Look for steps whose output is an error. Fail if there is one; sending the same failing code again is "
                "the worst case. Pass if every step ran."
            ),
        ),
    ),
    Rule(
        key="secrets",
        judge=conduct_rules.judge_secrets,
        words=r"secrets?\b|expos|leak|prints? (?:a )?(?:passwords?|tokens?)|(?:passwords?|tokens?) (?:un)?printed"
        r"|card data",
        draft=Draft(
            title="Keeps passwords and tokens unprinted",
            description="Secret values belong into calls. A printed one is exposed.",
            instruction=_plain(
                "Look at what is printed and typed. Fail if a password or access token, or a whole object with one, is "
                "printed or written as a literal. Pass if they stay in variables. Not applicable if the run held none."
            ),
        ),
    ),
    Rule(
        key="stop",
        judge=conduct_rules.judge_stop,
        words=r"stops? after|after (?:the )?(?:completion|complete_task|closing|task is (?:marked )?complete)"
        r"|remains to be executed|further code",
        draft=Draft(
            title="Executes nothing after closing the task",
            description="Once the task is closed, more code can only spoil it.",
            instruction=_plain(
                "Find the first successful complete_task call. Fail if any later step executes code. Pass if none "
                "does; a closing turn without code is fine. Not applicable if the task was never closed."
            ),
        ),
    ),
    Rule(
        key="live_data",
        judge=conduct_rules.judge_live_data,
        needs_task=True,
        words=r"live data|typed in again|off the screen|hard-?coded|from printed output",
    ),
    Rule(
        key="time",
        judge=conduct_rules.judge_time,
        needs_task=True,
        words=r"\btime correctly|dates? (?:matter|window|range|handling)|calendar|current time|\bperiod\b|datetime",
    ),
    Rule(
        key="every_item",
        judge=conduct_rules.judge_every_item,
        needs_task=True,
        words=r"items? completely|every item|skipped items?|each occurrence|double counting|all items",
    ),
    Rule(
        key="working_set",
        judge=conduct_rules.judge_working_set,
        needs_task=True,
        words=r"working set|fetched (?:because|items|collections?)|also used|slice was left",
    ),
    Rule(
        key="verification",
        judge=conduct_rules.judge_verification,
        words=r"verif|took effect|read(?:s|ing)? (?:it )?back|confirm(?:s|ed)? (?:the )?(?:outcome|change|result)"
        r"|re-?reads?",
    ),
    Rule(
        key="login",
        judge=conduct_rules.judge_login,
        words=r"authenticat|log(?:s|ged)? in|\blogin\b|protected apis?",
    ),
    Rule(
        key="credentials",
        judge=conduct_rules.judge_credentials,
        words=r"credentials?|where the password came from|passwords? for logins?|show_account_passwords",
    ),
    Rule(
        key="python",
        judge=conduct_rules.judge_python,
        words=r"runnable|valid python|syntax|broken python|prose",
    ),
    Rule(
        key="docs",
        judge=conduct_rules.judge_docs,
        words=r"\bdocs?\b|documentation was read|looks? (?:at|up) the documentation|show_api_doc",
    ),
    Rule(
        key="recovery",
        judge=conduct_rules.judge_recovery,
        words=r"recover|after an error|same mistake|same obstacle|changes? (?:its )?approach|repeats? a failing",
    ),
    Rule(
        key="api_calls",
        judge=conduct_rules.judge_api_calls,
        words=r"valid api|endpoints? that exist|invented (?:names?|arguments?)|documented ones|parameters they have"
        r"|wrong parameter",
    ),
    Rule(
        key="tools",
        judge=conduct_rules.judge_tools,
        words=r"allowed tools|permitted (?:parts|tools)|operating system|forbidden",
    ),
)
"""Strongest signal first: results, then conduct, then what only other people's rubrics ask about."""


def proposals(demands: Demands) -> list[Rule]:
    """What stage1 proposes for a task."""
    return [rule for rule in RULES if rule.draft and rule.draft.applies and rule.draft.applies(demands)]


def discoveries() -> list[Rule]:
    """What stage2 proposes when it sees a run fail it."""
    return [rule for rule in RULES if rule.draft and rule.draft.applies is None]
