"""A starter policy for the desk agent, trained on the spot: it stands in for a pretrained model that can call tools.

    python examples/desk_agent/starter.py DIR

Its demonstrations are episodes of the agent itself behind the endpoint, in which a script with bad habits speaks for
the policy: it often decides without looking, its policy desk is often wrong, and it does not always do as it says.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from agent import DESK, play
from openai import OpenAI
from tasks import REFUNDED, THINGS, WORDS, rows

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.chat import ChatTokens
from draco_ray.engine.sampler import Sample
from draco_ray.engine.tool_calls import ToolCallReader, ToolUse
from draco_ray.records import EpisodeEnd, Task
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.endpoint.episode import Episode
from draco_ray.rollout.endpoint.server import Endpoint
from draco_ray.rollout.tokens import TokenPolicy
from draco_ray.sandbox.starter.settings import StarterSettings
from draco_ray.sandbox.starter.tokenizer import train_tokenizer
from draco_ray.sandbox.starter.train import Example, new_model, train

LOOKS, DESK_KNOWS, FOLLOWS = 0.7, 0.65, 0.75
"""How often the script does as it should."""
VARIANTS = 6
"""Demonstrations of each task."""
SETTINGS = StarterSettings(
    vocabulary=420, hidden_size=128, intermediate_size=256, positions=1024, epochs=6, batch_tokens=1024
)
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def called(name: str) -> str:
    """A turn that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {}})}\n</tool_call><|im_end|>"


@dataclass
class Script:
    """Speaks for the policy."""

    chat: ChatTokens
    tokenizer: Any
    random: random.Random
    name: str = "script"

    async def sample(self, token_ids: list[int], *, max_tokens: int, seed: int | None = None) -> Sample:
        """The next turn of whoever is asked."""
        ids = self.tokenizer.encode(self._turn(self.tokenizer.decode(token_ids)), add_special_tokens=False)
        return Sample(token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop", policy_version=0)

    async def read_calls(self, text: str, tools: str, *, parser: str | None, thinking: bool) -> ToolUse | None:
        """The calls of a turn, read as an engine reads them."""
        return self.reader.read(text, tools, thinking=thinking)

    @cached_property
    def reader(self) -> ToolCallReader:
        """Of the calls that the chat template writes."""
        return ToolCallReader(self.chat, None)

    def _turn(self, prompt: str) -> str:
        if DESK in prompt:
            right = REFUNDED[prompt.rpartition("came ")[2].partition(".")[0]]
            return "yes<|im_end|>" if right == (self.random.random() < DESK_KNOWS) else "no<|im_end|>"
        if re.search(r"is (refunded|declined)", prompt):
            return "Done.<|im_end|>"
        said = re.search(r"says (yes|no)", prompt)
        if said is None and self.random.random() < LOOKS:
            return called("look_up")
        yes = self.random.random() < 0.5 if said is None else (said[1] == "yes") == (self.random.random() < FOLLOWS)
        return called("refund" if yes else "decline")


async def demonstrate(endpoint: Endpoint, policy: TokenPolicy, row: dict[str, Any], number: int) -> list[Example]:
    """One episode of the agent, as the sequences of tokens that it leaves."""
    config = AgentConfig(thinking=False, max_prompt_length=256, max_response_length=768)
    request = RolloutRequest(task_id=row["id"], group="", rollout=number, attempt=0, seed=number)
    episode = Episode(Task(task_id=row["id"], instruction=row["instruction"]), request, policy, config)
    async with endpoint.serving(episode) as base_url:
        with OpenAI(base_url=base_url, api_key=episode.key) as client:
            await asyncio.to_thread(play, client, row["instruction"], row["state"])
    played = episode.trajectory(EpisodeEnd.FINISHED, None, prompt=(), closing="")
    return [
        Example(token_ids=tuple(played.token_ids_T[span].tolist()), sampled=tuple(played.sampled_T[span].tolist()))
        for span in played.branch_spans
    ]


async def demonstrations(policy: TokenPolicy) -> list[Example]:
    """Of the training tasks."""
    endpoint = Endpoint()
    try:
        return [
            example
            for number in range(VARIANTS)
            for row in rows()
            if row["split"] == "train"
            for example in await demonstrate(endpoint, policy, row, number)
        ]
    finally:
        await endpoint.stop()


def main(folder: Path) -> None:
    """Train the policy and save it."""
    texts = [words.format(thing=thing) for words in WORDS for thing in THINGS]
    texts += [called(name) for name in ("look_up", "refund", "decline")] * 9
    texts += [f"The order came {state}. The policy desk says yes no. It came {state}." for state in REFUNDED] * 9
    texts += ["The order is refunded The order is declined error: no already", DESK, "Done.", "yes", "no"] * 9
    texts += ["system\nuser\nassistant\ntool\ntools\nlook_up\nrefund\ndecline\n"] * 9
    tokenizer = train_tokenizer(texts, SETTINGS.vocabulary, SETTINGS.positions)
    tokenizer.chat_template = TEMPLATE
    chat = ChatTokens(tokenizer, thinking=False)
    policy = TokenPolicy(Script(chat, tokenizer, random.Random(0)), chat, AgentConfig(thinking=False))
    examples = asyncio.run(demonstrations(policy))
    model = new_model(tokenizer, SETTINGS, 0)
    loss = train(model, [examples] * SETTINGS.epochs, SETTINGS, 0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{len(examples)} sequences, {model.num_parameters() / 1e6:.2f}M parameters, {loss:.3f} nats a sampled token")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
