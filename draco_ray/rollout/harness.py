"""Recipes for coding agents (``agent.harness``): how to start each so that it uses only the endpoint."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from draco_ray.config.schema import Tree
from draco_ray.environments.program import passed_environment
from draco_ray.errors import ConfigError
from draco_ray.temp_dirs import PrivateTempDir

FOLDER = Path(__file__).parent / "harnesses"
"""Folder of this package's recipes."""
_VERSION_SECONDS = 60.0


class Harness(Tree):
    """One recipe. Command and variables may contain the placeholders ``{prompt}``, ``{model}`` and environment
    variables of the program, such as ``{OPENAI_BASE_URL}``."""

    command: tuple[str, ...]
    """The program and its arguments; no shell is used. The prompt is also on standard input."""
    dialect: Literal["chat/completions", "responses", "messages"]
    """The endpoint's API that the agent uses; for the reader only."""
    variables: Mapping[str, str] = {}
    side_calls: tuple[str, ...] = ()
    """Regular expressions, as ``agent.side_calls``."""
    versions: tuple[str, str]
    """The first version that was tested, and the first that is too new."""

    def fill(self, words: list[str], variables: Mapping[str, str], prompt: str) -> tuple[list[str], dict[str, str]]:
        """Fill the placeholders. Returns: the command's words, and the variables to add to the given ones."""
        values: dict[str, str] = {**variables, "prompt": prompt, "model": variables["DRACO_MODEL"]}

        def filled(text: str) -> str:
            return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), text)

        return [filled(word) for word in words], {name: filled(text) for name, text in self.variables.items()}

    def check_version(self, program: str) -> None:
        """Check the version that the program prints. Raises: ConfigError if it is outside ``versions``."""
        try:
            with PrivateTempDir() as home:
                ran = subprocess.run(
                    [program, "--version"],
                    env={**passed_environment(()), "HOME": str(home)},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=_VERSION_SECONDS,
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"agent.harness: {program} --version: {error}") from None
        found = re.search(r"\d+(\.\d+)+", ran.stdout + ran.stderr)
        first, end = self.versions
        if found is None or not _numbers(first) <= _numbers(found[0]) < _numbers(end):
            version = found[0] if found else "unknown"
            raise ConfigError(
                f"agent.harness: {program} has version {version}; expected at least {first} and below {end}"
            )


def read_harness(name: str) -> Harness:
    """The recipe of a name or a YAML file. Raises: ConfigError."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    try:
        return Harness.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError:
        known = ", ".join(sorted(each.stem for each in FOLDER.glob("*.yaml")))
        raise ConfigError(f"agent.harness={name!r}: unknown; expected {known}, or a YAML file") from None
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"agent.harness={name!r}: {' '.join(str(error).split())}") from None


def program_files(program: str) -> list[Path]:
    """The paths that a program reads to run: itself, its virtual environment or ``node_modules``, its interpreter."""
    found: list[Path] = []
    for path in dict.fromkeys((Path(program), Path(program).resolve())):
        environment = path.parent.parent
        modules = [parent for parent in path.parents if parent.name == "node_modules"]
        if modules:
            found.append(modules[-1])
            if node := shutil.which("node"):
                found.append(Path(node).resolve())
        elif (environment / "pyvenv.cfg").is_file():
            found += [environment, (environment / "bin" / "python").resolve().parent.parent]
        else:
            found.append(path)
    return found


def _numbers(version: str) -> list[Any]:
    return [int(part) for part in version.split(".")]
