"""One GRPO update of our learner against TRL's and a loop by hand: tokens a second, peak memory, and the same numbers.

python jobs/bench_learner.py [--trl-python PYTHON] [--repeats 3] [--shapes "27b smollm2"] [--cells "ragged equal"]
                             [--device cuda]

Every side gets the same random model, the same LoRA adapter with values that differ from the base model, the same
tokens, sampled or not, and the same advantages; each run is a process of its own, and they take turns. What is timed
is the update: reference log-probs, loss, backward, clipping and the optimizer's step; generation is not part of it. TRL
is driven through its public interface (`GRPOTrainer.train` with a `rollout_func` that hands out recorded tokens), with
the settings of `trl_side`; `make bench-learner` gives it an environment of its own. Losses, gradient norms and the
adapters after the update are compared, so that the faster side cannot be faster by computing something else.

TRL pads to the longest sequence of a generation batch. It is measured with one generation batch, its default, and with
one per group, which pads least. Its Liger kernels are Triton's and do not run on a CPU; with ``--device cuda`` it is
also measured with them, everything is in bfloat16, memory is the GPU's, a side that fails is reported and left out, and
the medians are added to gpu_check.py's result file (`make bench-learner-gpu`). Without a GPU that is a message and exit
code 0.

The packed PEFT loop is what one writes by hand instead of using a trainer (`peft_side`): PEFT and a transformers model,
sequences packed into rows without padding, and logits of the sampled tokens only.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import psutil
import typer

GROUP = 4
"""Rollouts per prompt."""
PROMPT_TOKENS = 128
SAMPLED_TOKENS, OBSERVED_TOKENS = 64, 96
"""Tokens per turn that the policy wrote, and tokens that the environment answered."""
CELLS = {
    "ragged": (2, 3, 3, 4, 5, 6, 8, 12),
    "equal": (5, 5, 5, 5, 5, 5, 5, 5),
    "long": (16, 24, 24, 32, 40, 48, 64, 96),
}
"""Turns of each rollout. TRL pads every sequence to the longest of the batch, which costs nothing in ``equal``."""
REWARDS = (1.0, 0.2, -0.4, 0.6, -1.0, 0.8, 0.1, -0.3)
REWARD_EPSILON = 1e-4
"""TRL's epsilon on the group's standard deviation."""

SHAPES = {
    # A sixteenth of Qwen3.6-27B's width; the LM head has the same share of a forward pass, a twentieth.
    "27b": {
        "vocab_size": 3584,
        "hidden_size": 320,
        "intermediate_size": 1088,
        "num_hidden_layers": 16,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
    # Half of a forward pass is in the LM head.
    "small": {
        "vocab_size": 32768,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    # SmolLM2-135M's sizes.
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    # For a GPU: layers of Qwen3.6-27B at their real width, an eighth of its layers and vocabulary.
    "27b-layers": {
        "vocab_size": 31040,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 8,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
}
"""Name -> configuration of a random model."""
ON_CPU = ("27b", "small", "smollm2"), ("ragged", "equal")
"""Default shapes and cells on a CPU with two cores."""
FIRST_WORDS = 128
"""The rollouts use only token ids below this, which every model has."""
RANK, ALPHA, LEARNING_RATE, KL, SEED = 16, 32, 5e-5, 0.01, 0
SIDES = {
    "draco": "draco-ray",
    "peft": "packed PEFT loop",
    "trl": "TRL",
    "trl_grouped": "TRL, padded by group",
    "trl_liger": "TRL, padded by group, Liger",
}
GPU_ONLY = "trl_liger"
LARGEST_GAP, LEAST_COSINE = 0.01, 0.99
"""Maximum relative difference of losses and gradient norms, and minimum cosine of adapter changes, by rounding."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A recorded episode: token ids, and which of them the policy sampled."""

    token_ids: list[int]
    sampled: list[bool]
    advantage: float
    reward: float


@dataclass(frozen=True, kw_only=True)
class Update:
    """Cost and results of one side's update."""

    seconds: float
    cpu_seconds: float
    loaded_mib: float
    """Resident memory right before the update; on a GPU, memory of tensors."""
    peak_mib: float
    """Peak memory during the update."""
    computed_tokens: int
    """Tokens of a forward pass over the batch, padding included."""
    loss: float
    grad_norm: float


