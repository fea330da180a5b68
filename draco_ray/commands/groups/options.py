"""Options shared by several commands, and checks of the command line."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from draco_ray.config.load import setting_names
from draco_ray.errors import ConfigError, DamagedRun
from draco_ray.judging.phases import PHASES

ResultT = TypeVar("ResultT")
CommandT = TypeVar("CommandT", bound=Callable[..., Any])
SANDBOX_ROOT = Path(".cache/sandbox")
STARTER_MODEL = Path(".cache/starter")
Variety = Annotated[
    Literal["standard", "hard"], typer.Option(help="Kind of world; hard: longer tasks that use several apps.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Configuration keys to set, e.g. learner.learning_rate=1e-4."),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Accept the programs, endpoints, isolation and output paths that a run of somebody else names."
    ),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="A run directory, or the URL of its copy in an object store.")
]
Setting = Annotated[
    str | None, typer.Option("--setting", "-s", help=f"The paper's setting: {', '.join(setting_names())}.")
]
ApiBase = Annotated[
    str | None, typer.Option(help="Endpoint of the model (default: from the configuration, else the provider's).")
]
KeyVariable = Annotated[
    str | None,
    typer.Option(
        help="Environment variable with the API key (default: from the configuration, else <PROVIDER>_API_KEY)."
    ),
]


class _Command(TyperCommand):
    """A command that names all missing arguments and options at once; Typer's own names the first one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, [*args])
        except typer.BadParameter:
            read = self.make_context(ctx.info_name, [*args], ctx.parent, resilient_parsing=True)
            missing = [_shown(each) for each in self.params if each.required and not _typed(read, each)]
            if len(missing) > 1:
                ctx.fail(f"Missing {', '.join(missing)}.")
            raise


class Commands(typer.Typer):
    """Commands whose options are described once, under ``Args:`` of the function's docstring.

    Parameters before ``*`` are arguments, those after it are options; a boolean option is a flag without ``--no-``.
    """

    def command(self, *names: Any, **settings: Any) -> Callable[[CommandT], CommandT]:
        register = super().command(*names, **{"cls": _Command} | settings)
        return lambda function: register(_described(function))


def _described(function: CommandT) -> CommandT:
    text, _, described = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:\n")
    helps = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", described, re.MULTILINE))
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in helps:
            continue
        kind, info = (*get_args(hints[name]), None)[:2] if get_origin(hints[name]) is Annotated else (hints[name], None)
        option = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        flag = [f"--{name.replace('_', '-')}"] if option and kind is bool else []
        info = copy.copy(info) or (typer.Option(*flag) if option else typer.Argument())
        info.help = " ".join(helps[name].split())
        function.__annotations__[name] = Annotated[kind, info]
    function.__doc__ = text
    return function


def variety_folder(path: Path, variety: str) -> Path:
    """Default folder of a variety's world or starter policy."""
    return path if variety == "standard" else path.with_name(f"{path.name}-{variety}")


def call_with_options(made: Callable[..., ResultT], options: Mapping[str, Any], **others: Any) -> ResultT:
    """Call ``made``, a function or a dataclass, with ``others`` and with those of ``options`` that are its parameters.

    ``options`` are a command's `locals()`; ``others`` take precedence.
    """
    names = inspect.signature(made).parameters
    return made(**{name: value for name, value in options.items() if name in names} | others)


def check_no_effect(context: typer.Context, why: str, *names: str) -> None:
    """Refuse options that were typed although they have no effect. Raises: ConfigError."""

    typed = [_shown(each) for each in context.command.params if each.name in names and _typed(context, each)]
    if typed:
        raise ConfigError(f"{', '.join(typed)}: no effect {why}")


def _typed(context: Any, parameter: Any) -> bool:
    """Whether a parameter is on the command line."""
    return getattr(context.get_parameter_source(parameter.name), "name", "") == "COMMANDLINE"


def _shown(parameter: Any) -> str:
    """The name of a parameter in messages: an option's flag, such as ``--out``, or an argument's name in the usage."""
    option = parameter.param_type_name == "option"
    return str(parameter.opts[0] if option else parameter.metavar or parameter.name)


def parse_phase(name: str) -> str:
    if name not in PHASES:
        raise typer.BadParameter(f"{name!r} is not a judge phase; expected one of {', '.join(PHASES)}")
    return name


def run_folder(given: str, *, checkpoints: bool = False) -> Path:
    """The local folder of a run; ``given`` is a folder or a URL. Prints how many of its table files are missing."""
    from draco_ray.runs.directory import RunDirectory
    from draco_ray.runs.manifest import absent_tables
    from draco_ray.runs.remote.location import fetch_run_for_reading

    folder = fetch_run_for_reading(given, checkpoints=checkpoints, say=lambda line: typer.echo(line, err=True))
    # `draco verify` reports what is wrong with a manifest.
    with suppress(DamagedRun, OSError):
        if absent := absent_tables(RunDirectory(folder)):
            typer.echo(absent, err=True)
    return folder
