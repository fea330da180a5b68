"""LoRA on the CPU worker: what is added to a batch's activations, token by token."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.slow  # Imports vLLM, which takes seconds.

SLOTS = {1: 0, 2: 1}
"""Adapter id -> slot."""


@pytest.mark.parametrize(
    "adapters",
    [[1] * 6, [2, 2, 1, 1, 1, 2], [0] * 6, [0, 1, 1, 0, 2, 0], [1]],
    ids=["one", "two", "none", "mixed with none", "one token"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_token_gets_its_own_adapters_share(adapters: list[int], dtype: torch.dtype) -> None:
    from vllm.lora.layers import LoRAMapping

    from draco_ray.engine.cpu_lora import SegmentedLora

    tokens, inputs, rank, slices = len(adapters), 5, 3, (4, 2)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    a = tuple(random(2, 1, rank, inputs) for _ in slices)
    b = tuple(random(2, 1, width, rank) for width in slices)
    x, y = random(tokens, inputs), random(tokens, sum(slices))
    rows = []
    for token, adapter in enumerate(adapters):
        row = y[token].float().clone()
        if adapter:
            slot = SLOTS[adapter]
            row += torch.cat([x[token].float() @ a[i][slot, 0].T.float() @ b[i][slot, 0].T.float() for i in (0, 1)])
        rows.append(row)

    lora = SegmentedLora(64, 8, "cpu")
    lora.update_metadata(LoRAMapping(tuple(adapters), tuple(adapters), is_prefill=True), [1, 2], 2, 100)
    lora.add_lora_linear(y, x, a, b, 1.0, slices)
    torch.testing.assert_close(y.float(), torch.stack(rows), atol=0.1 if dtype is torch.bfloat16 else 1e-5, rtol=1e-2)

    before = y[: len(adapters), :4].clone()
    lora.add_lora_embedding(y[:, :4], x[:, :rank], b[0])
    for token, adapter in enumerate(adapters):
        if not adapter:
            assert torch.equal(y[token, :4], before[token])
