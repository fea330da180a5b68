"""Chat templates in tokens: the prompt, and the glue that follows a sampled turn.

The history is append-only. What was sampled is never rendered, stripped of its reasoning or tokenised again, whatever
the template would do to an earlier turn.

What comes from outside (an instruction, a tool output) cannot contain control tokens: ``<|im_end|>`` or ``</think>`` in
it is spelled out in ordinary tokens, and only the template's own are control tokens.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from draco_ray.errors import ConfigError
from draco_ray.records import TOOLS, Message

END_OF_CALL = "<|eom_id|>"
"""Llama's other end of a turn, after a call."""


class ChatTokens:
    """Token ids of everything in an episode that the policy does not sample."""

    def __init__(self, tokenizer: Any, *, thinking: bool) -> None:
        """Study a tokenizer's chat template.

        Args:
            tokenizer: a fast Hugging Face tokenizer with a chat template.
            thinking: the template's ``enable_thinking``; templates without that switch ignore it.
        Raises: ConfigError when the tokenizer has no template, is not a fast one, or its template does not part turns
            by a token.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template: use an instruction-tuned model"
            )
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"tokenizer {tokenizer.name_or_path!r} has no tokenizer.json (a fast tokenizer is needed)"
            )
        self.tokenizer = tokenizer
        self._thinking = thinking
        backend: Tokenizer = tokenizer.backend_tokenizer
        self._control = {token.content: id_ for id_, token in backend.get_added_tokens_decoder().items()}
        self._control_pattern = _any_of(self._control)
        special = (token.content for token in backend.get_added_tokens_decoder().values() if token.special)
        self._special_pattern = _any_of(special)
        # The same tokenizer without any control token: the encoder of all text.
        description = json.loads(backend.to_str())
        description["added_tokens"] = []
        self._plain = Tokenizer.from_str(json.dumps(description))
        # Stands for a control token inside somebody's text while the template is rendered. Nobody can guess it.
        self._nonce = secrets.token_hex(8)
        self._call: str | None = None
        glue = self._encode_after_turn("")
        if not glue or glue[0] not in self._control.values():
            raise ConfigError(
                f"the chat template of {tokenizer.name_or_path!r} does not end a turn with a control token"
            )
        self.end_of_turn_id: int = glue[0]
        """What ends a turn; normally sampled by the policy."""
        end_of_turn = next(text for text, id_ in self._control.items() if id_ == self.end_of_turn_id)
        self._ends_turn = re.compile(f"{re.escape(end_of_turn)}|{re.escape(END_OF_CALL)}")
        self._ends = {self.end_of_turn_id, *tokenizer.all_special_ids}

    @property
    def opens_thinking(self) -> bool:
        """Whether the template itself opens the reasoning, so that a turn begins inside it."""
        rendered = self._render([{"role": "user", "content": "-"}])
        return rendered.rfind("<think>") > rendered.rfind("</think>")

    def prompt(self, messages: Iterable[Message]) -> list[int]:
        """Token ids of the opening messages and of the beginning of the first turn; the tools of a message with the
        role `TOOLS` go where the template puts them.

        Raises: ConfigError where there are tools and the template has no place for them, or it refuses a message.
        """
        hidden: list[str] = []
        told = list(messages)
        chat = [{"role": each.role, "content": self._hide(each.content, hidden)} for each in told if each.role != TOOLS]
        tools = [tool for each in told if each.role == TOOLS for tool in json.loads(each.content)]
        if tools:
            self.written_call()
        return self._encode(self._render_checked(chat, self._hide_all(tools, hidden)), hidden)

    def after_turn(self, sampled: list[int], output: str) -> list[int]:
        """What follows a sampled turn: its end if it was cut, the tool's output, the beginning of the next turn.

        Args:
            sampled: the turn's token ids, exactly as sampled.
            output: what the tool printed, already cut.
        """
        glue = self._encode_after_turn(output)
        return glue[1:] if sampled and sampled[-1] == self.end_of_turn_id else glue

    def after_calls(self, sampled: list[int], results: Sequence[str]) -> list[int]:
        """What follows a turn that called tools: its end if it was cut, a tool message for each result, the beginning
        of the next turn.

        Args:
            sampled: the turn's token ids, exactly as sampled.
            results: what the calls returned, in their order, already cut.
        """
        return self.after_messages(sampled, True, [{"role": "tool", "content": result} for result in results])

    def conversation(self, chat: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[int]:
        """Token ids of a conversation in OpenAI's form, and of the beginning of the next turn.

        Args:
            chat: messages, their contents texts, the arguments of their calls objects.
            tools: function schemas.

        Raises: ConfigError where the template has no place for tools, or refuses these messages.
        """
        hidden: list[str] = []
        if tools:
            self.written_call()
        told = self._hide_all(_numbered(chat), hidden)
        return self._encode(self._render_checked(told, self._hide_all(list(tools), hidden)), hidden)

    def after_messages(self, sampled: list[int], called: bool, chat: Sequence[Mapping[str, Any]]) -> list[int]:
        """What follows a sampled turn: its end if it was cut, messages in OpenAI's form, the beginning of the next one.

        Args:
            sampled: the turn's token ids, exactly as sampled.
            called: whether it called tools.
            chat: what came after it.

        Raises: ConfigError where the template refuses these messages.
        """
        hidden: list[str] = []
        mark, name = f"turn{self._nonce}", f"name{self._nonce}"
        turn: dict[str, Any] = {"role": "assistant", "content": "" if called else mark}
        if called:
            function = {"name": name, "arguments": {"x": mark}}
            turn["tool_calls"] = [{"id": "call00001", "type": "function", "function": function}]
        told = self._hide_all(list(chat), hidden)
        results = [
            each | {"name": name, "tool_call_id": "call00001"} if each["role"] == "tool" else each for each in told
        ]
        rendered = self._render_checked([{"role": "user", "content": "-"}, turn, *results], [])
        # After a call's arguments comes what closes the call, which was sampled, and then the end of the turn.
        end = self._ends_turn.search(rendered, rendered.rindex(mark))
        if end is None:
            raise ConfigError(f"the chat template of {self.tokenizer.name_or_path!r} does not end this turn")
        glue = self._encode(rendered[end.start() :], hidden)
        ended = sampled and sampled[-1] in (self.end_of_turn_id, self._control.get(END_OF_CALL))
        return glue[1:] if ended else glue

    def _render_checked(self, chat: list[dict[str, Any]], tools: list[Any]) -> str:
        try:
            return self._render(chat, tools=tools)
        except (TemplateError, TypeError, ArithmeticError) as error:
            raise ConfigError(
                f"the chat template of {self.tokenizer.name_or_path!r} refuses these messages: "
                f"{' '.join(str(error).split())}"
            ) from error

    def written_call(self) -> str:
        """How the template writes a call of a function ``NAME``, up to the value of its argument.

        Raises: ConfigError where the template shows the model no tools, or has no place for calls and their results.
        """
        if self._call is None:
            ask = [{"role": "user", "content": "-"}]
            name, content = f"name{self._nonce}", f"content{self._nonce}"
            rendered, mark = self._render_call(("",))
            head, found, rest = rendered.rpartition(mark)
            if name not in self._render(ask, tools=[_function(name)]) or not found or not self._ends_turn.search(rest):
                raise ConfigError(
                    f"the chat template of {self.tokenizer.name_or_path!r} has no place for tools (`tools=`, calls "
                    "and role `tool`): use a model that was trained to call tools, or give its tokenizer such a one"
                )
            turn = self._render([*ask, {"role": "assistant", "content": content}]).partition(content)[0]
            self._call = _beyond(head, turn).rpartition("</think>")[2].strip().replace(name, "NAME")
        return self._call

    def turn(self, message: Mapping[str, Any]) -> list[int]:
        """An assistant's message as the policy would have sampled it, its end included.

        What it says may hold ``<think>`` and its like, but no special token: those only begin and end turns.

        Args:
            message: in OpenAI's form: ``content``, and where there are any ``reasoning_content`` and ``tool_calls``,
                their arguments objects.
        Raises: ConfigError where the template has no place for its calls.
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
        calls, end = "", self.end_of_turn_id
        if message.get("tool_calls"):
            calls, end = self._calls_as_text(self._hide_all(_numbered([message])[0]["tool_calls"], hidden))
            # Most templates part what is said from what is called.
            calls = calls if content.strip() else calls.lstrip()
        return [*self._encode(content + calls, hidden), end]

    def text(self, sampled: list[int]) -> str:
        """A sampled turn as text, without the token that ended it."""
        kept = sampled[:-1] if sampled and sampled[-1] in self._ends else sampled
        return str(self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _lead(self) -> str:
        """The white space that the template puts before what is said, and leaves to the policy to sample."""
        said = f"content{self._nonce}"
        ask = {"role": "user", "content": "-"}
        opened = self._render([ask])
        before = self._render([ask, {"role": "assistant", "content": said}]).partition(said)[0]
        lead = before.removeprefix(opened)
        return lead if lead.isspace() and before.startswith(opened) else ""

    def _calls_as_text(self, calls: list[Any]) -> tuple[str, int]:
        """How the template writes calls after something that was said, and the token that ends such a turn."""
        self.written_call()
        ask: dict[str, Any] = {"role": "user", "content": "-"}
        said = f"content{self._nonce}"
        turn = {"role": "assistant", "content": said, "tool_calls": calls}
        try:
            rendered = self._render([ask, turn])
        except (TemplateError, TypeError, ArithmeticError) as error:
            raise ConfigError(
                f"the chat template of {self.tokenizer.name_or_path!r} refuses {len(calls)} calls in a turn: {error}"
            ) from error
        if said in rendered:
            after = rendered.partition(said)[2]
        else:
            # A template without a place for both.
            after = _beyond(rendered, self._render([ask, {**turn, "tool_calls": []}]).partition(said)[0])
        end = self._ends_turn.search(after)
        assert end is not None, "written_call has seen it"
        return after[: end.start()], self._control[end[0]]

    def _encode_after_turn(self, output: str) -> list[int]:
        # Any earlier conversation does: what follows a turn does not depend on what came before it.
        hidden: list[str] = []
        turn = f"turn{self._nonce}"
        chat = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": turn},
            {"role": "user", "content": self._hide(output, hidden)},
        ]
        return self._encode(self._render_checked(chat, []).rpartition(turn)[2], hidden)

    def _render_call(self, results: Sequence[str]) -> tuple[str, str]:
        """A conversation in which one call is answered by all ``results``, and the mark in the call's arguments."""
        mark = f"argument{self._nonce}"
        identity = {"tool_call_id": "call00001", "name": f"name{self._nonce}"}
        function = {"name": identity["name"], "arguments": {"x": mark}}
        call = {"id": identity["tool_call_id"], "type": "function", "function": function}
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            *({"role": "tool", "content": result, **identity} for result in results),
        ]
        try:
            return self._render(chat), mark
        except (TemplateError, TypeError, ArithmeticError) as error:
            raise ConfigError(
                f"the chat template of {self.tokenizer.name_or_path!r} refuses results of tools: {error}"
            ) from error

    def _render(self, chat: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=self._thinking,
            )
        )

    def _hide_all(self, value: Any, hidden: list[str]) -> Any:
        """`_hide` in every text of a JSON value, names of its keys included."""
        if isinstance(value, str):
            return self._hide(value, hidden)
        if isinstance(value, list):
            return [self._hide_all(each, hidden) for each in value]
        if isinstance(value, dict):
            return {self._hide(key, hidden): self._hide_all(each, hidden) for key, each in value.items()}
        return value

    def _hide(self, text: str, hidden: list[str], tokens: re.Pattern[str] | None = None) -> str:
        """Replace ``tokens`` (unless told all control tokens) in ``text`` by marks, remembering them in ``hidden``."""

        def mark(match: re.Match[str]) -> str:
            hidden.append(match[0])
            return f"{self._nonce}:{len(hidden) - 1};"

        return (tokens or self._control_pattern).sub(mark, text)

    def _encode(self, rendered: str, hidden: list[str]) -> list[int]:
        """Token ids of a rendered template: its control tokens are control tokens, marks are spelled out."""
        ids: list[int] = []
        position = 0
        for match in self._control_pattern.finditer(rendered):
            ids += self._encode_text(rendered[position : match.start()], hidden)
            ids.append(self._control[match[0]])
            position = match.end()
        return ids + self._encode_text(rendered[position:], hidden)

    def _encode_text(self, text: str, hidden: list[str]) -> list[int]:
        spelled = re.sub(rf"{self._nonce}:(\d+);", lambda match: hidden[int(match[1])], text)
        return list(self._plain.encode(spelled, add_special_tokens=False).ids)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds each of the tokens, the longer one where one begins another."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _beyond(text: str, other: str) -> str:
    """``text`` from where it is another than ``other``: some templates put a blank before what is said alone.

    >>> _beyond("[/INST][TOOL_CALLS]", "[/INST] ")
    '[TOOL_CALLS]'
    """
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))
    return text[sum(1 for _ in alike) :]


def _numbered(chat: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with ids of calls of nine letters and digits, the only ones that Mistral's templates take.

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
