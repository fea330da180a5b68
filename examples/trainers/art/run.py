"""One step of ART in which a group's reward is the judge's; needs openpipe-art[backend] and OPENAI_API_KEY.

python examples/trainers/art/run.py Qwen/Qwen3-4B-Instruct-2507
"""

import asyncio
import sys

import art
from art.local import LocalBackend

from draco_ray.adapters.art import draco_score_group

TASKS = ("Name three primes above 100 and explain each.", "Plan a two-day visit to Lisbon.")


async def attempt(model: art.TrainableModel, task: str) -> art.Trajectory:
    """One conversation; an agent would go on with tools."""
    messages = [{"role": "user", "content": task}]
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_completion_tokens=400
    )
    return art.Trajectory(messages_and_choices=[*messages, reply.choices[0]], reward=0.0)


async def main(base_model: str) -> None:
    """Play, judge and train."""
    model = art.TrainableModel(name="draco", project="draco", base_model=base_model)
    backend = LocalBackend()
    await model.register(backend)
    groups = []
    for task in TASKS:
        group = art.TrajectoryGroup(await asyncio.gather(*(attempt(model, task) for _ in range(4))))
        judged = await draco_score_group(group, "openai/gpt-5.4", budget=5.0, swallow_exceptions=True)
        groups += [judged] if judged is not None else []
    await backend.train(model, groups)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
