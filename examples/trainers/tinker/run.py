"""Two tasks' groups, judged and made into Tinker training data; needs TINKER_API_KEY and OPENAI_API_KEY.

python examples/trainers/tinker/run.py Qwen/Qwen3-8B
"""

import asyncio
import sys

import numpy as np
import tinker

from draco_ray import group_advantages_G
from draco_ray.adapters.credit import CreditJudge
from draco_ray.adapters.tinker import datum
from draco_ray.adapters.verdicts import TrajectoryKey, digest

TASKS = ("Name three primes above 100 and explain each.", "Plan a two-day visit to Lisbon.")
GROUP = 4


async def main(model: str) -> None:
    """One step."""
    credit = CreditJudge("openai/gpt-5.4", budget=5.0, store="verdicts.sqlite")
    client = await tinker.ServiceClient().create_lora_training_client_async(base_model=model)
    sampler = await client.save_weights_and_get_sampling_client_async()
    tokenizer, data = client.get_tokenizer(), []
    for task in TASKS:
        messages = [{"role": "user", "content": task}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        samples = (
            await sampler.sample_async(
                prompt=tinker.ModelInput.from_ints(prompt),
                num_samples=GROUP,
                sampling_params=tinker.SamplingParams(max_tokens=400),
            )
        ).sequences
        keys = [TrajectoryKey(digest(task), "0", digest(sample.tokens)) for sample in samples]
        said = [tokenizer.decode(sample.tokens, skip_special_tokens=True) for sample in samples]
        records = [{"task_id": task, "messages": [*messages, {"role": "assistant", "content": each}]} for each in said]
        verdicts = await credit.judge(keys, records)
        judged = [n for n, verdict in enumerate(verdicts) if verdict.reward is not None]
        advantages = group_advantages_G(np.array([verdicts[n].reward for n in judged]))
        for n, advantage in zip(judged, advantages, strict=True):
            mask = np.ones(len(samples[n].tokens))
            spread = credit.store.spread([keys[n]], [advantage], mask[None])[0]
            data.append(datum(prompt, samples[n].tokens, mask, samples[n].logprobs, spread))
    step = await client.forward_backward_async(data, loss_fn="importance_sampling")
    await client.optim_step_async(tinker.AdamParams(learning_rate=1e-5))
    print(await step)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
