"""Tokenizes chat templates: the prompt, and the tokens that follow a sampled turn.

The history is append-only: sampled tokens are never rendered, stripped of their reasoning or tokenized again, even if
the template does that with earlier turns.

Text from outside (an instruction, a tool output) cannot contain control tokens: ``<|im_end|>`` or ``</think>`` in it
becomes ordinary tokens; only the template's own become control tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from draco_ray.errors import ConfigError
from draco_ray.records import TOOLS, Message

END_OF_CALL = "<|eom_id|>"
"""Llama's token for the end of a turn with a call."""
_PIECES = re.compile(r"<[^<>\s]+>|.", re.DOTALL)
UNREADABLE = "unknown"
"""Name of a call that cannot be parsed, for templates that repeat names in results."""


class ChatTokenizer:
    """Produces all token ids of an episode that the policy does not sample."""

    def __init__(self, tokenizer: Any, *, thinking: bool) -> None:
        """Analyse a tokenizer's chat template.

        Args:
            tokenizer: a fast Hugging Face tokenizer with a chat template.
            thinking: the template's ``enable_thinking``; templates without it ignore it.
        Raises: ConfigError: the tokenizer has no template or is not a fast one, its template does not end turns with a
            token, or the tokens here differ from those of `apply_chat_template`.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template; use an instruction-tuned model"
            )
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(f"tokenizer {tokenizer.name_or_path!r} has no tokenizer.json; expected a fast tokenizer")
        self.tokenizer = tokenizer
        self._thinking = thinking
        backend: Tokenizer = tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        self._control = {token.content: id_ for id_, token in added.items() if _is_control(token)}
        self._control_pattern = _any_of(self._control)
        self._special_pattern = _any_of(token.content for token in added.values() if token.special)
        # Part of the placeholders of control tokens; random so that no text can contain it.
        self._nonce = secrets.token_hex(8)
        self._name = f"name{self._nonce}"
        self._names = {content: f"<{self._nonce}-{id_}>" for content, id_ in self._control.items()}
        self._encoder = _renamed(backend, self._names)
        # Compare the ids of all added tokens, because renaming one may change those of later ones.
        self._ids = {
            self._encoder.token_to_id(self._names.get(token.content, token.content)): id_
            for id_, token in added.items()
        }
        self._call: str | None = None
        self._end_of_call: str | None = None
        said = f"turn{self._nonce}"
        ask, turn = {"role": "user", "content": "-"}, {"role": "assistant", "content": said}
        _, found, rest = self._render([ask, turn, ask]).rpartition(said)
        if not found:
            raise ConfigError(
                f"the chat template of {tokenizer.name_or_path!r} leaves out a turn's text; expected one that writes "
                "contents that are strings"
            )
        end = self._control_pattern.search(rest)
        if end is None or rest[: end.start()].strip():
            raise ConfigError(
                f"the chat template of {tokenizer.name_or_path!r} does not end a turn with a control token"
            )
        self._end_of_turn = rest[: end.end()]
        self.end_of_turn_id: int = self._control[end[0]]
        """The token that ends a turn, normally sampled by the policy."""
        self._ends_turn = re.compile(f"{re.escape(end[0])}|{re.escape(END_OF_CALL)}")
        alone = self._render([ask, turn], opened=False).rpartition(said)[2]
        self._ends_by_role = not self._ends_turn.search(alone)
        self.ends = {self.end_of_turn_id}
        """All tokens that end a turn in the template; after a call it may be a different one."""
        if self._ends_by_role:
            with contextlib.suppress(ConfigError):  # The template has no tools.
                self.written_call()
                self.ends.add(self._control[str(self._end_of_call)])
        self._check_tokens()

    @property
    def opens_thinking(self) -> bool:
        """Whether the template opens the reasoning, so that turns begin inside it."""
        rendered = self._render([{"role": "user", "content": "-"}])
        return rendered.rfind("<think>") > rendered.rfind("</think>")

    def prompt(self, messages: Iterable[Message]) -> list[int]:
        """Token ids of the first messages and the beginning of the first turn.

        Tools, given in a message of role `TOOLS`, are inserted where the template puts tools.

        Raises: ConfigError: the template has no place for tools, or refuses a message.
        """
        told = list(messages)
        chat = [{"role": each.role, "content": each.content} for each in told if each.role != TOOLS]
        tools = [tool for each in told if each.role == TOOLS for tool in json.loads(each.content)]
        return self.conversation(chat, tools)

    def after_turn(self, sampled: list[int], output: str) -> list[int]:
        """Tokens after a sampled turn: its end token if it was truncated, the tool's output, the next turn's beginning.

        Args:
            sampled: the turn's token ids, exactly as sampled.
            output: the tool's output, already truncated.
        """
        return self.after_messages(sampled, (), [{"role": "user", "content": output}])

    def after_calls(self, sampled: list[int], calls: Sequence[str], results: Sequence[str]) -> list[int]:
        """Tokens after a turn with calls: its end token if it was truncated, a tool message per result, and the
        beginning of the next turn.

        Args:
            sampled: the turn's token ids, exactly as sampled.
            calls: names of the called functions; empty: the call cannot be parsed.
            results: of the calls, in order, already truncated.
        """
        told = [{"role": "tool", "content": result} for result in results]
        return self.after_messages(sampled, calls or [UNREADABLE], told)

    def conversation(self, chat: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[int]:
        """Token ids of a conversation in OpenAI's format and of the beginning of the next turn.

        Args:
            chat: messages, with texts as contents and objects as arguments of calls.
            tools: function schemas.

        Raises: ConfigError: the template has no place for tools, or refuses these messages.
        """
        hidden: list[str] = []
        if tools:
            self.written_call()
        told = self._hide_all(_numbered(chat), hidden)
        return self._encode(self._render(told, self._hide_all(list(tools), hidden)), hidden)

    def after_messages(self, sampled: list[int], calls: Sequence[str], chat: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens after a sampled turn: its end token if it was truncated, messages in OpenAI's format, and the
        beginning of the next turn.

        Args:
            sampled: the turn's token ids, exactly as sampled.
            calls: names of the functions that it called.
            chat: the messages after it, with the results of the calls in order.

        Raises: ConfigError: the template refuses these messages.
        """
        hidden: list[str] = []
        mark = f"turn{self._nonce}"
        names = [self._hide(name, hidden) for name in calls]
        told = _with_names(self._hide_all(list(chat), hidden), names)
        ask = {"role": "user", "content": "-"}
        before = [ask, self._call_turn(mark, names) if names else {"role": "assistant", "content": mark}]
        try:
            rendered = self._render([*before, *told])
        except ConfigError:
            if len(names) < 2:
                raise
            # Llama's template refuses turns with several calls, but policies write them.
            before = [ask, self._call_turn(mark, names[:1])]
            rendered = self._render([*before, *told])
        # The call's arguments are followed by the text that closes the call, which was sampled, then the turn's end.
        end = self._find_end(rendered, before, mark)
        if end is None:
            raise ConfigError(f"the chat template of {self.tokenizer.name_or_path!r} does not end this turn")
        self._check_late(before, mark, told)
        glue = self._encode(rendered[end.start() :], hidden)
        # If a turn ends with the token of the next role, no other token ends it.
        ends = glue[:1] if self._ends_by_role else (self.end_of_turn_id, self._control.get(END_OF_CALL))
        return glue[1:] if sampled and sampled[-1] in ends else glue

    def _check_late(self, chat: list[dict[str, Any]], mark: str, told: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError if the template drops a message after the turn with ``mark`` or moves it to the prompt, as
        some do with late system messages.
        """
        said = f"late{self._nonce}"
        for role in {each["role"] for each in told} - {"user", "tool", "assistant"}:
            rendered = self._render([*chat, {"role": role, "content": said}])
            if said not in rendered.rpartition(mark)[2]:
                raise ConfigError(
                    f"the chat template of {self.tokenizer.name_or_path!r} does not support a message of role "
                    f"{role!r} after a turn"
                )

    def _find_end(self, rendered: str, chat: list[dict[str, Any]], mark: str) -> re.Match[str] | None:
        """The token that ends the turn with ``mark`` in a rendered conversation; None if there is none.

        Args:
            rendered: the conversation.
            chat: its messages up to this turn.
            mark: the end of the turn's content or of its call's arguments.
        """
        start = rendered.rindex(mark) + len(mark)
        if not self._ends_by_role:
            return self._ends_turn.search(rendered, start)
        # The turn ends where the conversation rendered without an answer ends.
        alone = self._render(chat, opened=False).rpartition(mark)[2]
        return self._control_pattern.match(rendered, start + _alike(alone, rendered[start:]))

    def _call_turn(self, mark: str, names: Sequence[str]) -> dict[str, Any]:
        """A turn that calls functions of these names, each with the argument ``mark``."""
        calls = [{"type": "function", "function": {"name": name, "arguments": {"x": mark}}} for name in names]
        return _numbered([{"role": "assistant", "content": "", "tool_calls": calls}])[0]

    def written_call(self) -> str:
        """How the template writes a call of a function ``NAME``, up to the value of its argument.

        Raises: ConfigError: the template does not show tools, or has no place for calls and results.
        """
        if self._call is None:
            ask: list[dict[str, Any]] = [{"role": "user", "content": "-"}]
            mark, content, result = (f"{part}{self._nonce}" for part in ("argument", "content", "result"))
            chat = [*ask, self._call_turn(mark, [self._name])]
            told = _with_names([{"role": "tool", "content": result}], [self._name])
            rendered = self._render([*chat, *told], what="tool results")
            head, found, _ = rendered.rpartition(mark)
            end = self._find_end(rendered, chat, mark) if found else None
            shown = self._name in self._render(ask, tools=[_function(self._name)])
            # The result must follow the turn's end, because everything up to there is sampled.
            if not shown or end is None or result not in rendered[end.end() :]:
                raise ConfigError(
                    f"the chat template of {self.tokenizer.name_or_path!r} does not support tools (`tools=`, calls "
                    "and role `tool`); use a model that was trained to call tools, or set model.chat_template, e.g. to "
                    "hermes"
                )
            self._end_of_call = end[0]
            turn = self._render([*ask, {"role": "assistant", "content": content}]).partition(content)[0]
            self._call = _beyond(head, turn).rpartition("</think>")[2].strip().replace(self._name, "NAME")
        return self._call

    def turn(self, message: Mapping[str, Any]) -> list[int]:
        """An assistant message as the policy would sample it, with its end.

        Its text may contain control tokens such as ``<think>``, but not those that begin or end turns.

        Args:
            message: in OpenAI's format: ``content`` and optionally ``reasoning_content`` and ``tool_calls``, whose
                arguments are objects.
        Raises: ConfigError: the template has no place for calls.
        """
        hidden: list[str] = []
        content, reasoning = (
            self._hide(str(message.get(part) or ""), hidden, self._special_pattern)
            for part in ("content", "reasoning_content")
        )
        if self.opens_thinking or reasoning:
            opened = "" if self.opens_thinking else "<think>\n"
            content = f"{opened}{reasoning}\n</think>\n\n{content}"
        elif content:
            content = self._lead() + content
        rest = self._end_of_turn
        if message.get("tool_calls"):
            rest = self._calls_as_text(self._hide_all(_numbered([message])[0]["tool_calls"], hidden), content)
        return self._encode_turn(content + rest, hidden)

    def text(self, sampled: list[int]) -> str:
        """A sampled turn as text, without its end token."""
        kept = sampled[:-1] if sampled and sampled[-1] in self.ends.union(self.tokenizer.all_special_ids) else sampled
        return str(self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _lead(self) -> str:
        """What the template writes before the content of a turn, which the policy samples; without reasoning."""
        said = f"content{self._nonce}"
        ask = {"role": "user", "content": "-"}
        opened = self._render([ask])
        before = self._render([ask, {"role": "assistant", "content": said}]).partition(said)[0]
        lead = before.removeprefix(opened)
        return lead if before.startswith(opened) and "<think>" not in lead else ""

    def _calls_as_text(self, calls: list[Any], content: str) -> str:
        """Calls after ``content`` as written by the template, up to the token that ends the turn."""
        self.written_call()
        ask: dict[str, Any] = {"role": "user", "content": "-"}
        said = f"content{self._nonce}"
        turn = {"role": "assistant", "content": said, "tool_calls": calls}
        opened, what = not self._ends_by_role, f"{len(calls)} calls in a turn"
        rendered = self._render([ask, turn], opened=opened, what=what)
        bare = self._render([ask, {**turn, "content": ""}], opened=opened, what=what)
        if not content and bare.startswith(beginning := self._render([ask])):
            after = bare.removeprefix(beginning)
        elif said in rendered:
            after = rendered.partition(said)[2]
            # Most templates separate calls from content.
            after = after if content.strip() else after.lstrip()
        else:
            # The template has no place for content and calls in one turn.
            after = _beyond(rendered, self._render([ask, {"role": "assistant", "content": said}]).partition(said)[0])
            if content and not self._control_pattern.match(after):
                after = f"\n{after.lstrip()}"
        if self._ends_by_role:
            return after + str(self._end_of_call)
        end = self._ends_turn.search(after)
        assert end is not None, "written_call has seen it"
        return after[: end.end()]

    def _render(
        self, chat: list[Any], tools: list[Any] | None = None, *, opened: bool = True, what: str = "these messages"
    ) -> str:
        """A conversation as text; ``opened``: including the beginning of the next turn.

        Raises: ConfigError: the template rejects ``what``.
        """
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    chat,
                    tools=tools or None,
                    tokenize=False,
                    add_generation_prompt=opened,
                    enable_thinking=self._thinking,
                )
            )
        except Exception as error:  # A template may raise anything, e.g. what a method of a text raises.
            raise ConfigError(
                f"the chat template of {self.tokenizer.name_or_path!r} rejects {what}: {' '.join(str(error).split())}"
            ) from error

    def _hide_all(self, value: Any, hidden: list[str]) -> Any:
        """Apply `_hide` to every text of a JSON value, including keys."""
        if isinstance(value, str):
            return self._hide(value, hidden)
        if isinstance(value, list):
            return [self._hide_all(each, hidden) for each in value]
        if isinstance(value, dict):
            return {self._hide(key, hidden): self._hide_all(each, hidden) for key, each in value.items()}
        return value

    def _hide(self, text: str, hidden: list[str], tokens: re.Pattern[str] | None = None) -> str:
        """Replace ``tokens`` (default: control tokens) in ``text`` by placeholders, and append them to ``hidden``."""

        def mark(match: re.Match[str]) -> str:
            hidden.append(match[0])
            return f"{self._nonce}:{len(hidden) - 1};"

        return (tokens or self._control_pattern).sub(mark, text)

    def _encode(self, rendered: str, hidden: list[str]) -> list[int]:
        """Token ids of a rendered template; placeholders become ordinary tokens of the text they replace."""
        named = self._control_pattern.sub(lambda match: self._names[match[0]], rendered)
        spelled = re.sub(rf"{self._nonce}:(\d+);", lambda match: hidden[int(match[1])], named)
        return [self._ids.get(id_, id_) for id_ in self._encoder.encode(spelled, add_special_tokens=False).ids]

    def _encode_turn(self, text: str, hidden: list[str]) -> list[int]:
        """Token ids of a turn's text, which follows the template's beginning of a turn."""
        opened = self._render([{"role": "user", "content": "-"}])
        tail = opened[max((match.start() for match in self._control_pattern.finditer(opened)), default=0) :]
        before, whole = self._encode(tail, []), self._encode(tail + text, hidden)
        # If the tokenizer merges characters across the beginning of the turn, tokenize the text separately.
        return whole[len(before) :] if whole[: len(before)] == before else self._encode(text, hidden)

    def _check_tokens(self) -> None:
        """Compare the tokens of a conversation and of every added token with those of transformers.

        Raises: ConfigError: they differ, so training would use other tokens than serving.
        """
        chat = [
            {"role": "user", "content": "Hello,  world:\n\n 1. é 日本"},
            {"role": "assistant", "content": "-"},
            {"role": "user", "content": " Yes.\n"},
        ]
        rendered = self._render(chat)
        probe = rendered + "".join(f" {token} b\n" for token in self.tokenizer.get_added_vocab())
        theirs = self.tokenizer(probe, add_special_tokens=False, verbose=False)["input_ids"]
        glue = self.after_messages([], (), chat[2:])
        if theirs != self._encode(probe, []) or glue != self._encode(rendered, [])[-len(glue) :]:
            raise ConfigError(
                f"tokenizer {self.tokenizer.name_or_path!r}: draco-ray tokenizes its chat template differently than "
                "transformers' apply_chat_template, so training would differ from serving; use another tokenizer"
            )


def _is_control(token: AddedToken) -> bool:
    """Whether an added token is a control token, e.g. ``<think>``; some tokenizers add words or runs of blanks."""
    return token.special or re.search(r"[!-/:-@\[-^`{-~]", token.content) is not None


def _renamed(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """The tokenizer with some added tokens renamed, so that their original names are ordinary text."""
    description = json.loads(tokenizer.to_str()) | dict.fromkeys(("truncation", "padding", "post_processor"))
    for token in description["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(vocabulary := description["model"]["vocab"], list):
        # A unigram model would still find the token in its vocabulary.
        description["model"]["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    return Tokenizer.from_str(json.dumps(description))


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern of all tokens, which prefers longer ones."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _beyond(text: str, other: str) -> str:
    """The rest of ``text`` after the prefix that it shares with ``other``; marks in angle brackets are not divided.

    >>> _beyond("[/INST][TOOL_CALLS]", "[/INST] "), _beyond("a<tool_call>", "a<think>")
    ('[TOOL_CALLS]', '<tool_call>')
    """
    pairs = zip(_PIECES.findall(text), _PIECES.findall(other), strict=False)
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    return text[sum(len(piece) for piece, _ in alike) :]


def _alike(text: str, other: str) -> int:
    """Length of the common prefix."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))
    return sum(1 for _ in alike)


def _with_names(chat: Iterable[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Messages in which each tool result has the name of its function and the id of `_numbered`'s call.

    >>> _with_names([{"role": "tool"}], ["add"])
    [{'role': 'tool', 'name': 'add', 'tool_call_id': 'call00001'}]
    """
    numbers, told = itertools.count(), []
    for message in chat:
        message = dict(message)
        if message["role"] == "tool":
            number = next(numbers)
            message["name"] = names[number] if number < len(names) else UNREADABLE
            message["tool_call_id"] = f"call{number + 1:05}"
        told.append(message)
    return told


def _numbered(chat: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with ids of calls replaced by nine letters and digits, as Mistral's templates require.

    >>> _numbered([{"tool_calls": [{"id": "a"}, {}]}, {"tool_call_id": "a"}])
    [{'tool_calls': [{'id': 'call00001'}, {'id': 'call00002'}]}, {'tool_call_id': 'call00001'}]
    """
    count = itertools.count(1)
    ids: dict[str | None, str] = {}
    told = []
    for message in chat:
        message = dict(message)
        if message.get("tool_calls"):
            calls = [{**call, "id": f"call{next(count):05}"} for call in message["tool_calls"]]
            ids |= {before.get("id"): call["id"] for before, call in zip(message["tool_calls"], calls, strict=True)}
            message["tool_calls"] = calls
        if "tool_call_id" in message:
            message["tool_call_id"] = ids.get(message["tool_call_id"], "call00000")
        told.append(message)
    return told


def _function(name: str) -> dict[str, Any]:
    """The schema of a function without arguments."""
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": "-", "parameters": parameters}}
