"""Functions as tools: schemas from hints and docstrings, checked arguments, and what a call that goes wrong says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from draco_ray.environments.tools.environment import described
from draco_ray.environments.tools.functions import Functions, UnusableTools, call, json_or_repr, load, run_hook

SHOP = '''
from __future__ import annotations
import asyncio, time
from dataclasses import dataclass
from typing import Literal

@dataclass
class Line:
    sku: str
    number: int

def reset(task: dict) -> None:
    if task.get("bad"):
        raise KeyError("orders")

def order(lines: list[Line], title: str = "none", how: Literal["fast", "slow"] = "slow") -> dict:
    """Order some things.

    They are shipped at once.

    Args:
        lines: What is ordered,
            and how much of it.
        title: Of the parcel.
    """
    return {"lines": [line.number for line in lines], "title": title, "how": how, "kind": type(lines[0]).__name__}

async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"

def stubborn() -> str:
    """Holds every exception back that it can."""
    while True:
        try:
            time.sleep(1)
        except Exception:
            pass

def wrong(function: str) -> str:
    """Fails."""
    raise LookupError("no\\nsuch " + function)

def leave() -> None:
    """Leaves."""
    raise SystemExit(2)

def endless() -> object:
    """Return what never ends."""
    while True:
        yield 1

async def pages() -> object:
    """Return one after the other."""
    yield 1
    await asyncio.sleep(0)
    yield 2

def nothing() -> None:
    """Returns nothing."""

def odd() -> object:
    """Returns what has no JSON."""
    return {"o": object}

class Mute(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def mute() -> None:
    """Raise what cannot say why."""
    raise Mute


def _hidden() -> None:
    pass
'''


@pytest.fixture
def shop(tmp_path: Path) -> Functions:
    file = tmp_path / "shop_tools.py"
    file.write_text(SHOP)
    return load([str(file)])


def test_schemas_say_what_hints_and_docstrings_say(shop: Functions) -> None:
    assert list(shop.tools) == [
        "order",
        "wait",
        "stubborn",
        "wrong",
        "leave",
        "endless",
        "pages",
        "nothing",
        "odd",
        "mute",
    ]
    assert set(shop.hooks) == {"reset"}
    function = shop.schemas[0]["function"]
    assert function["description"] == "Order some things.\n\nThey are shipped at once."
    properties = function["parameters"]["properties"]
    assert function["parameters"]["required"] == ["lines"]
    assert properties["lines"]["description"] == "What is ordered, and how much of it."
    assert properties["how"]["enum"] == ["fast", "slow"]
    # A parameter may be called like the titles that are taken out.
    assert properties["title"] == {"default": "none", "type": "string", "description": "Of the parcel."}
    assert function["parameters"]["$defs"]["Line"]["properties"]["number"] == {"type": "integer"}
    assert described(shop.schemas[0]).startswith(
        '- Tool `order(lines: array, title?: string, how?: "fast" | "slow")`: Order some things. They are shipped'
    )


def test_arguments_are_checked_and_results_are_text(shop: Functions) -> None:
    lines = [{"sku": "a", "number": "3"}]
    assert call(shop, "order", {"lines": lines}, 5) == '{"lines":[3],"title":"none","how":"slow","kind":"Line"}'
    assert call(shop, "wait", {"seconds": 0}, 5) == "waited"
    assert call(shop, "nothing", {}, 5) == "null"
    assert call(shop, "pages", {}, 5) == "[1,2]"
    assert "class 'object'" in call(shop, "odd", {}, 5)


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("order", {}, "error: order: missing a required argument: 'lines'"),
        ("order", {"lines": [], "x": 1}, "error: order: got an unexpected keyword argument 'x'"),
        ("order", {"lines": [{"sku": "a"}]}, "error: order: lines.0.number: Field required"),
        ("order", {"lines": [], "how": 5}, "error: order: how: Input should be 'fast' or 'slow'"),
        ("wrong", {"function": "thing"}, "error: wrong: LookupError: no such thing"),
        ("leave", {}, "error: leave: SystemExit: 2"),
        ("mute", {}, "error: mute: Mute: (its text cannot be made)"),
        ("stubborn", {}, "error: stubborn: stopped after 0.2 s without an answer"),
        ("endless", {}, "error: endless: stopped after 0.2 s without an answer"),
        ("wait", {"seconds": 60}, "error: wait: stopped after 0.2 s without an answer"),
    ],
)
def test_a_call_that_goes_wrong_says_so_in_one_line(
    shop: Functions, name: str, arguments: dict[str, object], says: str
) -> None:
    said = call(shop, name, arguments, 0.2)
    assert said.startswith(says)
    assert "\n" not in said
    # It has left nothing behind.
    assert call(shop, "wait", {"seconds": 0}, 5) == "waited"


def test_a_hook_that_goes_wrong_is_told(shop: Functions) -> None:
    assert run_hook(shop, "reset", 5, {}) == (None, None)
    assert run_hook(shop, "reset", 5, {"bad": True}) == (None, "reset: KeyError: 'orders'")
    assert run_hook(shop, "evaluate", 5, {}, None) == (None, None)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import no_such_module", "cannot be imported: ModuleNotFoundError: .*environment.options.reads"),
        ("def f(:", "cannot be imported: SyntaxError"),
        ("raise SystemExit(1)", "cannot be imported: SystemExit: 1"),
        ("def f(x: int): pass", "tool f has no docstring"),
        ("def f(x):\n    'F.'", "tool f: parameter x has no type hint"),
        ("def f(*x: int):\n    'F.'", "tool f: .* cannot be passed by name"),
        ("def reset(): pass", r"reset: expected def reset\(task\)"),
        ("def end_state(task): pass", r"end_state: expected def end_state\(\)"),
        (
            "def evaluate(task): pass",
            r"evaluate: expected def evaluate\(task, state\); state is the result of end_state\(\)",
        ),
        ("def evaluate(task, state): pass", "evaluate needs end_state, because evaluate.* runs in a separate process"),
        ("def end_state(): pass", "end_state needs evaluate"),
        ("TOOLS = 3", "TOOLS: expected a list of functions, found int"),
        ("import functools\nTOOLS = [functools.partial(print)]", "TOOLS: expected functions, found partial"),
        ("class A:\n    'A.'\nTOOLS = [A]", "TOOLS: expected functions, found type"),
        ("class A: pass\ndef f(x: A):\n    'F.'", "tool f: the type hints cannot be written as a JSON schema"),
    ],
)
def test_tools_that_cannot_be_used_are_named(tmp_path: Path, source: str, says: str) -> None:
    file = tmp_path / "bad_tools.py"
    file.write_text(source)
    with pytest.raises(UnusableTools, match=says) as refused:
        load([str(file)])
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_all_tools_that_cannot_be_used_are_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bad_tools.py"
    file.write_text("def f(x: int): pass\ndef g(x):\n    'G.'\ndef h(x: int):\n    'H.'\ndef end_state(): pass\n")
    with pytest.raises(
        UnusableTools, match="tool f has no docstring.*; .*tool g: parameter x has.*; .*end_state needs"
    ):
        load([str(file)])


def test_a_function_behind_a_decorator_is_a_tool(tmp_path: Path) -> None:
    file = tmp_path / "cached_tools.py"
    file.write_text("import functools\n@functools.cache\ndef f(x: int) -> int:\n    'F.'\n    return x\n")
    found = load([str(file)])
    assert call(found, "f", {"x": "3"}, 5) == "3"


KEEPS = """
import asyncio, enum, os

