"""Rules about how a run goes about its work, and those that only other people's rubrics ask for."""

from __future__ import annotations

import re

from draco_ray.records import Verdict
from draco_ray.sandbox.rule_judge.case import EVERY, Case, Finding, bare_code, not_applicable
from draco_ray.sandbox.rule_judge.causes import failing_steps
from draco_ray.sandbox.rule_judge.data_rules import meets_limit
from draco_ray.sandbox.rule_judge.result_rules import judge_actions, judge_answer
from draco_ray.sandbox.rule_judge.traces import EMPTY
from draco_ray.sandbox.rule_judge.vocabulary import SUPPORT_APPS, is_list

_BAD_CALL = re.compile(
    r"No API named|No app named|not found in (?:the )?app|422|unexpected keyword|field required|extra fields"
    r"|validation error|does not exist",
    re.IGNORECASE,
)
_FORBIDDEN = re.compile(
    r"^[^\S\n]*+(?:import|from)[^\S\n]++(?:os|sys|subprocess|socket|shutil|pathlib|spotipy)\b|\bopen\(", re.MULTILINE
)


def judge_errors(case: Case) -> Finding:
    """No step ends in an error."""
    failed = case.trace.failed
    if not case.run.steps:
        return case.failed("The run has no step at all.")
    if failed:
        repeated = _repeated(case)
        first = min(failed)
        again = f" Steps {', '.join(map(str, repeated))} repeat code that had just failed." if repeated else ""
        return case.failed(f"Step {first} ends in an error: {failed[first]}.{again}", failing_steps(case))
    return case.passed("Every step ran without an error.", (step.number for step in case.run.steps))


def _repeated(case: Case) -> list[int]:
    """Steps with the same code as a failed step before them."""
    seen: set[str] = set()
    again = []
    for step in case.run.steps:
        code = bare_code(step.code)
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
        finding = meets_limit(case, limit)
        if finding.verdict is Verdict.FAIL:
            return finding
    steps = [step for limit in timed for step in meets_limit(case, limit).steps]
    return case.passed("The period is drawn as the task says.", steps)


def judge_every_item(case: Case) -> Finding:
    """Every selected item is dealt with."""
    if "slice" in case.result.operations:
        return case.failed("A slice leaves items out.", case.result_step)
    finding = judge_actions(case) if not case.demands.question else judge_answer(case)
    if not EVERY.search(case.demands.text) and not case.demands.question:
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
