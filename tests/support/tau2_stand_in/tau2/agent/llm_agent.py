"""Stand-in for tau2.agent.llm_agent."""

from __future__ import annotations

from tau2.utils.llm_utils import generate  # noqa: F401