class Speed(enum.Enum):
    fast = "fast"
    slow = "slow"

async def _serve(requests: asyncio.Queue) -> None:
    while True:
        text, answer = await requests.get()
        answer.set_result(text.upper())

async def reset(task: dict) -> None:
    global requests, serving
    requests = asyncio.Queue()
    serving = asyncio.create_task(_serve(requests))

async def ask(text: str, how: Speed | None = None) -> str:
    'Ask.'
    answer = asyncio.get_running_loop().create_future()
    await requests.put((text, answer))
    return await answer

async def hang() -> None:
    'Hang.'
    try:
        await asyncio.Event().wait()
    finally:
        os.environ["DESK_HUNG"] = str(int(os.environ.get("DESK_HUNG", "0")) + 1)

async def idle() -> str:
    'Give others a turn.'
    await asyncio.sleep(0)
    return os.environ["DESK_HUNG"]

async def fail() -> None:
    'Fail.'
    raise KeyError("a")
"""


def test_tools_of_a_task_share_a_loop_until_one_has_to_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DESK_HUNG", "0")
    file = tmp_path / "keeping_tools.py"
    file.write_text(KEEPS)
    keeps = load([str(file)])
    assert described(keeps.schemas[0]) == '- Tool `ask(text: string, how?: "fast" | "slow" | null)`: Ask.'
    assert run_hook(keeps, "reset", 60, {}) == (None, None)
    # What `reset` has begun goes on beside the calls.
    assert call(keeps, "ask", {"text": "a"}, 60) == "A"
    assert call(keeps, "fail", {}, 60) == "error: fail: KeyError: 'a'"
    assert call(keeps, "ask", {"text": "b"}, 60) == "B"
    assert call(keeps, "hang", {}, 1) == "error: hang: stopped after 1 s without an answer"
    # It was ended, and does not go on beside the next one.
    assert call(keeps, "idle", {}, 60) == "1"


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (None, "f()"),
        ({"properties": [], "required": 3, "$defs": []}, "f()"),
        ({"properties": {"a": {"enum": 5}, "b": {"anyOf": {}}, "c": 3}}, "f(a?: any, b?: any, c?: any)"),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": 3}}, "f(a?: A)"),
    ],
)
def test_a_schema_that_is_none_is_told_as_far_as_it_goes(schema: object, says: str) -> None:
    assert described({"function": {"name": "f", "parameters": schema}}) == f"- Tool `{says}`: "


def test_what_has_no_json_is_told_as_it_is_written() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError

    assert json_or_repr({"done": True}) == {"done": True}
    assert json_or_repr({"done": {1}}) == "{'done': {1}}"
    assert json_or_repr(Mute()) == "a Mute"


def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("def f():\n    'F.'\ndef reset(task): pass")
    with pytest.raises(UnusableTools, match="two.py: reset is defined twice"):
        load([str(tmp_path / "one.py"), str(tmp_path / "two.py")])
    (tmp_path / "two.py").write_text("def f():\n    'F.'")
    with pytest.raises(UnusableTools, match="two.py: tool f is defined twice"):
        load([str(tmp_path / "one.py"), str(tmp_path / "two.py")])


@pytest.mark.parametrize("files", [("desk_a", "desk_b"), ("desk_b", "desk_a")])
def test_a_file_of_tools_that_another_one_imports_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in files:
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "desk_a.py").write_text("orders = []\ndef reset(task): orders.append(task['id'])")
    (tmp_path / "desk_b.py").write_text("import desk_a\ndef look() -> list:\n    'Look.'\n    return desk_a.orders")
    desks = load([str(tmp_path / f"{name}.py") for name in files])
    assert run_hook(desks, "reset", 60, {"id": "A1"}) == (None, None)
    assert call(desks, "look", {}, 60) == '["A1"]'
