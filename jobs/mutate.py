"""Whether the tests can fail: break the code on purpose and see that they do (`make mutate-method`, `make mutate`).

``method`` applies the mutations of tests/mutation/method.toml, each to a copy of the package, and runs the tests that
docs/method.md names for that row. ``report`` reads what mutmut left in ``mutants``: killed and surviving mutants by
module, and every survivor that tests/mutation/survivors.toml does not explain.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import importlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
METHOD = REPOSITORY / "tests" / "mutation" / "method.toml"
SURVIVORS = REPOSITORY / "tests" / "mutation" / "survivors.toml"
COPIED = ("draco_ray", "prompts")
"""What a mutation may touch; everything else is seen through links."""
SLOW = ("tests/e2e/", "tests/integration/")
FORK = multiprocessing.get_context("fork")
PRELOADED = (
    *("hypothesis.extra.numpy", "pytest_asyncio.plugin", "pytest_timeout", "xdist.plugin"),
    *("fastapi", "litellm", "peft", "pyarrow.parquet", "ray", "torch", "transformers"),
)
"""Imported once, before anything is broken; none of them starts a thread at import."""
FATES: dict[int | None, str] = {
    None: "not tried",
    0: "survived",
    **dict.fromkeys((5, 33), "no test"),
    **dict.fromkeys((-24, 24, 36, 152, 255), "timed out"),
}
"""By mutmut's exit code; every other one is a kill. A time-out is none: no test failed, and the machine may be busy."""
UNREACHED = "no test reaches it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One broken rule, and the tests that hold it."""

    row: str
    """Of docs/method.md."""
    breaks: str
    file: str
    old: str
    """Text that occurs once in ``file``."""
    new: str
    tests: list[str]
    """Each has to fail."""


def mutations(path: Path = METHOD) -> list[Mutation]:
    """The table."""
    return [Mutation(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]]


def broken(text: str, mutation: Mutation) -> str:
    """The file's text with the rule broken.

    Raises:
        ValueError: what is to be replaced is not there, or more than once.
    """
    if (found := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.file}: {mutation.old!r} occurs {found} times, expected once; mend {METHOD.name}")
    return text.replace(mutation.old, mutation.new)


def copy_tree(folder: Path) -> None:
    """A tree in which the package can be broken, and everything else is this one's."""
    for path in REPOSITORY.iterdir():
        if path.name in COPIED:
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.name not in (".git", "mutants"):
            (folder / path.name).symlink_to(path)


class Results:
    """A pytest plugin that remembers what failed and what was skipped."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {"failed": [], "skipped": []}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of set-up, test and tear-down alike."""
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

    They run in a fork of this process, in which what they import from elsewhere is loaded already.

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
        raise RuntimeError(f"pytest ended without an answer: {' '.join(tests)}") from None
    finally:
        process.join()
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        raise RuntimeError(f"pytest ended with {code}: {' '.join(tests)}; try it with pytest alone")

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
    sys.dont_write_bytecode = True
    for name in PRELOADED:
        importlib.import_module(name)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        copy_tree(tree)
        sound = verdicts(tree, sorted({test for _, tests in table for test in tests}))
        if failed := [test for test, verdict in sound.items() if verdict == "fails"]:
            raise RuntimeError(f"fails before anything is broken: {' '.join(failed)}")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """What mutmut made of a function, and what the tests made of that."""

    module: str
    function: str
    """``Class.method`` or ``function``."""
    diff: str
    """Lines taken out and put in, each behind its sign, of one that survived."""
    fate: str
    """``killed``, ``survived``, ``timed out``, ``no test`` (none runs the function) or ``not tried``."""


