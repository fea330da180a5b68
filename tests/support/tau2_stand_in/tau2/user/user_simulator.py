"""Stand-in for tau2.user.user_simulator."""

from __future__ import annotations

from tau2.utils.llm_utils import generate  # noqa: F401