def workload(turns: Sequence[int], seed: int = SEED) -> list[Rollout]:
    """Rollouts of random tokens, group after group with one prompt each, that end with a sampled turn."""
    generator = np.random.default_rng(seed)
    rewards = np.array(REWARDS[: len(turns)]).reshape(-1, GROUP)
    spread = rewards.std(axis=1, ddof=1, keepdims=True) + REWARD_EPSILON
    advantages = ((rewards - rewards.mean(axis=1, keepdims=True)) / spread).flatten()
    rollouts = []
    prompts = generator.integers(1, FIRST_WORDS, (len(rewards), PROMPT_TOKENS)).tolist()
    for index, (count, reward, advantage) in enumerate(zip(turns, rewards.flatten(), advantages, strict=True)):
        sampled = [False] * PROMPT_TOKENS
        for turn in range(count):
            sampled += [False] * (OBSERVED_TOKENS if turn else 0) + [True] * SAMPLED_TOKENS
        after = generator.integers(1, FIRST_WORDS, len(sampled) - PROMPT_TOKENS).tolist()
        tokens = prompts[index // GROUP] + after
        rollouts.append(Rollout(token_ids=tokens, sampled=sampled, advantage=float(advantage), reward=float(reward)))
    return rollouts


def build_model(folder: Path, shape: dict[str, int], dtype: str = "float32") -> None:
    """Save a random Qwen3 model, and the tokenizer that TRL asks for; `shape` as in `SHAPES`."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    config = Qwen3Config(
        **shape,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        dtype=dtype,
    )
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        Qwen3ForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(torch.float32)
    words = Tokenizer(WordLevel({"<|endoftext|>": 0}, unk_token="<|endoftext|>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)


def learner_config(rollouts: Sequence[Rollout]) -> Any:
    """Our configuration: the defaults, with forward passes of the longest rollout's length."""
    from draco_ray.config.schema import LearnerConfig

    return LearnerConfig(
        gpus_per_worker=0,
        lora_rank=RANK,
        lora_alpha=ALPHA,
        learning_rate=LEARNING_RATE,
        kl_coefficient=KL,
        micro_batch_tokens=max(len(rollout.token_ids) for rollout in rollouts),
    )


def build_adapter(model: Path, file: Path, dtype: Any = "float32") -> None:
    """Save adapter values that change the base model, so that there is a KL to compare."""
    import torch
    from safetensors.numpy import save_file

    from draco_ray.config.schema import ModelConfig
    from draco_ray.learner.lora_learner import LoraLearner

    learner = LoraLearner(ModelConfig(path=str(model), dtype=dtype), learner_config(workload((1, 1, 1, 1))), seed=SEED)
    generator = torch.Generator().manual_seed(SEED)
    tensors = {
        name: (values + 0.02 * torch.randn(values.shape, generator=generator).numpy()).astype(np.float32)
        for name, values in learner.adapter(0).tensors.items()
    }
    save_file(tensors, file)


class Mark(NamedTuple):
    """Clocks and memory at one moment."""

    wall: float
    cpu: float
    resident: float


def mark(device: str = "cpu") -> Mark:
    """The current clocks and memory; resets the peak memory of the process or the GPU."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return Mark(time.perf_counter(), time.process_time(), torch.cuda.memory_allocated() / MIB)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return Mark(time.perf_counter(), time.process_time(), psutil.Process().memory_info().rss / MIB)


def cost(since: Mark, device: str = "cpu") -> dict[str, float]:
    """Time and memory fields of `Update`."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / MIB
    else:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) / 1024
    return {
        "seconds": time.perf_counter() - since.wall,
        "cpu_seconds": time.process_time() - since.cpu,
        "loaded_mib": since.resident,
        "peak_mib": peak,
    }


def dtype_on(device: str) -> Any:
    """Precision of the model, equal for all sides."""
    return "bfloat16" if device == "cuda" else "float32"


