"""TRL's GRPOTrainer with its own tool loop, in one process or with each group split over two.

Tokens come from a script in place of sampling; tools, masks, rewards, shuffling and the loss are TRL's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.adapters import emit, missing_verdict_error
from tests.support.adapters.trl_flights import FLIGHTS, JUDGE, PROMPTS, book, model_folder, row_summary, search, turn


def main() -> None:
    """Train; print each row for which a loss was computed."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from draco_ray.adapters.trl import StepCredit

    workers = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    folder = model_folder()
    rows: list[dict[str, Any]] = []

    class Scripted(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            texts = [self.processing_class.decode(ids) for ids in prompt_ids]
            per_worker = len(FLIGHTS) // workers
            flights = FLIGHTS[rank * per_worker : (rank + 1) * per_worker] * (len(texts) // per_worker)
            said = [turn(text.count("<tool_response>\n"), flight) for text, flight in zip(texts, flights, strict=True)]
            return [self.processing_class(each)["input_ids"] for each in said], None

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            mask = inputs["completion_mask"] * inputs["tool_mask"]
            each = zip(inputs["completion_ids"], mask.numpy(), inputs["advantages"].numpy(), strict=True)
            rows.extend({"step": self._step, **row_summary(self.processing_class, *row)} for row in each)
            return super()._compute_loss(model, inputs)

    credit = StepCredit("canned", complete=JUDGE)
    trainer = credit.trainer(Scripted)(
        model=folder,
        reward_funcs=credit,
        tools=[search, book],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=4 // workers,
            steps_per_generation=2 // workers,
            num_generations=4,
            num_iterations=2,
            max_completion_length=512,
            max_steps=4,
            bf16=False,
            use_cpu=True,
            ddp_backend="gloo" if workers > 1 else None,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 2}),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    before = [each.clone() for each in trainer.model.parameters()]
    trainer.train()
    moved = any(not each.equal(old) for each, old in zip(trainer.model.parameters(), before, strict=True))
    found = {"rows": rows, "moved": moved, "counts": credit.store.counts.copy()}
    # A batch with other tokens than those that were judged.
    count = len(credit._keys)
    found["stale"] = missing_verdict_error(credit.advantages, [1.0] * count, [[1]] * count, [[0]] * count)
    found["refused"] = refused(credit)
    if "FLIGHTS_OUT" in os.environ:
        Path(os.environ["FLIGHTS_OUT"], f"{rank}.json").write_text(json.dumps(found))
    else:
        emit(found)


def refused(credit: Any) -> list[str]:
    """Error messages for TRL's trainers whose losses have one advantage per sequence."""
    from trl import RLOOTrainer
    from trl.experimental.gmpo import GMPOTrainer

    from draco_ray.errors import ConfigError

    said = []
    for trainer in (RLOOTrainer, GMPOTrainer):
        try:
            credit.trainer(trainer)
        except ConfigError as error:
            said.append(str(error))
    return said


def split() -> None:
    """Run `main` in two processes, each with half of every group."""
    with tempfile.TemporaryDirectory() as out:
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 10000)}
        world |= {"FLIGHTS_OUT": out, "ACCELERATE_USE_CPU": "true"}
        workers = [
            subprocess.Popen(sys.orig_argv, env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]
        codes = [worker.wait() for worker in workers]
        assert codes == [0, 0], codes
        emit([json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(2)])


if __name__ == "__main__":
    split() if os.environ.get("FLIGHTS_SPLIT") and "RANK" not in os.environ else main()
