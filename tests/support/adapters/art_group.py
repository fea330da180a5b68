"""A trajectory group of ART, scored."""

from __future__ import annotations

import asyncio

from tests.support.adapters import ASK, Canned, emit, said


def main() -> None:
    """Print rewards, metrics, metadata and logs."""
    import art

    from draco_ray.adapters.art import draco_score_group

    group = art.TrajectoryGroup(
        [
            art.Trajectory(messages_and_choices=[{"role": "user", "content": ASK}, *said(flight)], reward=0.25)
            for flight in ("DL9", "UA1")
        ]
    )
    scored = asyncio.run(draco_score_group(group, "canned", complete=Canned()))
    emit(
        [
            {
                "reward": each.reward,
                "metrics": each.metrics,
                "metadata": each.metadata,
                "logs": each.logs,
                "before": old.reward,
            }
            for each, old in zip(scored.trajectories, group.trajectories, strict=True)
        ]
    )


if __name__ == "__main__":
    main()