def draco_side(folder: Path, rollouts: Sequence[Rollout], device: str = "cpu") -> tuple[Update, dict[str, Any]]:
    """One update of `draco_ray.learner.lora_learner.LoraLearner`; returns its cost and the adapter after it."""
    from safetensors.torch import load_file

    from draco_ray.config.schema import ModelConfig
    from draco_ray.learner.lora_learner import LoraLearner
    from draco_ray.records import TrainingSample

    model = ModelConfig(path=str(folder / "model"), dtype=dtype_on(device))
    learner = LoraLearner(model, learner_config(rollouts), seed=SEED, device=device)
    learner.policy.load_adapter(load_file(folder / "adapter.safetensors"), "adapter.safetensors")
    samples = []
    for index, rollout in enumerate(rollouts):
        mask_T = np.array(rollout.sampled)
        samples.append(
            TrainingSample(
                group=f"g{index // GROUP}",
                task_id=f"t{index // GROUP}",
                rollout=index % GROUP,
                policy_version=0,
                token_ids_T=np.array(rollout.token_ids, dtype=np.int32),
                loss_mask_T=mask_T,
                advantage_T=np.where(mask_T, rollout.advantage, 0.0).astype(np.float32),
                logprob_T=np.zeros(len(mask_T), dtype=np.float32),
                prompt_length=PROMPT_TOKENS,
            )
        )
    if device == "cuda":
        # Load kernels before the update, as on the other sides.
        learner.token_logprobs(samples[0].token_ids_T)
    before = mark(device)
    learner.accumulate(samples)
    metrics = learner.step()
    update = Update(
        **cost(before, device),
        computed_tokens=metrics.computed_tokens,
        loss=metrics.policy_loss + KL * metrics.kl,
        grad_norm=metrics.grad_norm,
    )
    return update, learner.adapter(1).tensors


