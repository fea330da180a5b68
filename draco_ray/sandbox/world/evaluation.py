"""The ground truth of a task in the form AppWorld's evaluator runs: ``evaluation.py`` and its ``test_data.json``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from draco_ray.sandbox.world.scripts import Draft

ANSWER = "The answer is the expected one."
STATUS = "The task is marked as completed with success."
SCOPE = "Only the expected models have changed."

_HEAD = f'''"""Written by the sandbox generator; run by AppWorld's evaluator."""

import json
from functools import reduce


def values(record, fields):
    """The values of possibly dotted fields, comparable with rows that were read from JSON."""
    return [reduce(getattr, field.split("."), record) for field in fields]


def same_rows(test, records, fields, rows):
    """The records are exactly the expected rows, in any order."""
    found = sorted(json.dumps(values(record, fields)) for record in records)
    test.case(found, "==", sorted(json.dumps(row) for row in rows))


def evaluate(test, models, main_user, public_data, private_data, ground_truth_answer):
    task = models.end.supervisor.Task.first()
    with test("""{ANSWER}"""):
        test.answer(json.loads(task.answer), ground_truth_answer)
    with test("""{STATUS}"""):
        test.case(task.status, "==", "success")
    with test("""{SCOPE}"""):
        changed = models.changed_model_names()
        allowed = set(private_data["changes"]) | set(private_data["side_effects"])
        test.case(sorted(changed - allowed), "==", [])
'''

_CHANGE = '''\
    with test("""{rows}"""):
        change = private_data["changes"]["{model}"]
        added, updated, removed = models.changed_records("{model}")
        same_rows(test, added, change["fields"], change["added"])
        same_rows(test, updated, change["fields"], change["updated"])
        same_rows(test, removed, change["fields"], change["removed"])
    with test("""{touched}"""):
        change = private_data["changes"]["{model}"]
        added, updated, removed = models.changed_records("{model}")
        fields = set().union(*(models.changed_field_names("{model}", record.id) for record in updated))
        test.case(sorted(fields - set(change["touched"])), "==", [])
'''

_SIDE_EFFECT = '''\
    with test("""{side}"""):
        effect = private_data["side_effects"]["{model}"]
        added, updated, removed = models.changed_records("{model}")
        fields = set().union(*(models.changed_field_names("{model}", record.id) for record in updated))
        test.case(len(removed), "==", 0)
        test.case(effect["added"] or not added, "==", True)
        test.case(sorted(fields - set(effect["touched"])), "==", [])
'''


def _rows_requirement(model: str) -> str:
    return f"The changed rows of {model} are exactly the expected ones."


def _touched_requirement(model: str) -> str:
    return f"The updated rows of {model} differ only in the expected fields."


def _side_requirement(model: str) -> str:
    return f"The rows of {model} have changed only by the app's own bookkeeping."


def evaluation_code(draft: Draft) -> str:
    """The Python source of the task's ``evaluate`` function."""
    parts = [_HEAD]
    for change in draft.changes:
        model = change.model
        parts.append(
            _CHANGE.format(rows=_rows_requirement(model), touched=_touched_requirement(model), model=model),
        )
    parts += [_SIDE_EFFECT.format(side=_side_requirement(e.model), model=e.model) for e in draft.side_effects]
    return "".join(parts)


def evaluation_data(draft: Draft) -> dict[str, Any]:
    """What the evaluation reads as ``private_data``."""
    return {
        "changes": {change.model: asdict(change) for change in draft.changes},
        "side_effects": {effect.model: asdict(effect) for effect in draft.side_effects},
    }


def test_data(draft: Draft) -> list[dict[str, str]]:
    """The requirements, each labelled by whether it fails or passes if the agent does nothing."""
    fail, ok = "no_op_fail", "no_op_pass"
    labels = {ANSWER: fail, STATUS: fail, SCOPE: ok}
    for change in draft.changes:
        labels[_rows_requirement(change.model)] = fail
        labels[_touched_requirement(change.model)] = ok
    for effect in draft.side_effects:
        labels[_side_requirement(effect.model)] = ok
    return [{"requirement": requirement, "label": label} for requirement, label in labels.items()]
