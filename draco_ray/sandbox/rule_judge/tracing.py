"""What a run's code does: its API calls, and from which of them each result was computed.

The code is parsed, never executed. `trace` walks the statements in the order in which they ran and keeps, for every
variable, a `Value`: the calls it depends on, the conditions its items had to meet, and the operations it went through.
So a rule can ask "does the answer come from the list that the task names?" instead of "does that list's name occur?",
and a comment or an unused call proves nothing. Of a step that raised, only the statements before the raising one count;
the traceback says which line that was.

Where code is beyond this reading (exec, classes), values stay unknown, which a rule then treats as "nothing shows it".
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

from draco_ray.sandbox.rule_judge.known_values import api_of, evaluate
from draco_ray.sandbox.rule_judge.reading import Run, Step
from draco_ray.sandbox.rule_judge.traces import EMPTY, NONE, Call, Key, Shown, Test, Trace, Value, failure

_LINE = re.compile(r'File "<(?:python-input|ipython-input|string|stdin|unknown)[^>\n]{0,80}>", line (\d{1,9})\b')
_SECRET_KEYS = frozenset({"password", "access_token", "card_number", "cvv_number", "verification_code"})
_MAX_INLINED = 4
_MAX_NODES = 4000


def trace(run: Run, task: str) -> Trace:
    """Read the code of a run, in the light of what it printed."""
    result = Trace(steps=run.steps)
    tracer = _Tracer(result, task)
    for step in run.steps:
        tracer.step(step)
    return result


class _Tracer:
    def __init__(self, result: Trace, task: str) -> None:
        self._trace = result
        self._task = task
        self._env: dict[str, Value] = result.variables
        self._functions: dict[str, ast.FunctionDef] = {}
        self._loops: list[tuple[Value, frozenset[str]]] = []
        self._control: Key = NONE
        self._inlined = 0
        self._failing_line: int | None = None
        self._number = 0
        self._nodes = 0
        self._returns: list[Value] = []

    def step(self, step: Step) -> None:
        """Read one step."""
        self._number = step.number
        self._loops, self._control, self._failing_line = [], NONE, None
        self._nodes = 0
        error = failure(step.output)
        try:
            with warnings.catch_warnings():
                # The compiler's warnings about a policy's code interest nobody.
                warnings.simplefilter("ignore")
                tree = ast.parse(step.code)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
            self._trace.unparsable.add(step.number)
            self._trace.failed[step.number] = error or f"not valid Python: {str(problem)[:100]}"
            return
        if error is not None:
            self._trace.failed[step.number] = error
            match = _LINE.search(step.output or "")
            self._failing_line = int(match[1]) if match else 0
        prints: list[Shown] = []
        first = len(self._trace.shown)
        for statement in tree.body:
            try:
                self._statement(statement)
            except RecursionError:
                break
        prints = self._trace.shown[first:]
        self._trace.shown[first:] = _with_output(prints, tree, step)

    # --- statements ---------------------------------------------------------------------------------------------------

    def _block(self, statements: Sequence[ast.stmt]) -> None:
        control = self._control
        for statement in statements:
            self._statement(statement)
            if isinstance(statement, ast.If) and _leaves(statement.body) and not statement.orelse:
                # What follows `if …: continue` runs under the opposite condition.
                self._control |= self._condition(statement.test, negated=True)
        self._control = control

    def _statement(self, node: ast.stmt) -> None:
        if self._nodes > _MAX_NODES:
            return
        self._nodes += 1
        failed = self._failed(node)
        match node:
            case ast.Assign(targets=targets, value=value):
                result = self._value(value)
                if not failed:
                    for target in targets:
                        self._bind(target, result, value)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                result = self._value(value)
                if not failed:
                    self._bind(target, result, value)
            case ast.AugAssign(target=target, value=value, op=op):
                result = self._value(value) | self._value(target, loading=True)
                if not failed:
                    self._bind(target, result.through(_OPERATORS.get(type(op), "?")), None)
            case ast.For(target=target, iter=iterator, body=body, orelse=orelse):
                items = self._value(iterator)
                self._bind(target, replace(items, text=None).through("item") if items.calls else items, None)
                self._loops.append((items, _varying(_names(target), body, iterator)))
                self._block(body)
                self._loops.pop()
                self._block(orelse)
            case ast.While(test=test, body=body, orelse=orelse):
                self._value(test)
                self._loops.append((EMPTY, _varying(_assigned(body), body)))
                self._block(body)
                self._loops.pop()
                self._block(orelse)
            case ast.If(test=test, body=body, orelse=orelse):
                self._value(test)
                before = self._control
                self._control = before | self._condition(test)
                self._block(body)
                self._control = before | (self._condition(test, negated=True) if orelse else NONE)
                self._block(orelse)
                self._control = before
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=finalbody):
                self._block(body)
                for handler in handlers:
                    self._block(handler.body)
                self._block([*orelse, *finalbody])
            case ast.With(items=items, body=body):
                for item in items:
                    self._value(item.context_expr)
                self._block(body)
            case ast.FunctionDef(name=name):
                if not failed:
                    self._functions[name] = node
                    self._env[name] = Value(function=name)
            case ast.Return(value=value):
                self._returns.append(EMPTY if value is None else self._value(value))
            case ast.Expr(value=value):
                self._value(value)
            case ast.Delete() | ast.Pass() | ast.Break() | ast.Continue() | ast.Import() | ast.ImportFrom():
                pass
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._value(child)

    def _failed(self, node: ast.AST) -> bool:
        """Whether a top-level statement raised, or was never reached."""
        if self._failing_line is None:
            return False
        return (getattr(node, "end_lineno", None) or 0) >= self._failing_line

    def _bind(self, target: ast.expr, value: Value, source: ast.expr | None) -> None:
        value = replace(value, tests=value.tests | self._control)
        match target:
            case ast.Name(id=name):
                # In a loop a variable may keep what an earlier pass gave it.
                self._env[name] = value | self._env.get(name, EMPTY) if self._loops else value
                self._note(name, self._env[name])
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                parts = source.elts if isinstance(source, (ast.Tuple, ast.List)) else []
                for index, element in enumerate(elements):
                    part = self._value(parts[index]) if len(parts) == len(elements) else replace(value, text=None)
                    self._bind(element, part, parts[index] if len(parts) == len(elements) else None)
            case ast.Subscript(value=container) | ast.Attribute(value=container):
                if isinstance(container, ast.Name):
                    self._env[container.id] = self._env.get(container.id, EMPTY) | replace(value, text=None)
                    self._note(container.id, self._env[container.id])
            case ast.Starred(value=inner):
                self._bind(inner, value, None)

    def _note(self, name: str, value: Value) -> None:
        self._trace.assigned_in[name] = self._number
        if self._has_data(value):
            self._trace.last_data = (self._number, value)

    def _has_data(self, value: Value) -> bool:
        return any(self._trace.calls[index].about_data for index in value.calls)

    # --- expressions --------------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr, *, loading: bool = False) -> Value:
        if self._nodes > _MAX_NODES:
            return EMPTY
        self._nodes += 1
        match node:
            case ast.Constant(value=constant):
                return EMPTY if constant is None or constant is ... else Value(text=str(constant))
            case ast.Name(id=name):
                return self._env.get(name, EMPTY)
            case ast.Call():
                return self._call(node)
            case ast.Attribute():
                if api := api_of(node):
                    return Value(apis=frozenset({api}))
                return self._value(node.value).through(f".{node.attr}")
            case ast.Subscript(value=container, slice=index):
                return self._subscript(container, index)
            case ast.ListComp(elt=element) | ast.SetComp(elt=element) | ast.GeneratorExp(elt=element):
                return self._comprehension(node.generators, [element])
            case ast.DictComp(key=key, value=value):
                return self._comprehension(node.generators, [key, value])
            case ast.BinOp(left=left, right=right, op=op):
                return self._through(self._value(left) | self._value(right), _OPERATORS.get(type(op), "?"))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                chosen = self._value(body) | self._value(orelse)
                return replace(chosen, tests=chosen.tests | self._condition(test))
            case ast.Compare():
                result = self._union(ast.iter_child_nodes(node)).through("compare")
                return replace(result, tests=result.tests | self._condition(node))
            case ast.JoinedStr(values=values):
                return self._union(values).through("text")
            case ast.FormattedValue(value=value):
                return self._value(value)
            case ast.Lambda(body=body):
                return self._value(body)
            case ast.NamedExpr(target=target, value=value):
                result = self._value(value)
                self._bind(target, result, value)
                return result
            case ast.Dict(values=values):
                return self._union(values).through("new")
            case ast.List(elts=values) | ast.Tuple(elts=values) | ast.Set(elts=values):
                return self._union(values)
            case _:
                return self._union(ast.iter_child_nodes(node))

    def _union(self, nodes: Iterable[ast.AST]) -> Value:
        result = EMPTY
        count = 0
        for node in nodes:
            if isinstance(node, ast.expr):
                count += 1
                result |= self._value(node)
        return result if count == 1 else replace(result, text=None)

    def _subscript(self, container: ast.expr, index: ast.expr) -> Value:
        if (known := self._known(ast.Subscript(value=container, slice=index, ctx=ast.Load()))) is not None:
            return Value(text=known, from_task=self._value(container).from_task)
        value = self._value(container)
        if isinstance(index, ast.Slice):
            return (value | self._union(ast.iter_child_nodes(index))).through("slice")
        if isinstance(index, ast.Constant):
            key = str(index.value)
            result = value.through(f"[{key}]")
            if isinstance(index.value, str):
                result = replace(result, secret=key in _SECRET_KEYS or (value.secret and key not in _HARMLESS_KEYS))
            return result
        key_value = self._value(index)
        result = value.through("[]") | replace(key_value, text=None)
        if key_value.from_task:
            # Looking something up by its name is a condition like any other.
            result = replace(result, tests=result.tests | {self._test("==", container, index)})
        return result

    def _comprehension(self, generators: Sequence[ast.comprehension], elements: Sequence[ast.expr]) -> Value:
        saved = {name: self._env.get(name) for generator in generators for name in _names(generator.target)}
        result = EMPTY
        tests: Key = NONE
        for generator in generators:
            items = self._value(generator.iter)
            result |= replace(items, text=None)
            for name in _names(generator.target):
                self._env[name] = replace(items, text=None, apis=frozenset())
            self._loops.append((items, _varying(_names(generator.target), (), generator.iter)))
            for condition in generator.ifs:
                self._value(condition)
                tests |= self._condition(condition)
        self._control |= tests
        made = EMPTY
        for element in elements:
            made |= self._value(element)
        self._control -= tests
        del self._loops[len(self._loops) - len(generators) :]
        for name, before in saved.items():
            if before is None:
                self._env.pop(name, None)
            else:
                self._env[name] = before
        # The elements decide what it is, the iterated decides what it comes from.
        secret = made.secret
        result = replace(result | made, secret=secret, text=None)
        return replace(result, tests=result.tests | tests)

    def _call(self, node: ast.Call) -> Value:
        if api := api_of(node.func):
            return self._api_call(api, node)
        function = node.func
        if isinstance(function, ast.Name):
            target = self._env.get(function.id, EMPTY)
            if target.apis:
                return self._union_calls(target, node)
            if target.function in self._functions and self._inlined < _MAX_INLINED:
                return self._inline(self._functions[str(target.function)], node)
            return self._builtin(function.id, node)
        if (known := self._known(node)) is not None:
            return Value(text=known, from_task=True)
        arguments = self._arguments(node)
        if isinstance(function, ast.Attribute):
            owner = self._value(function.value)
            if owner.apis and not owner.calls:
                return self._union_calls(owner, node)
            method = function.attr
            if method in {"endswith", "startswith"} and node.args:
                self._test(method, function.value, node.args[0])
            if method in {"append", "add", "extend", "update", "insert"} and isinstance(function.value, ast.Name):
                # Alone in a loop, what is added is also chosen by the loop's conditions.
                grown = owner | replace(arguments, text=None, tests=arguments.tests | self._control)
                for items, _ in self._loops:
                    grown |= replace(items, text=None)
                self._env[function.value.id] = grown
                self._note(function.value.id, grown)
                return EMPTY
            if method in {"sort", "reverse"} and isinstance(function.value, ast.Name):
                self._env[function.value.id] = self._through(owner | arguments, _sorting(node, method))
                return EMPTY
            secret = owner.secret and method not in {"keys"}
            return replace(self._through(owner | arguments, method), secret=secret or arguments.secret)
        return (self._value(function) | arguments).through("call")

    def _builtin(self, name: str, node: ast.Call) -> Value:
        if name == "print":
            for argument in node.args:
                value = self._value(argument)
                self._trace.shown.append(Shown(self._number, value, ast.unparse(argument), None))
                if not self._failed(node) and self._has_data(value):
                    self._trace.last_data = (self._number, value)
            return EMPTY
        if (known := self._known(node)) is not None:
            return Value(text=known, from_task=self._arguments(node).from_task)
        arguments = self._arguments(node)
        if name in {"filter", "map"} and node.args and isinstance(node.args[0], ast.Lambda) and len(node.args) > 1:
            items = self._value(node.args[1])
            parameters = [parameter.arg for parameter in node.args[0].args.args]
            saved = {parameter: self._env.get(parameter) for parameter in parameters}
            self._env.update(dict.fromkeys(parameters, replace(items, text=None)))
            body = self._value(node.args[0].body)
            tests = self._condition(node.args[0].body) if name == "filter" else NONE
            self._restore(saved)
            result = items if name == "filter" else items | body
            return replace(result, tests=result.tests | tests, text=None)
        if name in {"min", "max", "sorted"}:
            for keyword in node.keywords:
                if keyword.arg == "key":
                    for key in ast.walk(keyword.value):
                        if isinstance(key, ast.Constant) and isinstance(key.value, str):
                            arguments = arguments.through(f"{name} by [{key.value}]")
            return self._through(arguments, _sorting(node, name))
        if name in {"len", "bool", "type", "isinstance", "sum", "any", "all"}:
            return replace(self._through(arguments, name), secret=False)
        return self._through(arguments, name)

    def _through(self, value: Value, operation: str) -> Value:
        self._trace.operated_in.setdefault(operation, set()).add(self._number)
        return value.through(operation)

    def _restore(self, saved: dict[str, Value | None]) -> None:
        for name, before in saved.items():
            if before is None:
                self._env.pop(name, None)
            else:
                self._env[name] = before

    def _arguments(self, node: ast.Call) -> Value:
        return self._union([*node.args, *(keyword.value for keyword in node.keywords)])

    def _inline(self, function: ast.FunctionDef, node: ast.Call) -> Value:
        parameters = [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)]
        given = dict(zip(parameters, (self._value(argument) for argument in node.args), strict=False))
        spare = EMPTY
        for keyword in node.keywords:
            value = self._value(keyword.value)
            if keyword.arg is not None:
                given[keyword.arg] = value
            spare |= replace(value, text=None)
        if function.args.kwarg:
            given[function.args.kwarg.arg] = spare
        if function.args.vararg:
            given[function.args.vararg.arg] = self._union(node.args)
        saved = {name: self._env.get(name) for name in {*given, *_assigned(function.body)}}
        self._env.update(given)
        returns, self._returns = self._returns, []
        line, self._failing_line = self._failing_line, None
        self._inlined += 1
        self._block(function.body)
        self._inlined -= 1
        self._failing_line = line
        result = EMPTY
        for value in self._returns:
            result |= value
        self._returns = returns
        self._restore(saved)
        return result

    def _union_calls(self, target: Value, node: ast.Call) -> Value:
        result = EMPTY
        for api in sorted(target.apis):
            result |= self._api_call(api, node)
        return result

    def _api_call(self, api: tuple[str, str], node: ast.Call) -> Value:
        arguments = {keyword.arg or "**": self._value(keyword.value) for keyword in node.keywords} | {
            f"#{index}": self._value(argument) for index, argument in enumerate(node.args)
        }
        app, name = api
        if name == "show_active_task":
            return Value(from_task=True, text=None, operations=frozenset({"task"}))
        iterated = EMPTY
        varying: set[str] = set()
        for items, names in self._loops:
            iterated |= replace(items, text=None)
            varying |= names
        page = next((keyword.value for keyword in node.keywords if keyword.arg == "page_index"), None)
        page_varies = (
            page is not None
            and not isinstance(page, ast.Constant)
            and bool(self._loops)
            and bool(varying & {part.id for part in ast.walk(page) if isinstance(part, ast.Name)})
        )
        call = Call(
            step=self._number,
            app=app,
            api=name,
            arguments=arguments,
            looped=bool(self._loops),
            iterated=iterated,
            tests=self._control,
            failed=self._failed(node),
            page_varies=page_varies,
        )
        self._trace.calls.append(call)
        index = len(self._trace.calls) - 1
        if name == "login" or name in {"show_account_passwords", "show_payment_cards"}:
            return Value(calls=frozenset({index}), secret=True)
        if call.failed:
            return EMPTY
        return Value(calls=frozenset({index}))

    # --- conditions ---------------------------------------------------------------------------------------------------

    def _condition(self, node: ast.expr, *, negated: bool = False) -> Key:
        """The comparisons that hold where ``node`` does."""
        match node:
            case ast.Compare(left=left, ops=operators, comparators=comparators):
                found: set[int] = set()
                for operator, right in zip(operators, comparators, strict=True):
                    symbol = _COMPARISONS.get(type(operator))
                    if symbol is not None:
                        found.add(self._test(_OPPOSITE[symbol] if negated else symbol, left, right))
                    left = right
                return frozenset(found)
            case ast.BoolOp(values=values):
                return frozenset().union(*(self._condition(value, negated=negated) for value in values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._condition(operand, negated=not negated)
            case ast.Call(
                func=ast.Attribute(value=owner, attr=("endswith" | "startswith") as method), args=[argument, *_]
            ):
                return frozenset({self._test(f"not {method}" if negated else method, owner, argument)})
            case ast.Call(func=ast.Name(id="any" | "all"), args=[ast.GeneratorExp() as inner]):
                saved = {name: self._env.get(name) for part in inner.generators for name in _names(part.target)}
                tests: Key = NONE
                for part in inner.generators:
                    items = self._value(part.iter)
                    for name in _names(part.target):
                        self._env[name] = replace(items, text=None)
                    for condition in part.ifs:
                        tests |= self._condition(condition, negated=negated)
                tests |= self._condition(inner.elt, negated=negated)
                self._restore(saved)
                return tests
            case _:
                return NONE

    def _test(self, operator: str, left: ast.expr, right: ast.expr) -> int:
        test = Test(
            self._number, operator, self._value(left), self._value(right), ast.unparse(left), ast.unparse(right)
        )
        if test in self._trace.tests[-8:]:
            return len(self._trace.tests) - 1 - self._trace.tests[::-1].index(test)
        self._trace.tests.append(test)
        return len(self._trace.tests) - 1

    def _known(self, node: ast.expr) -> str | None:
        value = evaluate(node, self._text_of, self._task)
        return value if isinstance(value, str) else None

    def _text_of(self, name: str) -> str | None:
        value = self._env.get(name, EMPTY)
        if value.from_task and value.text is None and value.operations <= {"task", "[instruction]"}:
            return self._task
        return value.text if value.from_task else None


_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.Mod: "%",
}
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.NotIn: "not in",
}
_OPPOSITE = {"<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "==", "in": "not in", "not in": "in"}
_HARMLESS_KEYS = frozenset({"account_name", "message", "token_type"})


def _names(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def _assigned(body: Sequence[ast.stmt]) -> list[str]:
    return [
        node.id
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]


def _varying(names: Iterable[str], body: Sequence[ast.stmt], iterator: ast.expr | None = None) -> frozenset[str]:
    """The loop's names that differ from round to round: none where there is but one, as with ``range(1)``."""
    one_round = iterator is not None and ast.unparse(iterator) == "range(1)"
    if one_round or any(isinstance(statement, ast.Break | ast.Return) for statement in body):
        return frozenset()
    return frozenset(names)


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return len(body) == 1 and isinstance(body[0], ast.Continue)


def _sorting(node: ast.Call, name: str) -> str:
    for keyword in node.keywords:
        if keyword.arg == "reverse" and isinstance(keyword.value, ast.Constant) and keyword.value.value:
            return "sorted down"
    return "sorted" if name in {"sort", "sorted"} else name


def _with_output(prints: Sequence[Shown], tree: ast.Module, step: Step) -> list[Shown]:
    """Give each printed value its line of the output, where there is one line for every print."""
    lines = (step.output or "").strip("\n").split("\n")
    statements = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "print"
    ]
    every = sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        for node in ast.walk(tree)
    )
    if every != len(statements) or len(lines) != len(statements) or failure(step.output) is not None:
        return list(prints)
    texts: list[str | None] = []
    for statement, line in zip(statements, lines, strict=True):
        texts += [line.strip()] if len(statement.args) == 1 else [None] * len(statement.args)
    if len(texts) != len(prints):
        return list(prints)
    return [replace(shown, text=text) for shown, text in zip(prints, texts, strict=True)]
