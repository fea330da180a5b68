"""Files of the package import each other in one direction (that of the folders is held by import-linter)."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from tests.support.jobs import load_job

count_lines = load_job("count_lines")


def test_no_file_imports_itself_through_others() -> None:
    known = count_lines.modules()
    try:
        tuple(TopologicalSorter({name: count_lines.imports(name, known) for name in known}).static_order())
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def test_no_folder_is_larger_than_a_quarter_of_the_package_and_no_file_longer_than_500_lines() -> None:
    lines = {
        file.relative_to(count_lines.PACKAGE): count_lines.code_lines(file.read_text(encoding="utf-8"))
        for file in count_lines.modules().values()
    }
    folders: dict[str, int] = {}
    for path, count in lines.items():
        folders[path.parts[0]] = folders.get(path.parts[0], 0) + count
    assert max(folders.values()) <= sum(lines.values()) / 4
    assert [path.as_posix() for path, count in lines.items() if count > 500] == []
