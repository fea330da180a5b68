"""Conversations reconstructed from single model calls, as request logs and spans record them.

The input of a call is the history, its output the model's answer. If the input repeats the last output of a
conversation, the call continues this conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draco_ray.records import SIDE_CALL
from draco_ray.traces.entry import AGENT, Entry, strip_thinking

SUB_AGENT = "sub-agent"
"""Prefix of the role of a sub-agent."""


@dataclass(slots=True, kw_only=True)
class ModelCall:
    """One request to a model and its answer."""

    inputs: list[Entry]
    outputs: list[Entry]
    names: tuple[str, ...] = ()
    """Ids by which a later call may refer to this one as its predecessor."""
    follows: str = ""
    """Id of the call that this one continues, if the provider stores the history."""
    sub_agent: bool = False
    """Whether a sub-agent of the judged agent made the call."""

    @property
    def system(self) -> list[str]:
        """The system messages of the request."""
        return [entry.text for entry in self.inputs if entry.role == "system"]


@dataclass(slots=True, kw_only=True)
class CallThread:
    """Calls that continue each other."""

    entries: list[Entry] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    """Indices of the calls in the list given to `split_threads`."""
    side_call: bool = False
    """Whether the first of these calls asks about another conversation's answer."""


def split_threads(calls: Sequence[ModelCall]) -> list[CallThread]:
    """Assign each call to the conversation that it continues, or to a new one.

    Args:
        calls: in chronological order.
    """
    found: list[CallThread] = []
    ending: dict[object, list[CallThread]] = {}
    answered: dict[str, tuple[CallThread, int]] = {}
    for place, call in enumerate(calls):
        inputs = call.inputs
        if call.follows in answered:
            thread, length = answered[call.follows]
            inputs = [entry for entry in inputs if entry.role != "system" or entry not in thread.entries]
            if length < len(thread.entries):
                # Two calls continue the same response: the second starts a thread of its own.
                thread = CallThread(entries=thread.entries[:length])
        else:
            keys = {None, *(_key(entry) for entry in inputs if entry.role == AGENT)}
            near = {id(thread): thread for key in keys for thread in ending.get(key, ())}.values()
            matches = [(match, thread) for thread in near if (match := _continued(thread.entries, inputs))]
            (_, new), thread = max(matches, key=lambda each: each[0][0], default=((0, 0), CallThread()))
            repeats = bool(thread.entries) and thread.entries[-1].role == AGENT and new == len(inputs)
            if repeats and call.system != calls[thread.calls[0]].system:
                # A call with other instructions about the last answer, e.g. to suggest questions, is a side call.
                new, thread = 0, CallThread(side_call=True)
            inputs = inputs[new:]
        if not thread.calls:
            found.append(thread)
        thread.calls.append(place)
        thread.entries += inputs + call.outputs
        last = next((entry for entry in reversed(thread.entries) if entry.role == AGENT), None)
        ending.setdefault(last and _key(last), []).append(thread)
        answered |= {name: (thread, len(thread.entries)) for name in call.names}
    return found


def main_conversation(calls: Sequence[ModelCall]) -> list[Entry]:
    """The agent's conversation in the calls of one trace; outputs of other calls become entries with role `SIDE_CALL`.

    The longest conversation is the agent's. Calls with the same system prompt belong to it even if their history was
    summarised. If no call repeats an earlier output, the provider stored the history, and all calls belong to it.
    """
    agents = [call for call in calls if not call.sub_agent]
    found = split_threads(agents)
    if not found:
        return []
    own = _own(agents, found)
    known: list[Entry] = []
    beside: list[Entry] = []
    for call in calls:
        if any(call is each for each in own):
            match = _continued(known, call.inputs)
            known += call.inputs[match[1] if match else _equal(_own_entries(known), call.inputs) :] + call.outputs
        elif call.sub_agent:
            beside += call.outputs
        else:
            beside += [Entry(role=SIDE_CALL, text=e.text, calls=e.calls) for e in call.outputs if e.text or e.calls]
        if known:
            known, beside = known + beside, []
    return known


def _own(calls: Sequence[ModelCall], found: Sequence[CallThread]) -> list[ModelCall]:
    """The calls of the agent's conversation."""
    if all(len(thread.calls) == 1 for thread in found):
        systems = {tuple(call.system) for call in calls}
        own = set(range(len(calls))) if len(systems) == 1 else set(_longest(found).calls)
    else:
        main = _longest(found)
        system = calls[main.calls[0]].system
        same = [thread for thread in found if system and calls[thread.calls[0]].system == system]
        own = {place for thread in (main, *same) for place in thread.calls}
    return [calls[place] for place in sorted(own)]


def continues_conversation(known: Sequence[Entry], inputs: Sequence[Entry]) -> bool:
    """Whether a request repeats the last output of a conversation."""
    return _continued(known, inputs) is not None


def _longest(found: Sequence[CallThread]) -> CallThread:
    def weight(thread: CallThread) -> tuple[int, ...]:
        # If every conversation has one call, the longest output is the agent's: titles and guards' verdicts are short.
        said = [entry for entry in thread.entries if entry.role != "system"]
        last = said[-1] if said else Entry(role=AGENT)
        return not thread.side_call, len(thread.calls), len(said), len(last.calls), len(last.text)

    return max(found, key=weight)


def _continued(known: Sequence[Entry], inputs: Sequence[Entry]) -> tuple[int, int] | None:
    """Find the last output of a known conversation in the inputs of a call.

    Returns: how many successive entries, counted back from that output, are equal in both, and the index of the first
        new input; None if the inputs do not repeat the output. If the conversation has no output yet, the inputs must
        begin with all of its entries.
    """
    known = _own_entries(known)
    last = next((place for place in range(len(known) - 1, -1, -1) if known[place].role == AGENT), None)
    if last is None:
        # The agent has not spoken yet.
        return (len(known), len(known)) if known and _equal(known, inputs) == len(known) else None
    for place in range(len(inputs) - 1, -1, -1):
        if _same(known[last], inputs[place]):
            equal = 0
            while equal <= min(last, place) and _same(known[last - equal], inputs[place - equal]):
                equal += 1
            return equal, place + 1 + _equal(known[last + 1 :], inputs[place + 1 :])
    return None


def _own_entries(known: Sequence[Entry]) -> list[Entry]:
    """The entries except those of side calls and sub-agents: the agent's requests do not repeat these."""
    return [entry for entry in known if not entry.role.startswith((SIDE_CALL, SUB_AGENT))]


def _equal(known: Sequence[Entry], inputs: Sequence[Entry]) -> int:
    """Number of equal entries at the beginning of both."""
    pairs = zip(known, inputs, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if not _same(one, other)), min(len(known), len(inputs)))


def _same(one: Entry, other: Entry) -> bool:
    if one.role != other.role:
        return False
    return _key(one) == _key(other) if one.role == AGENT else (one.text, one.calls) == (other.text, other.calls)


def _key(entry: Entry) -> object:
    """Key to recognize a repeated turn of the agent: its calls, or else its text without reasoning, which requests
    often omit."""
    return tuple(map(str, entry.calls)) or strip_thinking(entry.text).strip()
