"""mutmut, each mutant in a fork of one pytest session that has collected the tests (`make mutate`).

mutmut's own fork server starts pytest for every mutant and runs the tests that reach it in no order. Here it collects
once, and a fork of it runs them, the fast ones first, up to the first failure. A test may take ``timeout_multiplier``
times (its usual time and ``timeout_constant`` seconds), and a fourth of that of the processor; one that takes longer
ends the mutant as timed out.

``DRACO_MUTATE_SECONDS=1`` gives a mutant no more than one second of the processor: most of what its tests notice they
notice in that time, and what has survived can be tried again by its name.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from mutate import PRELOADED
from mutmut.configuration import config
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.runners.harness import PytestRunner
from mutmut.state import state
from mutmut.utils.file_utils import change_cwd
from mutmut.workers import isolation

TIMED_OUT = 36
"""mutmut's exit code."""
SECONDS = float(os.environ.get("DRACO_MUTATE_SECONDS", "inf"))
"""Of the processor a mutant, after which no further test is begun."""


class Collected(PytestRunner):
    """Runs tests of a session that is open already."""

    def __init__(self, items: dict[str, pytest.Item]) -> None:
        super().__init__()
        self._items = items

    def warm_up(self) -> None:
        """Nothing is left to do."""

    def run_tests(self, *, mutant_name: str | None, tests: Iterable[str]) -> int:
        """1 if a test fails, else 0; without ``tests`` it is all of them."""
        signal.signal(signal.SIGALRM, _give_up)
        signal.signal(signal.SIGPROF, _give_up)
        # Ignored by the fork server; tests send it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        seconds, begun = state().duration_by_test, time.process_time()
        for test in sorted(tests or self._items, key=lambda each: seconds[each]):
            if time.process_time() - begun > SECONDS:
                break
            item = self._items[test]
            limit = config().timeout_multiplier * (seconds[test] + config().timeout_constant)
            _give_up_after(limit)
            # Nothing follows: fixtures of every scope are torn down.
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            _give_up_after(0.0)
            if item.session.testsfailed:
                return 1
        return 0


def _give_up_after(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_PROF, seconds / 4)


def _give_up(*_: Any) -> None:
    os._exit(TIMED_OUT)


def in_session(work: Callable[[dict[str, pytest.Item]], None]) -> None:
    """Collect the tests, and hand them to ``work`` in the place of pytest's own loop over them."""

    class Loop:
        @pytest.hookimpl(tryfirst=True)
        def pytest_runtestloop(self, session: pytest.Session) -> bool:
            work({item.nodeid: item for item in session.items})
            return True

    with change_cwd("mutants"):
        # No clock of pytest-timeout: the limits above are stricter, and there is one alarm only.
        PytestRunner().execute_pytest(
            ["-qq", "--timeout=0", *config().pytest_add_cli_args_test_selection], plugins=[Loop()]
        )


class CollectedForkServer(isolation.ForkServerRunner):
    """mutmut's fork server inside the run loop of a pytest session."""

    def _forkserver_main(self, work_fd: int, result_fd: int) -> None:
        serve_forever = super()._forkserver_main

        def serve(items: dict[str, pytest.Item]) -> None:
            self.test_runner_class, self.test_runner_args = Collected, {"items": items}
            serve_forever(work_fd, result_fd)

        in_session(serve)

    def run_clean_tests(self, tests: Iterable[str]) -> int:
        """In the same way as those of a mutant: what fails here would kill every one.

        The forced failure of `run_forced_fail` is tried in the same session.
        """

        def run(items: dict[str, pytest.Item]) -> None:
            runner = Collected(items)
            codes.append(runner.run_tests(mutant_name=None, tests=tests))
            if not codes[0]:
                set_mutant_under_test("fail")
                codes.append(runner.run_tests(mutant_name=None, tests=tests))

        codes: list[int] = []

        def run_both() -> list[int]:
            in_session(run)
            return codes

        clean, *failing = isolation.run_in_fork_with_result(run_both)
        self._forced_fail = failing
        return int(clean)

    def run_forced_fail(self) -> int:
        """What `run_clean_tests` has seen."""
        return int(any(self._forced_fail))


if __name__ == "__main__":
    isolation.ForkServerRunner = CollectedForkServer
    # Once for all processes; the rest of what tests import is left to each of them.
    for name in PRELOADED:
        importlib.import_module(name)
    from mutmut.__main__ import cli

    cli()
