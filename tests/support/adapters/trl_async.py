"""TRL's AsyncGRPOTrainer with its own worker process, tool loop, queue, packing and loss, on a CPU.

Stand-ins: an HTTP server that answers with scripted turns in place of vLLM, attention in plain torch in place of the
FlashAttention 3 kernel, and no transfer of weights to the server. No GPU is asked for its peak speed.
"""

from __future__ import annotations

import json
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

from tests.support.adapters import emit, missing_verdict_error
from tests.support.adapters.trl_flights import FLIGHTS, JUDGE, PROMPTS, book, model_folder, row_summary, search, turn


class Attention:
    """Stand-in for FlashAttention 3: attention within segments that end with their keys."""

    @staticmethod
    def flash_attn_varlen_func(
        query: Any, key: Any, value: Any, begin_q: Any, begin_k: Any, *_: Any, softmax_scale: float, **__: Any
    ) -> Any:
        """Attention of (tokens, heads, width) tensors; the last query of a segment sees all of its keys."""
        import torch

        repeats = query.shape[1] // key.shape[1]
        found = torch.empty_like(query)
        for (q0, q1), (k0, k1) in zip(pairwise(begin_q), pairwise(begin_k), strict=True):
            keys, values = (each[k0:k1].repeat_interleave(repeats, dim=1) for each in (key, value))
            scores = torch.einsum("qhd,khd->hqk", query[q0:q1], keys) * softmax_scale
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(int(k1 - k0 - (q1 - q0)) + 1)
            found[q0:q1] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
        return found


class Weights:
    """Stand-in for the weight transfer to vLLM, which does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def serve(tokenizer: Any) -> str:
    """Serve scripted completions; the n-th conversation of a prompt books the n-th flight."""
    started: dict[str, int] = {}
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Do not log requests."""

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = tokenizer.decode(body["prompt"])
            number = text.count("<tool_response>\n")
            with lock:
                if number < 2:
                    name = f"{number}{text}"
                    flight = FLIGHTS[started.get(name, 0) % len(FLIGHTS)]
                    started[name] = started.get(name, 0) + 1
                else:
                    flight = text.rpartition("booked ")[2][:3]
            ids = tokenizer(turn(number, flight))["input_ids"]
            answer = {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * len(ids)}}]}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def main() -> None:
    """Train; print each row for which a loss was computed."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import (
        AsyncGRPOConfig,
        AsyncGRPOTrainer,
        async_grpo_trainer,
        async_rollout_worker,
        packing,
    )

    from draco_ray.adapters import trl_async
    from draco_ray.adapters.trl import StepCredit

    packing._flash_attn = Attention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    async_rollout_worker.is_vllm_available = lambda *_, **__: True
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows: list[dict[str, Any]] = []
    remembered_rows: list[Any] = []
    packed: list[list[Any]] = []  # The loader is a batch ahead of the loss.

    class Recording(AsyncGRPOTrainer):
        def get_train_dataloader(self) -> Any:
            loader = super().get_train_dataloader()
            inner = loader.base_dataloader
            collate = inner.collate_fn

            def remembered(examples: Any) -> Any:
                packed.append([sample for row in examples[0] for sample in row.samples])
                remembered_rows.extend(packed[-1])
                return collate(examples)

            inner.collate_fn = remembered
            return loader

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            advantages, segments = inputs["advantages"][0], inputs["segment_id"][0]
            for n, sample in enumerate(packed.pop(0)):
                row = sample["completion_mask"].astype("float32")
                row[row != 0] = advantages[segments == n].numpy()
                rows.append(row_summary(tokenizer, sample["input_ids"], sample["completion_mask"], row))
            return super().compute_loss(model, inputs, *arguments, **options)

    credit = StepCredit("canned", complete=JUDGE)
    trainer = credit.trainer(Recording)(
        model=folder,
        reward_funcs=[credit],
        tools=[search, book],
        args=AsyncGRPOConfig(
            output_dir=tempfile.mkdtemp(),
            vllm_server_base_url=serve(tokenizer),
            per_device_train_batch_size=4,
            num_generations=4,
            # One group at a time: the server counts a prompt's conversations, and cannot tell their groups apart.
            max_inflight_tasks=4,
            max_completion_length=512,
            token_budget=0,
            max_steps=2,
            dtype="float32",
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
        weight_transfer=Weights(),
    )
    before = [each.clone() for each in trainer.model.parameters()]
    trainer.train()
    moved = any(not each.equal(old) for each, old in zip(trainer.model.parameters(), before, strict=True))
    found = {"rows": rows, "moved": moved, "counts": credit.store.counts.copy()}
    # A row whose tokens are not those that were judged.
    stale = {**remembered_rows[0], "input_ids": remembered_rows[0]["input_ids"] + 1}
    found["stale"] = missing_verdict_error(trl_async._row_advantages, credit, stale)
    emit(found)


if __name__ == "__main__":
    main()
