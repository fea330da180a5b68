"""Python functions as tools: finds them, derives schemas from type hints and docstrings, and validates calls.

Runs in the jail and imports nothing of this package.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import json
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, cast

import docstring_parser
from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic_core import to_json

HOOKS = {"reset": ("task",), "end_state": (), "evaluate": ("task", "state")}
"""Names of the hooks in a tools file, which are not tools -> their parameters."""
_NOT_TOOLS = (*HOOKS, "tasks")
MAX_STATE_BYTES = 16 << 20
"""Maximum size of the result of ``end_state`` as JSON."""
LONGEST_ERROR = 500
"""Maximum length of an exception's text."""


class UnusableTools(Exception):
    """A tools file cannot be used; the message is one line."""


class TimedOut(BaseException):
    """A call took too long. A BaseException, so that a tool's ``except Exception`` does not catch it."""


@dataclass(slots=True)
class Functions:
    """The contents of the tools files."""

    tools: dict[str, Callable[..., Any]] = field(default_factory=dict)
    schemas: list[dict[str, Any]] = field(default_factory=list)
    """The tools' schemas in OpenAI's format, in the order of files and functions."""
    hooks: dict[str, Callable[..., Any]] = field(default_factory=dict)
    _runner: asyncio.Runner = field(default_factory=asyncio.Runner)

    def run(self, function: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
        """Call a function and return its result.

        All coroutines of a task run in the same event loop, until one is interrupted and a new loop replaces it.
        Connections belong to an event loop, so a tool can store a client and use its connections in later calls.
        """
        returned = function(*given, **named)
        if inspect.isasyncgen(returned):
            returned = _all(cast(AsyncGenerator[Any, None], returned))
        if not inspect.isawaitable(returned):
            return returned
        try:
            return self._runner.run(_awaited(returned))
        except Exception:
            raise
        except BaseException:
            # With the old runner, the interrupted coroutine would continue during the next call.
            runner, self._runner = self._runner, asyncio.Runner()
            runner.close()
            raise


def load(files: Iterable[str]) -> Functions:
    """Import tools files: tools are the functions in a file's list ``TOOLS``, or else all its public functions.

    Raises: UnusableTools: names every unusable tool.
    """
    found, problems = Functions(), list[str]()
    files = list(files)
    for path in map(Path, files):
        # Reload: this process may have imported an older version.
        if getattr(sys.modules.get(path.stem), "__file__", None) == str(path):
            del sys.modules[path.stem]
    for file in files:
        module = _import(file)
        for hook in HOOKS:
            if callable(own := getattr(module, hook, None)):
                if hook in found.hooks:
                    raise UnusableTools(f"{file}: {hook} is defined twice; keep one")
                _check_hook(file, hook, own)
                found.hooks[hook] = own
        for function in _functions(file, module):
            name = function.__name__
            if name in found.tools:
                problems.append(f"{file}: tool {name} is defined twice; rename one")
                continue
            try:
                found.schemas.append(_schema(file, function))
                found.tools[name] = validate_call(function)
            except UnusableTools as error:
                problems.append(str(error))
    for hook, other in (("evaluate", "end_state"), ("end_state", "evaluate")):
        if hook in found.hooks and other not in found.hooks:
            problems.append(
                f"{files[0]}: {hook} needs {other}, because evaluate(task, state) runs in a separate process that "
                "cannot see the tools' data; it gets the result of end_state() as state"
            )
    if problems:
        raise UnusableTools("; ".join(problems))
    return found


def call(functions: Functions, name: str, arguments: Mapping[str, Any], timeout_seconds: float) -> str:
    """The result of a tool as the policy sees it: text unchanged, anything else as JSON; or an error."""
    tool = functions.tools[name]
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError as error:
        return f"error: {name}: {error}"
    limit = _Limit(timeout_seconds)
    try:
        with limit:
            returned = functions.run(tool, **arguments)
            return returned if isinstance(returned, str) else to_json(returned, fallback=str).decode()
    except BaseException as error:  # Including CancelledError and SystemExit.
        # The tool may have turned TimedOut into another error.
        if limit.expired:
            return f"error: {name}: stopped after {timeout_seconds:g} s without an answer"
        if isinstance(error, ValidationError):
            problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            return f"error: {name}: {_short('; '.join(problems))}"
        return f"error: {name}: {_said(error)}"


def run_hook(functions: Functions, hook: str, timeout_seconds: float, *given: Any) -> tuple[Any, str | None]:
    """(result of a hook, error); the result is None if there is no such hook."""
    function = functions.hooks.get(hook)
    limit = _Limit(timeout_seconds)
    try:
        with limit:
            return (None if function is None else functions.run(function, *given)), None
    except BaseException as error:
        return None, f"{hook}: did not end within {timeout_seconds:g} s" if limit.expired else f"{hook}: {_said(error)}"


def end_state(functions: Functions, timeout_seconds: float) -> tuple[Any, str | None]:
    """(JSON-serializable result of ``end_state``, error)."""
    state, problem = run_hook(functions, "end_state", timeout_seconds)
    try:
        if len(json.dumps(state)) > MAX_STATE_BYTES:
            problem = f"end_state: returned more than {MAX_STATE_BYTES >> 20} MiB of JSON"
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"end_state: returned a value that cannot be written as JSON: {_said(error)}"
    return state, problem


def json_or_repr(value: Any) -> Any:
    """``value`` if it is JSON-serializable; else its repr, for the error message."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        try:
            return _short(repr(value))
        except Exception:
            return f"a {type(value).__name__}"
    return value


async def _awaited(returned: Any) -> Any:
    return await returned


async def _all(returned: AsyncGenerator[Any, None]) -> list[Any]:
    return [each async for each in returned]


class _Limit:
    """Raises `TimedOut` in its block after ``seconds``, and again every second if that was suppressed."""

    def __init__(self, seconds: float) -> None:
        self.expired = False
        self._seconds = seconds

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGALRM, self._expire)
        signal.setitimer(signal.ITIMER_REAL, self._seconds, 1.0)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _expire(self, number: int, frame: FrameType | None) -> None:
        self.expired = True
        raise TimedOut


def _import(file: str) -> ModuleType:
    path = Path(file)
    there = sys.modules.get(path.stem)
    if getattr(there, "__file__", None) == str(path):
        # Another tools file has imported this one; both share its state.
        return cast(ModuleType, there)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UnusableTools(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        hint = ""
        if isinstance(error, ImportError | OSError):
            hint = "; tools can read only their own file, so list other files and folders in environment.options.reads"
        raise UnusableTools(f"{file}: cannot be imported: {_said(error)}{hint}") from error
    return module


def _functions(file: str, module: ModuleType) -> list[Callable[..., Any]]:
    listed = getattr(module, "TOOLS", None)
    if listed is None:
        listed = [
            value
            for name, value in vars(module).items()
            if _is_function(value)
            and value.__module__ == module.__name__
            and not name.startswith("_")
            and name not in _NOT_TOOLS
        ]
    if not isinstance(listed, list | tuple):
        raise UnusableTools(f"{file}: TOOLS: expected a list of functions, found {type(listed).__name__}")
    for each in listed:
        if not _is_function(each):
            raise UnusableTools(
                f"{file}: TOOLS: expected functions, found {type(each).__name__}; write a function that calls it"
            )
    return [_plain(each) for each in listed]


def _is_function(value: object) -> bool:
    """Whether ``value`` is a function, also one wrapped in an object by a decorator such as ``functools.cache``."""
    wrapped = callable(value) and inspect.isfunction(getattr(value, "__wrapped__", None))
    return inspect.isfunction(value) or inspect.ismethod(value) or wrapped


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isfunction(function) or inspect.ismethod(function):
        return function

    @functools.wraps(function)
    def plain(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    return plain


def _check_hook(file: str, hook: str, function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind(*HOOKS[hook])
    except TypeError:
        # evaluate() runs in another process than the tools, so it needs their end state as a parameter.
        raise UnusableTools(
            f"{file}: {hook}: expected def {hook}({', '.join(HOOKS[hook])}); state is the result of end_state()"
        ) from None
    except ValueError:
        # Some functions written in C have no signature.
        return


def _schema(file: str, function: Callable[..., Any]) -> dict[str, Any]:
    name = function.__name__
    doc = docstring_parser.parse(inspect.getdoc(function) or "")
    if not doc.short_description:
        raise UnusableTools(f"{file}: tool {name} has no docstring; add one that tells the model what the tool does")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UnusableTools(f"{file}: tool {name}: parameter {parameter} cannot be passed by name")
        if parameter.annotation is parameter.empty:
            raise UnusableTools(f"{file}: tool {name}: parameter {parameter.name} has no type hint")
    try:
        parameters = TypeAdapter(cast(Any, function)).json_schema()
    except Exception as error:
        raise UnusableTools(
            f"{file}: tool {name}: the type hints cannot be written as a JSON schema: {_short(str(error))}"
        ) from error
    _drop_titles(parameters)
    parameters.setdefault("properties", {})
    for each in doc.params:
        if each.arg_name in parameters["properties"] and each.description:
            parameters["properties"][each.arg_name].setdefault("description", " ".join(each.description.split()))
    description = "\n\n".join(filter(None, (doc.short_description, doc.long_description)))
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _drop_titles(schema: Any) -> None:
    """Remove the titles that pydantic derives from names, but not parameters named ``title``."""
    if isinstance(schema, list):
        for each in schema:
            _drop_titles(each)
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("title"), str):
        del schema["title"]
    for key, value in schema.items():
        for below in value.values() if key in ("properties", "$defs") and isinstance(value, dict) else (value,):
            _drop_titles(below)


def _said(error: BaseException) -> str:
    """Type and text of an error on one line."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    return _short(f"{type(error).__name__}: {text}")


def _short(text: str) -> str:
    return " ".join(text.split())[:LONGEST_ERROR]
