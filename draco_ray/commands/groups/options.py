"""Options shared by several commands, and checks of the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from draco_ray.config.load import setting_names
from draco_ray.errors import ConfigError
from draco_ray.judging.phases import PHASES

OptionsT = TypeVar("OptionsT")
SANDBOX_ROOT = Path(".cache/sandbox")
STARTER_MODEL = Path(".cache/starter")
Variety = Annotated[
    Literal["standard", "hard"], typer.Option(help="Kind of world; hard: longer tasks over several apps.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Dotted keys of the config, e.g. learner.learning_rate=1e-4."),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Accept programs, endpoints, isolation and output paths from a run that somebody else made."
    ),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="A run directory, or the URL of its copy in an object store.")
]
Setting = Annotated[
    str | None, typer.Option("--setting", "-s", help=f"The paper's setting: {', '.join(setting_names())}.")
]
ApiBase = Annotated[str | None, typer.Option(help="Endpoint of the model (default: the configured or the provider's).")]
KeyVariable = Annotated[
    str | None, typer.Option(help="Variable with its API key (default: the configured or <PROVIDER>_API_KEY).")
]


def of_variety(path: Path, variety: str) -> Path:
    """Default folder of a variety's world or starter policy."""
    return path if variety == "standard" else path.with_name(f"{path.name}-{variety}")


def options_of(kind: type[OptionsT], options: Mapping[str, Any], **others: Any) -> OptionsT:
    """A dataclass of options from a command's `locals()` and ``others``, by field name."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in options.items() if name in names} | others)


def check_no_effect(context: typer.Context, why: str, *names: str) -> None:
    """Refuse options that were typed although they have no effect. Raises: ConfigError."""

    typed = [
        each.opts[0] if each.param_type_name == "option" else "KEY=VALUE"
        for each in context.command.params
        if each.name in names and getattr(context.get_parameter_source(each.name), "name", "") == "COMMANDLINE"
    ]
    if typed:
        raise ConfigError(f"{', '.join(typed)}: no effect {why}")


def parse_phase(name: str) -> str:
    if name not in PHASES:
        raise typer.BadParameter(f"{name!r} is not a judge phase; expected one of {', '.join(PHASES)}")
    return name


def run_folder(given: str, *, checkpoints: bool = False) -> Path:
    """The local folder of a run that is given as a folder or a URL."""
    from draco_ray.runs.remote.place import readable

    return readable(given, checkpoints=checkpoints, say=lambda line: typer.echo(line, err=True))
