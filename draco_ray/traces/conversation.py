"""A conversation as prompt, steps and gaps.

Everything before the agent's first turn is the prompt. Each turn of the agent is a step, with the output as
observation, unless the turn is empty or only reasoning. Turns of other speakers are gaps, shown with the speaker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draco_ray.records import Message, Turn, is_step
from draco_ray.traces.entry import (
    AGENT,
    Entry,
    ToolCall,
    compact_json,
    decode_if_json,
    json_type_name,
    object_of,
    strip_thinking,
)
from draco_ray.traces.model import escape_surrogates

CODE_PATTERN = re.compile(r"<code>\n?(.*?)</code>", re.DOTALL)
"""Pattern of the code to run in a turn of a code agent, unless a mapping gives another pattern."""
NO_TASK = "(the trace does not say what was asked of the agent)"


@dataclass(slots=True)
class _Turn:
    role: str
    said: str
    tokens: int | None
    calls: tuple[ToolCall, ...] = ()
    code: str | None = None
    item: bool = False
    results: dict[int, str] = field(default_factory=dict)

    def open_call(self, matches: Callable[[ToolCall], bool]) -> int | None:
        """Index of the first call that has no result and for which ``matches`` is true; None if there is none.

        A turn that ran code counts as one call without id and name.
        """
        calls = self.calls or ((ToolCall(name=""),) if self.code is not None else ())
        return next((i for i, call in enumerate(calls) if i not in self.results and matches(call)), None)

    def finished(self) -> Turn:
        action = "\n".join(map(str, self.calls)) if self.calls else self.code
        text = f"{self.said}\n\n{action}".strip() if self.calls else self.said
        return Turn(
            role=self.role,
            text=text,
            action=action,
            observation=self._observation(),
            last_token=self.tokens or 0,
            message=action is None and self.role == AGENT and is_step(acts=False, message=strip_thinking(self.said)),
        )

    def _observation(self) -> str | None:
        if not self.results:
            return None
        if len(self.calls) <= 1:
            return self.results[0]
        return "\n\n".join(
            f"(result {number} of {len(self.calls)}, {call.name})\n{self.results.get(number - 1, '(none recorded)')}"
            for number, call in enumerate(self.calls, 1)
        )


def assemble_conversation(
    entries: Sequence[Entry],
    *,
    instruction: str | None = None,
    tools: Sequence[str] = (),
    code: re.Pattern[str] | None = CODE_PATTERN,
) -> tuple[tuple[Message, ...], tuple[Turn, ...], tuple[str, ...], str]:
    """Prompt, turns, notes, and task text (empty if the trace does not state it) of a conversation.

    Args:
        entries: entries of the conversation, in order.
        instruction: the agent's task, if the conversation before its first turn does not contain it.
        tools: the agent's tools, one text each.
        code: pattern whose first group is the code in a turn without tool calls; None: no turn runs code.
    """
    first = next((index for index, entry in enumerate(entries) if entry.role == AGENT), len(entries))
    told = [(entry.role, "\n".join(filter(None, [entry.text, *map(str, entry.calls)]))) for entry in entries[:first]]
    prompt = [Message(role=sanitize_role(role), content=content) for role, content in told if content]
    if tools:
        prompt.append(Message(role="tools", content="\n".join(tools)))
    notes: list[str] = []
    task = instruction or "\n".join(message.content for message in prompt if message.role == "user")
    if instruction is not None and not any(m.role == "user" and m.content == instruction for m in prompt):
        prompt.append(Message(role="user", content=instruction))
    elif not any(message.role == "user" for message in prompt):
        asked = next((entry.text for entry in entries[first:] if entry.role == "user" and entry.text), None)
        if asked is None:
            notes.append("the trace does not contain the agent's task")
        prompt.append(Message(role="user", content=NO_TASK if asked is None else asked))
        task = asked or ""
    turns: list[_Turn] = []
    for entry in entries[first:]:
        _add(turns, entry, code, notes)
    return tuple(prompt), tuple(turn.finished() for turn in turns), tuple(dict.fromkeys(notes)), task


def _add(turns: list[_Turn], entry: Entry, code: re.Pattern[str] | None, notes: list[str]) -> None:
    last = turns[-1] if turns else None
    if entry.role == "tool":
        for matches, in_order in _matches(entry):
            for turn in in_order(turns):
                if (index := turn.open_call(matches)) is not None:
                    turn.results[index] = entry.text
                    return
        notes.append("a tool result without a call is shown at its place in the conversation")
        turns.append(_Turn("tool", entry.text, None))
    elif entry.role != AGENT:
        if last is not None and last.code is not None and not last.results:
            # In code agents, the environment's output has the role user.
            last.results[0] = entry.text
        elif entry.text or entry.calls:
            said = "\n".join([*filter(None, [entry.text]), *map(str, entry.calls)])
            turns.append(_Turn(sanitize_role(entry.role), said, None))
    elif last is not None and last.code is not None and [call.arguments for call in entry.calls] == [last.code]:
        # smolagents repeats the code as a call of the interpreter.
        return
    elif last is not None and last.role == AGENT and _one_turn(last, entry):
        last.said = "\n".join(filter(None, [last.said, entry.text]))
        last.calls += entry.calls
        last.tokens = entry.tokens or last.tokens
    else:
        found = None if code is None or entry.calls or entry.code else code.search(strip_thinking(entry.text))
        block = found[1].strip("\r\n") if found else entry.code
        turns.append(_Turn(AGENT, entry.text, entry.tokens, entry.calls, block or None, entry.item))


def _matches(result: Entry) -> Iterator[tuple[Callable[[ToolCall], bool], Callable[[list[_Turn]], Iterable[_Turn]]]]:
    """Ways to find the call that a result belongs to, best first, each with the order in which to search the turns.

    The ways are: the call's id, the tool's name, and the first call without a result in the latest turn that has one.
    If result and call both have an id, only the ids are compared. Otherwise, if both have a name, only the names are.
    """

    def latest_first(turns: list[_Turn]) -> Iterable[_Turn]:
        return reversed(turns)

    if result.call_id:
        yield lambda call: call.call_id == result.call_id, latest_first
    if result.name:
        yield lambda call: call.name == result.name and not (call.call_id and result.call_id), iter
    yield lambda call: not (call.call_id and result.call_id) and not (call.name and result.name), latest_first


def _one_turn(last: _Turn, entry: Entry) -> bool:
    """Whether an item continues the previous turn; the order within a turn is reasoning, text, calls."""
    known = entry.item and (last.item or bool(entry.calls))
    return known and not last.results and last.code is None and bool(entry.calls or not last.calls)


def sanitize_role(role: str) -> str:
    """A role in a form that is safe in a heading: letters, digits and few other characters."""
    return re.sub(r"[^\w .'-]+", " ", role.strip())[:40].strip() or "somebody"


def tool_texts(tools: object) -> tuple[str, ...]:
    """The declared tools, in any dialect, a line each: name, description, parameters."""
    tools = decode_if_json(tools)
    if not isinstance(tools, Iterable) or isinstance(tools, str | Mapping):
        return ()
    declared: list[object] = []
    for tool in tools:
        # Gemini declares several functions in one tool.
        tool = decode_if_json(tool)
        named = tool if isinstance(tool, Mapping) else {}
        inner = named.get("functionDeclarations") or named.get("function_declarations")
        declared += inner if isinstance(inner, list) else [tool]
    return tuple(filter(None, map(_tool, declared)))


def _tool(tool: object) -> str:
    if isinstance(tool, str):
        return " ".join(escape_surrogates(tool).split())
    if not isinstance(tool, Mapping):
        return escape_surrogates(f"({json_type_name(tool)})")
    about: Mapping[str, Any] = object_of(tool, "function") or object_of(tool, "toolSpec") or tool
    name = str(about.get("name") or tool.get("type") or "tool")
    names = ("parameters", "input_schema", "inputSchema", "parametersJsonSchema")
    parameters: Any = next((about[each] for each in names if about.get(each)), {})
    parameters = object_of(parameters, "json") or parameters if isinstance(parameters, Mapping) else parameters
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    taken = compact_json(properties) if properties else ""
    return " ".join(escape_surrogates(f"{name}: {about.get('description') or ''} {taken}").split())
