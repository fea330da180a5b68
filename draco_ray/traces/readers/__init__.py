"""All formats of records by name, in the order in which they are tried."""

from __future__ import annotations

import contextlib

from draco_ray.traces import otel
from draco_ray.traces.entry import UNREADABLE_ERRORS
from draco_ray.traces.formats import READERS, Format
from draco_ray.traces.readers import benchmarks, chat, coding, exports, langsmith

MODULES = (benchmarks, chat, coding, exports, langsmith, otel)
"""Modules that declare readers; importing them fills `READERS`."""
ORDER = (
    *("inspect", "tau2", "verifiers", "langsmith", "claude-code", "codex", "atif", "swe-agent", "mini-swe-agent"),
    *("smolagents", "openhands", "chat-export", "otel", *chat.DIALECTS),
)
FORMATS: dict[str, Format] = {name: READERS[name] for name in ORDER}


def detect_format(record: object) -> Format | None:
    """The format of a record; None if unknown."""
    for each in FORMATS.values():
        # A malformed record must not end the search.
        with contextlib.suppress(*UNREADABLE_ERRORS):
            if each.recognises(record):
                return each
    return None
