"""The ``draco`` command. Heavy packages load only once a command has read its arguments."""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from draco_ray import __version__
from draco_ray.commands.groups import evaluation, runs, standins, traces, training
from draco_ray.errors import ConfigError, DracoError, StoreError
from draco_ray.extras import explain_missing_extras
from draco_ray.interruption import sigterm_as_interrupt
from draco_ray.registry import find_component, installed


class _Commands(TyperGroup):
    """The commands of this package and of other installed packages; the latter are looked up only when needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        for name in sorted(installed("commands").keys() - {*names}):
            try:
                self.get_command(ctx, name)
                names.append(name)
            except ConfigError as error:
                typer.echo(_line(error), err=True)
        return names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        return _of_package(cmd_name) if command is None and cmd_name in installed("commands") else command


def _of_package(name: str) -> Any:
    """The command that an installed package registers. Raises: ConfigError: it cannot be loaded."""
    part, own = find_component("commands", name, {}), typer.Typer(add_completion=False)
    # With a callback, Typer makes a group even of one command.
    own.callback()(lambda: None)
    try:
        if isinstance(part, typer.Typer):
            own.add_typer(part, name=name, rich_help_panel="Installed packages")
        else:
            own.command(name, rich_help_panel="Installed packages")(part)
        group: Any = get_command(own)
        return group.get_command(None, name)
    except Exception as error:
        raise ConfigError(
            f"commands={name!r}: expected a Typer app or a function that Typer accepts: {type(error).__name__}: {error}"
        ) from error


def _typed(words: Sequence[str]) -> list[str]:
    """Check a command line's arguments and expand ``--option=~/``, which shells do not.

    Raises:
        ConfigError: a word or an option's value is empty. An empty path would mean the working directory, an empty
            judge or endpoint the default one.
    """
    for place, word in enumerate(words):
        if not word or re.fullmatch("--[a-z-]+=", word):
            before = f"after {words[place - 1]} " if place and not word else ""
            raise ConfigError(f"{word or 'an argument'} {before}is empty; is a shell variable not set?")
    return [re.sub("^--[a-z-]+=~(?=/)", lambda match: match[0][:-1] + os.path.expanduser("~"), word) for word in words]


def _line(error: DracoError) -> str:
    """The error in one line, even if its message contains line breaks or control characters."""
    from draco_ray.terminal import escape_control

    return f"draco: {escape_control(' '.join(str(error).splitlines()))}"


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for _panel, _group in {
    "Training": training.app,
    "Traces of other agents": traces.app,
    "Evaluation": evaluation.app,
    "Runs and judges": runs.app,
    "Stand-ins and small models": standins.app,
}.items():
    for _command in _group.registered_commands:
        _command.rich_help_panel = _panel
    for _subgroup in _group.registered_groups:
        _subgroup.rich_help_panel = _panel
    app.add_typer(_group)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"draco-ray {__version__}")
        raise typer.Exit


@app.callback()
def draco(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train tool-using agents where nobody can write a checker (DRACO on Ray)."""


@functools.cache
def _commands() -> Any:
    """The command group, built once per process."""
    return get_command(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: prints a `DracoError` as one line; exit code 1 (2 for wrong input, 3 for `TooManyLost`).

    ``arguments`` are the words after ``draco``; None takes them from the command line.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # An ASCII or Latin-1 terminal shows question marks for other characters.
            stream.reconfigure(errors="replace")
    try:
        with explain_missing_extras(), sigterm_as_interrupt():
            _commands()(_typed(sys.argv[1:] if arguments is None else arguments), prog_name="draco")
    except DracoError as error:
        print(_line(error), file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        problem: DracoError
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            place = error.filename or "the files of this command"
            problem = StoreError(f"{place}: no space left on the disk; free some and run the command again")
        elif isinstance(error, PermissionError) and error.filename is not None:
            problem = ConfigError(f"{error.filename}: permission denied; check the owner of this path")
        else:
            raise
        print(_line(problem), file=sys.stderr)
        sys.exit(problem.exit_code)
    except KeyboardInterrupt:
        # While a command runs, Typer handles Ctrl-C itself.
        sys.exit(130)


if __name__ == "__main__":
    main()
