"""Every `draco` command of the README and of docs/ is one that the program takes, its options included."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from draco_ray.cli import _commands
from tests.conftest import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("**/*.md"))]
_BLOCK = re.compile(r"^```(?:console|bash|sh)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(draco [a-z][^`\n]*)`")


def commands(text: str) -> list[str]:
    """Lines of code blocks that begin with ``draco``, continued lines joined, and what stands so in a sentence."""
    found = []
    for block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            bare = line.removeprefix("$ ").strip()
            found += [re.sub(r"\s+#.*|;.*| &&.*| \|.*", "", bare)] if bare.startswith("draco ") else []
    return found + _INLINE.findall(_BLOCK.sub("", text))


def unknown(command: str) -> str | None:
    """What of a command the program does not know: a sub-command or an option."""
    words = shlex.split(command.replace("[", "").replace("]", ""))[1:]
    node: Any = _commands()
    # Typer brings a click of its own, so a group is known by what it has.
    while hasattr(node, "commands"):
        if not words or words[0].startswith("-"):
            return None
        if words[0] not in node.commands:
            return words[0]
        node, words = node.commands[words[0]], words[1:]
    options = {name for parameter in node.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return next((word for word in given if word not in options | {"--help"}), None)


def test_it_notices_what_does_not_exist() -> None:
    text = "```\ndraco report DIR --tokens\ndraco reports DIR\n```\nand `draco plan X --nothing 3`, `draco runs lists`"
    assert [unknown(command) for command in commands(text)] == [None, "reports", "--nothing", "lists"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_commands_exist(page: Path) -> None:
    found = commands(page.read_text(encoding="utf-8"))
    assert {command: what for command in found if (what := unknown(command)) is not None} == {}
