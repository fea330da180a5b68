"""prime-rl's loss of a group that its patched configuration has scored by our algorithm; nothing is trained.

DRACO_PRIME_RL is a checkout with examples/trainers/prime_rl/custom_algorithm.patch applied.
"""

from __future__ import annotations

import asyncio
import os
import sys
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [f"{os.environ['DRACO_PRIME_RL']}/src", f"{os.environ['DRACO_PRIME_RL']}/packages/prime-rl-configs/src"]

from tests.support.adapters import PartlyFailingCompleter, emit  # noqa: E402
from tests.support.adapters.verifiers_group import trace  # noqa: E402


def main() -> None:
    """Print the advantages of each trace, and the gradients of the default loss."""
    from prime_rl.configs.algorithm import AlgoConfig
    from prime_rl.orchestrator.algo import build_algorithm
    from pydantic import TypeAdapter

    config = TypeAdapter(AlgoConfig).validate_python(
        {
            "type": "custom",
            "import_path": "draco_ray.adapters.prime_rl.StepCreditAlgorithm",
            "kwargs": {"model": "canned", "complete": PartlyFailingCompleter(unscored="XX0")},
        }
    )
    algorithm = build_algorithm(config, None)
    traces = [trace(flight) for flight in ("UA1", "XX0", "DL9", "UA1")]
    asyncio.run(algorithm.finalize_group([SimpleNamespace(traces=[each]) for each in traces]))
    emit(
        {
            "advantages": [each.branches[0].advantages for each in traces],
            "pushed": [loss_gradient(each) for each in traces],
        }
    )


def loss_gradient(trace: Any) -> list[float]:
    """Gradient of prime-rl's default loss with respect to each log-probability, for an unchanged policy."""
    import torch
    from prime_rl.configs.trainer import DefaultLossConfig
    from prime_rl.trainer.rl.loss import LossInputs, default_loss_fn

    advantages = torch.tensor(trace.branches[0].advantages)
    log_probs = torch.full(advantages.shape, -1.0, requires_grad=True)
    inputs = LossInputs(
        trainer_logprobs=log_probs,
        inference_logprobs=log_probs.detach(),
        ref_logprobs=None,
        advantages=advantages,
        loss_mask=torch.ones(advantages.shape, dtype=torch.bool),
    )
    (gradient,) = torch.autograd.grad(default_loss_fn(inputs, DefaultLossConfig(kl_tau=0.0)).loss, log_probs)
    return (-gradient).tolist()


if __name__ == "__main__":
    main()
