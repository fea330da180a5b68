"""The values that each ``judge.plan`` sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

_JUDGE = {"stage1_across_epochs": True}
_CALLS = {"skip_useless_credit_calls": True, "credit_surviving_only": True}
_MERGED = {"merge_proposals": False, "merge_verdicts": False, "rubric_visits": None}
PLANS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "paper": {"judge": dict.fromkeys(_JUDGE, False), "algorithm": dict.fromkeys(_CALLS, False) | _MERGED},
    "default": {"judge": _JUDGE, "algorithm": _CALLS | _MERGED},
    "lean": {
        "judge": _JUDGE,
        "algorithm": {**_CALLS, "merge_proposals": True, "merge_verdicts": True, "rubric_visits": 2},
    },
}
"""Plan -> section -> values of keys; a key that the plan's own source or a later one sets keeps that value."""


def with_plan(given: Any) -> Any:
    """The given values of a configuration, completed with its plan's values for keys that are not given."""
    if not isinstance(given, Mapping):
        return given
    for section, values in PLANS.get(str(_given(given, "judge").get("plan")), {}).items():
        if isinstance(given.get(section, {}), Mapping | BaseModel):
            given = {**given, section: {**values, **_given(given, section)}}
    return given


def _given(given: Mapping[str, Any], section: str) -> dict[str, Any]:
    found = given.get(section)
    if isinstance(found, BaseModel):
        return found.model_dump(exclude_unset=True)
    return dict(found) if isinstance(found, Mapping) else {}
