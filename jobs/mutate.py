"""Whether the tests can fail: break the method on purpose and see that they do (`make mutate-method`).

python jobs/mutate.py [ROW]... [--slow]

Applies the mutations of tests/mutation/method.toml, each to a copy of the package, and runs the tests that
docs/method.md names for that row.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import pytest
import typer

REPOSITORY = Path(__file__).resolve().parents[1]
METHOD = REPOSITORY / "tests" / "mutation" / "method.toml"
COPIED = ("draco_ray", "prompts")
"""Copied because mutations change them; everything else is linked."""
SLOW = ("tests/e2e/", "tests/integration/")
FORK = multiprocessing.get_context("fork")
PRELOADED = (
    *("hypothesis.extra.numpy", "pytest_asyncio.plugin", "pytest_timeout", "xdist.plugin"),
    *("fastapi", "litellm", "peft", "pyarrow.parquet", "ray", "torch", "transformers"),
)
"""Imported once, before anything is broken; none of them starts a thread at import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One broken rule, and the tests that must notice it."""

    row: str
    """Row of the table in docs/method.md."""
    breaks: str
    file: str
    old: str
    """Text that occurs once in ``file``."""
    new: str
    tests: list[str]
    """Tests that have to fail."""


def mutations(path: Path = METHOD) -> list[Mutation]:
    """Read the table of mutations."""
    return [Mutation(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]]


def broken(text: str, mutation: Mutation) -> str:
    """The file's text with the rule broken.

    Raises:
        ValueError: what is to be replaced is not there, or more than once.
    """
    if (found := text.count(mutation.old)) != 1:
        raise ValueError(
            f"{mutation.file}: {mutation.old!r} occurs {found} times, expected once; correct {METHOD.name}"
        )
    return text.replace(mutation.old, mutation.new)


def copy_tree(folder: Path) -> None:
    """Make a tree with a copy of the package, which can be broken, and links to everything else."""
    for path in REPOSITORY.iterdir():
        if path.name in COPIED:
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.name != ".git":
            (folder / path.name).symlink_to(path)


class Results:
    """A pytest plugin that remembers what failed and what was skipped."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {"failed": [], "skipped": []}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record failures of set-up, test and tear-down."""
        self.names.get(report.outcome, []).append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that cannot be imported is broken as well."""
        self.names.get(report.outcome, []).append(report.nodeid)


def _run_tests(tree: Path, tests: Sequence[str], answer: Connection) -> None:
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    results = Results()
    code = pytest.main(["--hypothesis-profile=broken", *tests], plugins=[results])
    answer.send((int(code), results.names))


def verdicts(tree: Path, tests: Sequence[str]) -> dict[str, str]:
    """What becomes of each test in ``tree``: ``fails`` if any part of it does, ``skipped`` or ``PASSES``.

    They run in a fork of this process, which has loaded the packages that they import.

    Raises:
        RuntimeError: pytest could not run them.
    """
    answers, answer = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_run_tests, args=(tree, tests, answer))
    process.start()
    answer.close()
    try:
        code, names = answers.recv()
    except EOFError:
        raise RuntimeError(f"pytest ended without a result: {' '.join(tests)}") from None
    finally:
        process.join()
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        raise RuntimeError(f"pytest ended with {code}: {' '.join(tests)}; run these tests with pytest directly")

    def has(outcome: str, test: str) -> bool:
        file = test.partition("::")[0]
        return any(name in (file, test) or name.startswith((f"{test}[", f"{test}::")) for name in names[outcome])

    return {
        test: "fails" if has("failed", test) else "skipped" if "::" in test and has("skipped", test) else "PASSES"
        for test in tests
    }


def check_method(rows: Sequence[str], *, slow: bool) -> int:
    """Apply every mutation, print what its tests did, and return how many did not fail on broken code.

    Raises:
        RuntimeError: one fails on sound code.
    """
    chosen = [m for m in mutations() if not rows or any(part in m.row for part in rows)]
    table = [(m, tests) for m in chosen if (tests := [t for t in m.tests if slow or not t.startswith(SLOW)])]
    if not table:
        raise SystemExit(f"mutate: no row's name contains any of {', '.join(rows)}")
    sys.dont_write_bytecode = True
    for name in PRELOADED:
        importlib.import_module(name)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        copy_tree(tree)
        sound = verdicts(tree, sorted({test for _, tests in table for test in tests}))
        if failed := [test for test, verdict in sound.items() if verdict == "fails"]:
            raise RuntimeError(f"these tests fail before any rule is broken: {' '.join(failed)}")
        for mutation, tests in table:
            path = tree / mutation.file
            text = path.read_text(encoding="utf-8")
            path.write_text(broken(text, mutation), encoding="utf-8")
            for test, verdict in verdicts(tree, tests).items():
                counts[verdict] += 1
                print(f"{verdict:7} {mutation.row}: {mutation.breaks}: {test}", flush=True)
            path.write_text(text, encoding="utf-8")
    print(
        f"{len(table)} broken rules, {counts.total()} tests of them: "
        + ", ".join(f"{n} {v}" for v, n in counts.items())
    )
    return counts.total() - counts["fails"]


def main(
    rows: Annotated[list[str] | None, typer.Argument(help="Parts of the rows' names (default: all rows).")] = None,
    slow: Annotated[bool, typer.Option("--slow", help="Also run the tests that start Ray, vLLM and AppWorld.")] = False,
) -> None:
    """Break the rules of docs/method.md one by one; exit code 1 if a test does not notice."""
    if check_method(rows or [], slow=slow):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
