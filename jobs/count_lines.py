"""Count the package's lines of code by part, and those of the modules that one training step imports.

Lines that hold code count, without blank lines, comments and docstrings.

python jobs/count_lines.py
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "draco_ray"
CORE = (
    *("__init__", "errors", "extras", "pipeline", "placement", "records", "registry", "summaries", "config"),
    *("algorithm", "environments", "engine", "rollout", "runs", "judging", "learner", "observability", "training"),
)
"""What a training run is made of (docs/ARCHITECTURE.md)."""
DOORS = (
    *("environments/tools", "environments/tasks.py", "environments/program.py"),
    *("rollout/endpoint", "rollout/program_agent.py", "rollout/call_function.py", "rollout/tool_agent.py"),
    *("engine/tool_calls.py", "engine/openai_server.py", "engine/child.py", "judging/local", "judging/panel.py"),
    *("judging/shortening.py", "training/demonstrations.py", "training/held_out.py"),
)
"""Its other ways in: agents and environments of users, a judge on the run's cluster, several judges, warm starts."""
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines of a module that hold code.

    >>> code_lines('"Said."' + chr(10) + "x = 1  # one" + chr(10) * 2 + "# two")
    1
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def part_of(name: str) -> str:
    """The part of the package that a file belongs to, by its path below the package."""
    if name.startswith(DOORS):
        return "doors of the core"
    first = name.split("/")[0].removesuffix(".py")
    return "core" if first in CORE else "command line" if first in ("cli", "commands") else first


STEP = ("draco_ray.training.run", "draco_ray.training.session")
"""Where a training step begins; what it starts by name (`draco_ray.registry`) is not counted."""


def modules() -> dict[str, Path]:
    """The package's modules by name."""
    found = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): file for name, file in found.items()}


def imports(name: str, known: dict[str, Path]) -> set[str]:
    """Modules of the package that a module imports, in its functions too; not those for type checkers only."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(known[name].read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {full if (full := f"{node.module}.{each.name}") in known else node.module for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return (found & known.keys()) - {name}


def imported_by_a_step() -> tuple[int, int]:
    """Modules that one training step imports, and their code lines."""
    known = modules()
    waiting, found = list(STEP), set[str]()
    while waiting:
        name = waiting.pop()
        if name in known and name not in found:
            found.add(name)
            waiting += [*imports(name, known), name.rpartition(".")[0]]
    return len(found), sum(code_lines(known[name].read_text(encoding="utf-8")) for name in found)


def main() -> None:
    """Print code lines and all lines of each part."""
    code: Counter[str] = Counter()
    every: Counter[str] = Counter()
    for file in PACKAGE.rglob("*.py"):
        text, part = file.read_text(encoding="utf-8"), part_of(file.relative_to(PACKAGE).as_posix())
        for name in (part, "package"):
            code[name] += code_lines(text)
            every[name] += len(text.splitlines())
    print(f"{'part':<20}{'code':>8}{'all':>8}")
    for name, lines in code.most_common():
        print(f"{name:<20}{lines:>8}{every[name]:>8}")
    print("one training step imports {} modules, {} code lines".format(*imported_by_a_step()))


if __name__ == "__main__":
    main()