def mutants(folder: Path) -> Iterator[Mutant]:
    """Every mutant that was tried, from mutmut's working folder."""
    for meta in sorted(folder.rglob("*.py.meta")):
        codes = json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]
        wanted = {key.rpartition(".")[2] for key, code in codes.items() if code == 0}
        originals = {f"{name.rpartition('__mutmut_')[0]}__mutmut_orig" for name in wanted}
        source = _functions(meta.with_suffix(""), wanted | originals) if wanted else {}
        for key, code in codes.items():
            name = key.rpartition(".")[2]
            original, _, _ = name.rpartition("__mutmut_")
            yield Mutant(
                module=str(meta.relative_to(folder).with_suffix("").with_suffix("")),
                function=original.removeprefix("x_").removeprefix("xǁ").replace("ǁ", "."),
                diff=_diff(source[f"{original}__mutmut_orig"], source[name]) if code == 0 else UNREACHED,
                fate=FATES.get(code, "killed"),
            )


def _functions(path: Path, names: Collection[str]) -> dict[str, list[str]]:
    """The lines of some functions of a file without their names; mutmut's files are too large to be parsed."""
    found: dict[str, list[str]] = {}
    lines: list[str] | None = None
    depth = 0
    for line in path.read_text(encoding="utf-8").split("\n"):
        inside = line.startswith(" " * (depth + 1)) or not line.strip() or line.lstrip().startswith(")")
        begins = re.match(r"( *)(?:async )?def (\w+__mutmut_\w+)", line)
        if begins is not None:
            depth = len(begins[1])
            lines = found.setdefault(begins[2], []) if begins[2] in names else None
            line = line.replace(begins[2], "")
        elif not inside:
            lines = None
        if lines is not None:
            lines.append(line)
    return found


def _diff(before: list[str], after: list[str]) -> str:
    lines = difflib.ndiff(before, after)
    return "\n".join(f"{line[0]} {line[2:].strip()}" for line in lines if line[0] in "+-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why survivors of a kind are no gap in the tests."""

    function: str
    """Pattern over ``module:function``."""
    diff: str
    """Pattern (a regular expression) that is found in the diff."""
    reason: str

    def covers(self, mutant: Mutant) -> bool:
        """Whether it is about this one."""
        name = f"{mutant.module}:{mutant.function}"
        return fnmatch.fnmatchcase(name, self.function) and re.search(self.diff, mutant.diff) is not None


def explanations(path: Path) -> list[Explanation]:
    """The reviewed survivors."""
    return [Explanation(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["explained"]]


def report(folder: Path) -> int:
    """Print a line a module and every survivor that nothing explains; returns how many these are."""
    known = explanations(SURVIVORS)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    open_: list[Mutant] = []
    used: Counter[Explanation] = Counter()
    for mutant in mutants(folder):
        fate = mutant.fate
        if fate in ("survived", "no test"):
            if reason := next((each for each in known if each.covers(mutant)), None):
                fate = "explained"
                used[reason] += 1
            else:
                open_.append(mutant)
        counts[mutant.module][fate] += 1
    for mutant in open_:
        print(f"{mutant.module}:{mutant.function}\n{mutant.diff}\n")
    for each in known:
        if not used[each]:
            print(f"explains nothing any more: {each.function}: {each.diff}")
    columns = ("killed", "explained", "survived", "timed out", "no test", "not tried")
    print("| module | mutants | " + " | ".join(columns) + " |")
    print("|---|" + "---:|" * (1 + len(columns)))
    counts["all"] = sum(counts.values(), start=Counter())
    for module, of_module in counts.items():
        print(
            f"| `{module}` | {of_module.total()} | " + " | ".join(str(of_module[column]) for column in columns) + " |"
        )
    return len(open_)


def main() -> None:
    """Read the arguments; exit 1 if something broken was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    method = commands.add_parser("method", help="break the rules of docs/method.md one by one")
    method.add_argument("rows", nargs="*", help="parts of the rows' names; none is all")
    method.add_argument("--slow", action="store_true", help="also the tests that start Ray, vLLM and AppWorld")
    survivors = commands.add_parser("report", help="read mutmut's results")
    survivors.add_argument("--folder", type=Path, default=REPOSITORY / "mutants")
    arguments = parser.parse_args()
    missed = (
        check_method(arguments.rows, slow=arguments.slow) if arguments.command == "method" else report(arguments.folder)
    )
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
