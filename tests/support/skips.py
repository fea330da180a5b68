"""In CI every skipped test is printed with its reason, and a skip that is not listed fails the session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ALLOWED = Path(__file__).resolve().parents[1] / "skips.txt"


def allowed_skips(path: Path = ALLOWED) -> list[tuple[str, str]]:
    """(prefix of the test id, prefix of the reason) of every allowed skip."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    words = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return [(each[0], each[1]) for each in words]


class SkipReporter:
    """Prints every skip at the end of a session; one that is not allowed fails it. Reports of xdist's workers count."""

    def __init__(self, allowed: list[tuple[str, str]]) -> None:
        self._allowed = allowed
        self._skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a skipped test; an expected failure does not count as one."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report.nodeid, report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that is skipped completely."""
        if report.skipped:
            self._note(report.nodeid, report.longrepr)

    def _note(self, nodeid: str, longrepr: object) -> None:
        reason = str(longrepr[-1]) if isinstance(longrepr, tuple) else str(longrepr)
        self._skipped[nodeid] = reason.removeprefix("Skipped: ")

    def _is_allowed(self, nodeid: str) -> bool:
        return any(nodeid.startswith(test) and self._skipped[nodeid].startswith(why) for test, why in self._allowed)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a session that passed but has a skip that is not allowed."""
        if session.exitstatus == pytest.ExitCode.OK and not all(map(self._is_allowed, self._skipped)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the skips."""
        if self._skipped:
            terminalreporter.section(f"skipped: {len(self._skipped)}")
        for nodeid, reason in sorted(self._skipped.items()):
            mark = "allowed" if self._is_allowed(nodeid) else "NOT ALLOWED"
            terminalreporter.line(f"{mark}: {nodeid}: {reason}")


def register(config: pytest.Config, allowed: Path = ALLOWED) -> None:
    """Watch this session's skips if the environment's ``CI`` is set; xdist's workers report to their controller."""
    if os.environ.get("CI", "").lower() in ("", "0", "false") or hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(SkipReporter(allowed_skips(allowed)), "skips-are-said")
