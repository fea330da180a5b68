"""Scores two trajectory groups of ART; in one of them a trajectory cannot be judged."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.adapters import ASK, PartlyFailingCompleter, booking_messages, emit


def main() -> None:
    """Print rewards, metrics, metadata and logs."""
    import art

    from draco_ray.adapters.art import draco_score_group

    def group_of(*flights: str) -> Any:
        return art.TrajectoryGroup(
            [
                art.Trajectory(
                    messages_and_choices=[{"role": "user", "content": ASK}, *booking_messages(flight)], reward=0.25
                )
                for flight in flights
            ]
        )

    def scored_of(group: Any) -> Any:
        return asyncio.run(draco_score_group(group, "canned", complete=PartlyFailingCompleter(unscored="booked XX0")))

    group = group_of("DL9", "UA1")
    scored, unscored = scored_of(group), scored_of(group_of("DL9", "XX0"))
    emit(
        [
            unscored,
            *(
                {
                    "reward": each.reward,
                    "metrics": each.metrics,
                    "metadata": each.metadata,
                    "logs": each.logs,
                    "before": old.reward,
                }
                for each, old in zip(scored.trajectories, group.trajectories, strict=True)
            ),
        ]
    )


if __name__ == "__main__":
    main()
