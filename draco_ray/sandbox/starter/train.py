"""Supervised training of the starter policy: next-token cross-entropy on what the agent would have sampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from draco_ray.config.machine import has_bfloat16
from draco_ray.sandbox.starter.demonstrations import Example
from draco_ray.sandbox.starter.settings import StarterSettings

OnUpdate = Callable[[int, int, float], None]
"""Called after every optimizer update with (updates done, updates in all, loss in nats per token)."""


def new_model(tokenizer: PreTrainedTokenizerFast, settings: StarterSettings, seed: int) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 of the settings' shape in bfloat16, the precision it is trained and served in."""
    config = Qwen3Config(
        vocab_size=_round_up(len(tokenizer), 64),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.key_value_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.positions,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.bfloat16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=True,
        eos_token_id=[tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def train(
    model: Qwen3ForCausalLM,
    epochs: Sequence[Sequence[Example]],
    settings: StarterSettings,
    seed: int,
    on_update: OnUpdate | None = None,
) -> float:
    """Fit ``model`` in place to the examples of each epoch in turn.

    The optimizer updates float32 master copies, so that no update is lost to rounding; the model's weights are copied
    from them. The model computes in bfloat16 if the CPU has instructions for it (about twice as fast as float32), else
    in float32 (PyTorch's bfloat16 would take ten times as long). Same model, examples, settings and seed give the same
    weights on the same kind of machine.

    Returns: the mean loss of the last epoch, nats per sampled token.
    """
    order = np.random.default_rng(seed)
    plan = [length_grouped_batches(examples, settings.batch_tokens, order) for examples in epochs]
    total = sum(len(epoch) for epoch in plan)
    saved_dtype = model.dtype
    weights = list(model.parameters())
    masters = [weight.detach().float().clone() for weight in weights]
    if not has_bfloat16():
        model.float()
    optimizer = torch.optim.AdamW(
        masters, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=settings.weight_decay
    )
    done = 0
    epoch_loss = math.nan
    with _reproducible(settings.threads):
        model.train()
        for examples, epoch in zip(epochs, plan, strict=True):
            losses = []
            for batch in epoch:
                for group in optimizer.param_groups:
                    group["lr"] = settings.learning_rate * _schedule(done / total, settings.warmup_fraction)
                loss = _loss(model, [examples[index] for index in batch])
                loss.backward()
                for master, weight in zip(masters, weights, strict=True):
                    master.grad = None if weight.grad is None else weight.grad.float()
                    weight.grad = None
                torch.nn.utils.clip_grad_norm_(masters, settings.max_grad_norm)
                optimizer.step()
                with torch.no_grad():
                    for master, weight in zip(masters, weights, strict=True):
                        weight.copy_(master)
                losses.append(loss.item())
                done += 1
                if on_update is not None:
                    on_update(done, total, losses[-1])
            epoch_loss = sum(losses) / len(losses)
        model.eval()
    model.to(saved_dtype)
    return epoch_loss


def length_grouped_batches(
    examples: Sequence[Example], batch_tokens: int, order: np.random.Generator
) -> list[list[int]]:
    """One epoch of batches of example indices, each at most ``batch_tokens`` tokens once padded (or one example).

    Examples of similar length share a batch, which limits padding; the grouping and the order are drawn from ``order``.
    """
    jitter = order.uniform(0.9, 1.1, len(examples))
    ascending = np.argsort([len(example.token_ids) for example in examples] * jitter, kind="stable")
    epoch: list[list[int]] = [[]]
    longest = 0
    for index in ascending.tolist():
        longest = max(longest, len(examples[index].token_ids))
        if epoch[-1] and longest * (len(epoch[-1]) + 1) > batch_tokens:
            epoch.append([])
            longest = len(examples[index].token_ids)
        epoch[-1].append(index)
    return [epoch[position] for position in order.permutation(len(epoch))]


def _loss(model: Qwen3ForCausalLM, batch: Sequence[Example]) -> torch.Tensor:
    """Mean cross-entropy of the sampled tokens. Padding is on the right, where causal attention never sees it."""
    # Round up to have few different lengths: for every new shape kernels are compiled, and kept in memory.
    length = _round_up(max(len(example.token_ids) for example in batch), 64)
    token_ids = torch.zeros(len(batch), length, dtype=torch.long)
    target = torch.zeros(len(batch), length, dtype=torch.bool)
    for row, example in enumerate(batch):
        token_ids[row, : len(example.token_ids)] = torch.tensor(example.token_ids)
        target[row, : len(example.token_ids)] = torch.tensor(example.sampled)
    hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state
    # Compute logits only where the next token was sampled: a third of the positions or less.
    logits = model.lm_head(hidden[:, :-1][target[:, 1:]])
    return functional.cross_entropy(logits.float(), token_ids[:, 1:][target[:, 1:]])


def _schedule(progress: float, warmup: float) -> float:
    """Learning rate as a share of the peak: linear warm-up, then cosine to a tenth."""
    if progress < warmup:
        return (progress + 1e-3) / (warmup + 1e-3)
    return 0.55 + 0.45 * math.cos(math.pi * (progress - warmup) / (1 - warmup))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@contextmanager
def _reproducible(threads: int) -> Iterator[None]:
    """Deterministic kernels on a fixed number of threads; the caller's settings are restored afterwards."""
    threads_before = torch.get_num_threads()
    deterministic_before = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic_before)
        torch.set_num_threads(threads_before)
