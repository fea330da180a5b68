"""A starter policy for a taskset of verifiers, trained on the spot: it stands in for a pretrained model.

    python examples/parcels/starter.py parcels DIR     # or: hangman

Its demonstrations are episodes in verifiers' own processes, in which a script with bad habits speaks for the policy.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draco_ray.config.load import load_config
from draco_ray.config.schema import AgentConfig
from draco_ray.engine.chat import ChatTokens
from draco_ray.engine.sampler import Sample
from draco_ray.environments.base import Environment, make_environment
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.endpoint.server import shared_endpoint
from draco_ray.rollout.tokens import TokenPolicy
from draco_ray.rollout.verifiers_agent import VerifiersAgent
from draco_ray.sandbox.starter.settings import StarterSettings
from draco_ray.sandbox.starter.tokenizer import train_tokenizer
from draco_ray.sandbox.starter.train import Example, new_model, train

HERE = Path(__file__).parent
VARIANTS = {"parcels": 12, "hangman": 4}
"""Demonstrations of each task."""
SIDE_BY_SIDE = 8
KNOWS = 0.55
"""How often the script does as it should."""


@dataclass
class Script:
    """Speaks for the policy."""

    tokenizer: Any
    says: Callable[[str, random.Random], str]
    random: random.Random
    name: str = "script"

    async def sample(self, token_ids: list[int], *, max_tokens: int, seed: int | None = None) -> Sample:
        """The next turn."""
        said = self.says(self.tokenizer.decode(token_ids), self.random)
        ids = self.tokenizer.encode(said + "<|im_end|>", add_special_tokens=False)
        return Sample(token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop", policy_version=0)


def clerk(prompt: str, chance: random.Random) -> str:
    """A shelf, often the wrong one, now and then one that is not there."""
    parcel = re.findall(r"(?:First|Next): a ((?:heavy|light)(?: fragile)?) ", prompt)[-1]
    right = "A" if "fragile" in parcel else "B" if "heavy" in parcel else "C"
    return right if chance.random() < KNOWS else chance.choice("ABCD")


def guesser(prompt: str, chance: random.Random) -> str:
    """A letter, often one that was guessed before."""
    guessed = re.findall(r"\[([A-Z])\]", prompt.rpartition("[LIGHT]")[2])
    if guessed and chance.random() > KNOWS:
        return f"[{chance.choice(guessed)}]"
    return f"[{chance.choice('AEIORSTLNUDMCPHG')}]"


SCRIPTS: dict[str, Callable[[str, random.Random], str]] = {"parcels": clerk, "hangman": guesser}


async def demonstrations(
    environment: Environment, agent: VerifiersAgent, tasks: list[str], variants: int
) -> list[Example]:
    """Episodes of the training tasks, as the sequences of tokens that they leave."""
    free = asyncio.Semaphore(SIDE_BY_SIDE)

    async def demonstrate(task_id: str, number: int) -> list[Example]:
        async with free:
            request = RolloutRequest(task_id=task_id, group="", rollout=number, attempt=0, seed=number)
            played = await agent.run(await environment.open(task_id), request)
        return [
            Example(token_ids=tuple(played.token_ids_T[span].tolist()), sampled=tuple(played.sampled_T[span].tolist()))
            for span in played.branch_spans
        ]

    try:
        asked = [demonstrate(task_id, number) for number in range(variants) for task_id in tasks]
        return [example for examples in await asyncio.gather(*asked) for example in examples]
    finally:
        await environment.stop()
        await shared_endpoint().stop()


def main(name: str, folder: Path) -> None:
    """Train the policy and save it."""
    config = load_config(str(HERE / f"{name}.yaml"))
    environment = make_environment(config.environment, config.data)
    tasks = environment.tasks(config.data.train_split)
    settings = StarterSettings(
        vocabulary=420, hidden_size=128, intermediate_size=256, positions=2048, epochs=6, batch_tokens=2048
    )
    texts = [environment.task(task_id).instruction for task_id in tasks]
    texts += ["system\nuser\nassistant\nOn shelf A. There is no such shelf. Next: a", "A B C D", "[A] [E]"] * 9
    tokenizer = train_tokenizer(texts, settings.vocabulary, settings.positions)
    chat = ChatTokens(tokenizer, thinking=False)
    # verifiers reads the tokenizer from a folder.
    with tempfile.TemporaryDirectory() as read:
        tokenizer.save_pretrained(read)
        tokenizer.name_or_path = read
        new_model(tokenizer, settings, 0).config.save_pretrained(read)
        policy = TokenPolicy(Script(tokenizer, SCRIPTS[name], random.Random(0)), chat, AgentConfig(thinking=False))
        agent = VerifiersAgent(policy, config.agent, "{task_description}")
        examples = asyncio.run(demonstrations(environment, agent, tasks, VARIANTS[name]))
    model = new_model(tokenizer, settings, 0)
    loss = train(model, [examples] * settings.epochs, settings, 0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{len(examples)} sequences, {model.num_parameters() / 1e6:.2f}M parameters, {loss:.3f} nats a sampled token")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