def trl_side(
    folder: Path, rollouts: Sequence[Rollout], batch: int, *, grouped: bool, device: str = "cpu", liger: bool = False
) -> tuple[Update, dict[str, Any]]:
    """One update of TRL's `GRPOTrainer`; returns its cost and the adapter after it.

    TRL's defaults (with gradient checkpointing, and the LM head fused with the log-probs) and our hyperparameters. The
    reference is the model without the adapter. An update is a whole number of generation batches, so that TRL computes
    no old log-probs, as we do not. The loss is the mean over all tokens: "dapo" with one generation batch. With one per
    group (`grouped`) that would be a mean of group means, so there "dr_grpo" divides the sum by a constant.
    """
    from trl import import_utils

    # TRL would import vLLM if it is installed, and its memory would count.
    import_utils.is_vllm_available = lambda *_, **__: False

    from datasets import Dataset
    from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    marks: list[Mark] = []
    costs: list[dict[str, float]] = []
    losses: list[float] = []

    def recorded(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """TRL's hook for rollouts from elsewhere; the update begins when this first returns."""
        asked = [rollouts[GROUP * int(group) + number] for group in dict.fromkeys(prompts) for number in range(GROUP)]
        answer: dict[str, list[Any]] = {
            "prompt_ids": [rollout.token_ids[:PROMPT_TOKENS] for rollout in asked],
            "completion_ids": [rollout.token_ids[PROMPT_TOKENS:] for rollout in asked],
            "logprobs": [[0.0] * (len(rollout.token_ids) - PROMPT_TOKENS) for rollout in asked],
            "env_mask": [[int(sampled) for sampled in rollout.sampled[PROMPT_TOKENS:]] for rollout in asked],
            "recorded_reward": [rollout.reward for rollout in asked],
        }
        marks.append(mark(device) if not marks else marks[0])
        return answer

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            costs.append(cost(marks[0], device))

    class Trainer(GRPOTrainer):
        """Keeps the losses, which are rounded in the log."""

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    def reward(completions: list[str], recorded_reward: list[float], **_: Any) -> list[float]:
        return recorded_reward

    lengths = [len(rollout.token_ids) for rollout in rollouts]
    sampled = sum(sum(rollout.sampled) for rollout in rollouts)
    together = GROUP if grouped else len(rollouts)
    trainer = Trainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=len(rollouts) // batch,
            steps_per_generation=together // batch,
            num_generations=GROUP,
            # Only the divisor of "dr_grpo" for each sequence, because nothing is generated.
            max_completion_length=sampled // len(rollouts) if grouped else max(lengths),
            shuffle_dataset=False,
            max_steps=1,
            loss_type="dr_grpo" if grouped else "dapo",
            beta=KL,
            epsilon=0.2,
            temperature=1.0,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch",
            weight_decay=0.01,
            max_grad_norm=1.0,
            gradient_checkpointing=True,
            bf16=device == "cuda",
            use_cpu=device == "cpu",
            use_liger_kernel=liger,
            model_init_kwargs={"dtype": dtype_on(device)},
            seed=SEED,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [str(group) for group in range(len(rollouts) // GROUP)]}),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        peft_config=LoraConfig(
            r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        rollout_func=recorded,
        callbacks=[Stop()],
    )
    set_peft_model_state_dict(trainer.model, load_file(folder / "adapter.safetensors"))
    trainer.train()
    (log,) = (entry for entry in trainer.state.log_history if "grad_norm" in entry)
    update = Update(
        **costs[0],
        computed_tokens=sum(
            together * max(lengths[start : start + together]) for start in range(0, len(lengths), together)
        ),
        loss=sum(losses),
        grad_norm=log["grad_norm"],
    )
    tensors = {name: tensor.float().numpy() for name, tensor in get_peft_model_state_dict(trainer.model).items()}
    return update, tensors


def packed(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Rollouts packed into rows, in order; a row has at most as many tokens as the longest rollout."""
    longest = max(len(rollout.token_ids) for rollout in rollouts)
    rows: list[list[Rollout]] = [[]]
    for rollout in rollouts:
        if sum(len(each.token_ids) for each in rows[-1]) + len(rollout.token_ids) > longest:
            rows.append([])
        rows[-1].append(rollout)
    return rows


def row_logprobs(model: Any, row: Sequence[Rollout], device: str) -> Any:
    """Log-probs of the sampled tokens of rollouts in one row."""
    import torch

    lengths = [len(rollout.token_ids) for rollout in row]
    tokens_T = torch.tensor([token for rollout in row for token in rollout.token_ids], device=device)
    position_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
    rollout_T = torch.repeat_interleave(torch.arange(len(row)), torch.tensor(lengths)).to(device)
    # Causal attention within each rollout.
    mask_TT = (rollout_T[:, None] == rollout_T[None, :]).tril()
    target_V = torch.tensor([flag for rollout in row for flag in rollout.sampled], device=device).nonzero()[:, 0]
    logits_VW = model(
        input_ids=tokens_T[None],
        attention_mask=mask_TT[None, None],
        position_ids=position_T[None],
        logits_to_keep=target_V - 1,
        use_cache=False,
    ).logits[0]
    chosen_V = logits_VW.gather(1, tokens_T[target_V][:, None])[:, 0]
    return chosen_V.float() - logits_VW.float().logsumexp(1)


def peft_side(folder: Path, rollouts: Sequence[Rollout], device: str = "cpu") -> tuple[Update, dict[str, Any]]:
    """One update of a hand-written loop; returns its cost and the adapter after it.

    As on the other sides: the reference is the model without the adapter, the current policy is the old one, the loss
    is the mean over all sampled tokens, and activations are checkpointed.
    """
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, dtype_on(device))).to(device)
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(base, lora)
    set_peft_model_state_dict(model, load_file(folder / "adapter.safetensors"))
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.01)
    tokens, total = sum(sum(rollout.sampled) for rollout in rollouts), 0.0
    before = mark(device)
    for row in packed(rollouts):
        advantages = [rollout.advantage for rollout in row for sampled in rollout.sampled if sampled]
        advantage_V = torch.tensor(advantages, device=device)
        with torch.no_grad(), model.disable_adapter():
            reference_V = row_logprobs(model, row, device)
        logprob_V = row_logprobs(model, row, device)
        # The ratio is 1 here, so clipping would change nothing.
        ratio_V = (logprob_V - logprob_V.detach()).exp()
        difference_V = reference_V - logprob_V
        kl_V = difference_V.exp() - difference_V - 1
        loss = (KL * kl_V - advantage_V * ratio_V).sum() / tokens
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    update = Update(
        **cost(before, device),
        computed_tokens=sum(len(rollout.token_ids) for rollout in rollouts),
        loss=total,
        grad_norm=float(norm),
    )
    return update, {name: tensor.float().cpu().numpy() for name, tensor in get_peft_model_state_dict(model).items()}


def run_side(side: str, cell: str, folder: Path, batch: int, out: Path, device: str) -> None:
    """Run one update in this process; write its cost as JSON, and the resulting adapter."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rollouts = workload(CELLS[cell])
    if side == "draco":
        update, tensors = draco_side(folder, rollouts, device)
    elif side == "peft":
        update, tensors = peft_side(folder, rollouts, device)
    else:
        update, tensors = trl_side(
            folder, rollouts, batch, grouped=side != "trl", device=device, liger=side == "trl_liger"
        )
    np.savez(out.with_suffix(".npz"), **tensors)
    out.write_text(json.dumps(asdict(update)), encoding="utf-8")


def moved(after: Path, adapter: Path) -> np.ndarray[Any, Any]:
    """By how much an update changed the adapter, as one vector."""
    from safetensors.numpy import load_file

    before = load_file(adapter)
    with np.load(after) as values:
        return np.concatenate([(values[name] - before[name]).ravel() for name in sorted(before)])


def cosine(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    """Cosine of the angle between two vectors."""
    return float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)))


def table(title: str, cell: str, updates: dict[str, list[Update]]) -> str:
    """All sides, and our value relative to each other side's: medians over the repetitions."""
    rollouts = workload(CELLS[cell])
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    rows: list[tuple[str, Callable[[Update], float], str]] = [
        ("seconds", lambda update: update.seconds, ".1f"),
        ("CPU seconds", lambda update: update.cpu_seconds, ".1f"),
        ("tokens a second", lambda update: tokens / update.seconds, ".0f"),
        ("tokens a CPU second", lambda update: tokens / update.cpu_seconds, ".0f"),
        ("peak memory, MiB", lambda update: update.peak_mib, ".0f"),
        ("of it above the loaded model, MiB", lambda update: update.peak_mib - update.loaded_mib, ".0f"),
        ("tokens in a pass, padding included", lambda update: update.computed_tokens, ".0f"),
    ]
    sampled = sum(sum(rollout.sampled) for rollout in rollouts)
    others = [side for side in updates if side != "draco"]
    heads = [*(SIDES[side] for side in updates), *(f"draco-ray / {SIDES[side]}" for side in others)]
    lines = [
        f"### {title}, {cell}: {len(rollouts)} rollouts, {tokens} tokens, {sampled} of them sampled, longest "
        f"{max(len(rollout.token_ids) for rollout in rollouts)}\n",
        f"| | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}",
    ]
    for name, of, digits in rows:
        found = {side: statistics.median(map(of, updates[side])) for side in updates}
        cells = [f"{found[side]:{digits}}" for side in updates]
        cells += [f"{found['draco'] / found[side]:.2f}" for side in others]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def agreement(cell: str, updates: dict[str, list[Update]], folder: Path, *, exact: bool = True) -> str:
    """How close the other sides' updates are to ours. A difference beyond rounding is reported; with ``exact`` it ends
    the program."""
    ours = updates["draco"][0]
    step = moved(folder / f"{cell}-draco-0.npz", folder / "adapter.safetensors")
    lines = []
    for side in updates:
        if side == "draco":
            continue
        theirs = updates[side][0]
        near = cosine(step, moved(folder / f"{cell}-{side}-0.npz", folder / "adapter.safetensors"))
        text = (
            f"{SIDES[side]}: loss {ours.loss:.6f} and {theirs.loss:.6f}, gradient norm {ours.grad_norm:.6f} and "
            f"{theirs.grad_norm:.6f}; cosine of the two changes of the adapter {near:.6f}"
        )
        pairs = ((ours.loss, theirs.loss), (ours.grad_norm, theirs.grad_norm))
        if near < LEAST_COSINE or any(abs(left - right) > LARGEST_GAP * abs(right) for left, right in pairs):
            if exact:
                sys.exit(f"bench-learner: {cell}: two sides computed different updates: {text}")
            text += (
                f" (more than {LARGEST_GAP:g} apart, or a cosine below {LEAST_COSINE:g}: bfloat16, or another update)"
            )
        lines.append(text)
    return "\n".join(lines)


def keep_medians(out: Path, shape: str, cell: str, updates: dict[str, list[Update]], failed: Sequence[str]) -> None:
    """Add a cell's medians, and why sides are missing, to the result file of gpu_check.py."""
    import gpu_check

    tokens, figures = sum(len(rollout.token_ids) for rollout in workload(CELLS[cell])), []
    for side, each in updates.items():
        speed = tokens / statistics.median(update.seconds for update in each)
        peak = statistics.median(update.peak_mib for update in each) / 1024
        figures.append(gpu_check.Figure(name=f"{SIDES[side]}: update", value=speed, unit="tokens/s"))
        figures.append(gpu_check.Figure(name=f"{SIDES[side]}: peak memory", value=peak, unit="GiB"))
    found = {"figures": [asdict(figure) for figure in figures], "machine": gpu_check.machine("cuda")}
    gpu_check.keep(
        out, f"update beside TRL, {shape}, {cell}", found | ({"skipped": "; ".join(failed)} if failed else {})
    )


def main(
    trl_python: Annotated[Path, typer.Option(help="Python that can import TRL and draco_ray.")] = Path(
        ".venv-bench/bin/python"
    ),
    cells: Annotated[str, typer.Option(help=f"Choices: {' '.join(CELLS)}.")] = " ".join(ON_CPU[1]),
    shapes: Annotated[str, typer.Option(help=f"Choices: {' '.join(SHAPES)}.")] = " ".join(ON_CPU[0]),
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs per side.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads per side.")] = os.cpu_count() or 1,
    trl_batch: Annotated[int, typer.Option(min=1, help="Sequences per forward pass of TRL.")] = 1,
    device: Annotated[str, typer.Option(help="Device: cpu, or cuda for one GPU.")] = "cpu",
    kept: Annotated[Path, typer.Option(help="Result file of --device cuda, shared with gpu_check.py.")] = Path(
        "runs/gpu_check.json"
    ),
    side: Annotated[str | None, typer.Option(hidden=True)] = None,
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    out: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure all sides and print them beside each other; a minute or two a run of TRL on two cores."""
    if unknown := [name for name in shapes.split() if name not in SHAPES]:
        sys.exit(f"bench-learner: unknown shape {unknown[0]!r}; expected one of {', '.join(SHAPES)}")
    if unknown := [name for name in cells.split() if name not in CELLS]:
        sys.exit(f"bench-learner: unknown cell {unknown[0]!r}; expected one of {', '.join(CELLS)}")
    if side is not None and folder is not None and out is not None:
        run_side(side, cells, folder, trl_batch, out, device)
        return
    if device == "cuda":
        from gpu_check import why_skipped

        if (reason := why_skipped()) is not None:
            print(f"bench-learner: skipped: {reason}")
            return
    if shutil.which(trl_python) is None:
        sys.exit(f"bench-learner: no {trl_python}; run `make bench-learner` to set it up, or give another Python")
    memory = psutil.virtual_memory().total / 2**30
    print(
        f"Machine: {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}, "
        f"load average {os.getloadavg()[0]:.1f} at the start; {threads} threads a side, {dtype_on(device)}, medians of "
        f"{repeats}",
        flush=True,
    )
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with tempfile.TemporaryDirectory() as temporary:
        for shape in shapes.split():
            scratch = Path(temporary) / shape
            build_model(scratch / "model", SHAPES[shape], dtype_on(device))
            build_adapter(scratch / "model", scratch / "adapter.safetensors", dtype_on(device))
            for cell in cells.split():
                updates: dict[str, list[Update]] = {}
                failed: list[str] = []
                for repeat in range(repeats):
                    for name in SIDES if device == "cuda" else [side for side in SIDES if side != GPU_ONLY]:
                        result = scratch / f"{cell}-{name}-{repeat}.json"
                        options = {"--cells": cell, "--side": name, "--folder": scratch, "--out": result}
                        options |= {"--trl-batch": str(trl_batch), "--device": device}
                        command = [trl_python, Path(__file__), *(part for pair in options.items() for part in pair)]
                        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
                        if done.returncode:
                            if device == "cpu" or name == "draco":
                                sys.exit(f"bench-learner: the side {name} failed:\n{done.stderr[-3000:]}")
                            failed.append(f"{SIDES[name]}, {cell}: failed: {done.stderr.strip()[-300:]}")
                            print(failed[-1], flush=True)
                            continue
                        updates.setdefault(name, []).append(Update(**json.loads(result.read_text(encoding="utf-8"))))
                print(
                    f"\n{table(shape, cell, updates)}\n\n{agreement(cell, updates, scratch, exact=device == 'cpu')}",
                    flush=True,
                )
                if device == "cuda":
                    keep_medians(kept, shape, cell, updates, failed)


if __name__ == "__main__":
    typer.run(main)
