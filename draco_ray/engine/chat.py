"""Chat templates in tokens: the prompt, and the glue that follows a sampled turn.

The history is append-only. What was sampled is never rendered, stripped of its reasoning or tokenised again, whatever
the template would do to an earlier turn.

What comes from outside (an instruction, a tool output) cannot contain control tokens: ``<|im_end|>`` or ``</think>`` in
it is spelled out in ordinary tokens, and only the template's own are control tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

from draco_ray.errors import ConfigError
from draco_ray.records import Message


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
        self._tokenizer = tokenizer
        self._thinking = thinking
        backend: Tokenizer = tokenizer.backend_tokenizer
        self._control = {token.content: id_ for id_, token in backend.get_added_tokens_decoder().items()}
        longest_first = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # The same tokenizer without any control token: the encoder of all text.
        description = json.loads(backend.to_str())
        description["added_tokens"] = []
        self._plain = Tokenizer.from_str(json.dumps(description))
        # Stands for a control token inside somebody's text while the template is rendered. Nobody can guess it.
        self._nonce = secrets.token_hex(8)
        glue = self._encode_after_turn("")
        if not glue or glue[0] not in self._control.values():
            raise ConfigError(
                f"the chat template of {tokenizer.name_or_path!r} does not end a turn with a control token"
            )
        self.end_of_turn_id: int = glue[0]
        """What ends a turn; normally sampled by the policy."""
        self._ends = {self.end_of_turn_id, *tokenizer.all_special_ids}

    @property
    def opens_thinking(self) -> bool:
        """Whether the template itself opens the reasoning, so that a turn begins inside it."""
        rendered = self._render([{"role": "user", "content": "-"}])
        return rendered.rfind("<think>") > rendered.rfind("</think>")

    def prompt(self, messages: Iterable[Message]) -> list[int]:
        """Token ids of the opening messages and of the beginning of the first turn."""
        hidden: list[str] = []
        chat = [{"role": message.role, "content": self._hide(message.content, hidden)} for message in messages]
        return self._encode(self._render(chat), hidden)

    def after_turn(self, sampled: list[int], output: str) -> list[int]:
        """What follows a sampled turn: its end if it was cut, the tool's output, the beginning of the next turn.

        Args:
            sampled: the turn's token ids, exactly as sampled.
            output: what the tool printed, already cut.
        """
        glue = self._encode_after_turn(output)
        return glue[1:] if sampled and sampled[-1] == self.end_of_turn_id else glue

    def text(self, sampled: list[int]) -> str:
        """A sampled turn as text, without the token that ended it."""
        kept = sampled[:-1] if sampled and sampled[-1] in self._ends else sampled
        return str(self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _encode_after_turn(self, output: str) -> list[int]:
        # Any earlier conversation does: what follows a turn does not depend on what came before it.
        hidden: list[str] = []
        turn = f"turn{self._nonce}"
        chat = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": turn},
            {"role": "user", "content": self._hide(output, hidden)},
        ]
        return self._encode(self._render(chat).rpartition(turn)[2], hidden)

    def _render(self, chat: list[dict[str, str]]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True, enable_thinking=self._thinking
            )
        )

    def _hide(self, text: str, hidden: list[str]) -> str:
        """Replace control tokens spelled in ``text`` by marks, remembering them in ``hidden``."""

        def mark(match: re.Match[str]) -> str:
            hidden.append(match[0])
            return f"{self._nonce}:{len(hidden) - 1};"

        return self._control_pattern.sub(mark, text)

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
