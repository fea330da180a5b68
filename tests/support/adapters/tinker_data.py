"""Tinker's data of one trajectory, from the cookbook's builder and from ours. No server is asked for a loss."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.adapters import emit, missing_verdict_error

TURNS = ((3, 2), (4, 2), (2, 0))
"""Tokens of each turn, and of the environment's answer."""


def main() -> None:
    """Print advantages and masks of both."""
    import tinker
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.data_processing import trajectory_to_data
    from tinker_cookbook.rl.types import Trajectory, Transition

    from draco_ray.adapters.tinker import datum, step_data
    from draco_ray.adapters.verdicts import StepVerdict

    verdict = StepVerdict(reward=1.0, quality=(1.0, 0.25, 0.5), acted=(True, True, True))

    def trajectory(rewritten: bool) -> Any:
        history, transitions = [1, 2, 3], []
        for number, (said, answered) in enumerate(TURNS):
            tokens = [10 * (number + 1) + n for n in range(said)]
            shown = [9, *history[1:]] if rewritten and number == 2 else list(history)
            action = TokensWithLogprobs(tokens=tokens, maybe_logprobs=[-0.5] * said)
            transitions.append(
                Transition(ob=tinker.ModelInput.from_ints(shown), ac=action, reward=0.0, episode_done=number == 2)
            )
            history += [*tokens, *[5] * answered]
        return Trajectory(transitions=transitions, final_ob=tinker.ModelInput.from_ints(history))

    def shown(data: Any) -> list[dict[str, Any]]:
        names = ("advantages", "mask", "target_tokens", "logprobs")
        return [
            {name: each.loss_fn_inputs[name].to_numpy().tolist() for name in names if name in each.loss_fn_inputs}
            for each in data
        ]

    found = [shown(step_data(trajectory_to_data(trajectory(each), 0.7), verdict)) for each in (False, True)]
    other = StepVerdict(reward=1.0, quality=(1.0, 0.25), acted=(True, True))
    stale = missing_verdict_error(step_data, trajectory_to_data(trajectory(False), 0.7), other)
    ids = [
        token
        for number, (n, m) in enumerate(TURNS)
        for token in [*range(10 * number + 10, 10 * number + 10 + n), *[5] * m]
    ]
    mask = [int(part == 0) for counts in TURNS for part in (0, 1) for _ in range(counts[part])]
    ours = datum([1, 2, 3], ids, mask, np.full(len(ids), -0.5), np.array(mask) * 0.7)
    emit(
        {
            "cookbook": found,
            "stale": stale,
            "ours": shown([ours])[0],
            "plain": shown(trajectory_to_data(trajectory(False), 0.7))[0],
        }
    )


if __name__ == "__main__":
    main()
