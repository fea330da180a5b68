"""What ``judge.plan`` sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

PLANS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "paper": {
        "judge": {"stage1_across_epochs": False},
        "algorithm": {"skip_useless_credit_calls": False, "credit_surviving_only": False},
    },
    "default": {},
    "lean": {"algorithm": {"merge_proposals": True, "merge_verdicts": True, "rubric_visits": 2}},
}
"""Plan -> section -> values of keys that are not set themselves."""


def with_plan(given: Any) -> Any:
    """The values of a configuration, with those of its plan for keys that are not among them."""
    if not isinstance(given, dict):
        return given
    for section, values in PLANS.get(str(_given(given, "judge").get("plan")), {}).items():
        given = given | {section: {**values, **_given(given, section)}}
    return given


def _given(given: Mapping[str, Any], section: str) -> dict[str, Any]:
    found = given.get(section, {})
    return found.model_dump(exclude_unset=True) if isinstance(found, BaseModel) else dict(found)
