"""Train a model on a task with tools in TRL, with step credit; needs trl[vllm] and OPENAI_API_KEY.

python examples/trainers/trl/run.py Qwen/Qwen3-0.6B             (GRPOTrainer)
python examples/trainers/trl/run.py Qwen/Qwen3-0.6B --asynchronous (AsyncGRPOTrainer, with a vLLM server on port 8000)
"""

import sys

from datasets import Dataset

from draco_ray.adapters.trl import StepCredit

FLIGHTS = {"UA1": 420, "DL9": 380, "AA7": 510}


def search(destination: str) -> str:
    """Search flights.

    Args:
        destination: airport.
    """
    return ", ".join(f"{flight} {price} USD" for flight, price in FLIGHTS.items())


def book(flight: str) -> str:
    """Book a flight.

    Args:
        flight: its number.
    """
    return f"booked {flight}" if flight in FLIGHTS else f"no flight {flight}"


def main(model: str, asynchronous: bool) -> None:
    """Train for twenty steps."""
    credit = StepCredit("openai/gpt-5.4", budget=20.0, store="verdicts.sqlite")
    prompts = [[{"role": "user", "content": f"Book the cheapest flight to {to}."}] for to in ("SFO", "LAX", "ORD")]
    options = {
        "model": model,
        "reward_funcs": credit,
        "tools": [search, book],
        "train_dataset": Dataset.from_dict({"prompt": prompts}),
    }
    if asynchronous:
        from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

        args = AsyncGRPOConfig(output_dir="out", max_steps=20, num_generations=8)
        trainer = credit.trainer(AsyncGRPOTrainer)(args=args, **options)
    else:
        from trl import GRPOConfig, GRPOTrainer

        args = GRPOConfig(output_dir="out", max_steps=20, num_generations=8, per_device_train_batch_size=8)
        trainer = credit.trainer(GRPOTrainer)(args=args, **options)
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], "--asynchronous" in sys.argv)
