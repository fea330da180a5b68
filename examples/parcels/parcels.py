"""A taskset for verifiers: the desk where parcels come in. Each has to be put on a shelf by the rules of the house."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import verifiers.v1 as vf
from talk import TalkConfig

__all__ = ["ParcelDesk", "Parcels"]

RULES = "Fragile parcels go on shelf A. Other parcels go on shelf B if heavy, on shelf C if light."
KINDS = ("heavy fragile", "light fragile", "heavy", "light")
SHELF = {"heavy fragile": "A", "light fragile": "A", "heavy": "B", "light": "C"}
THINGS = ("vase", "box", "lamp", "crate", "case", "tin", "pot", "bag")


class ParcelData(vf.TaskData):
    """The parcels that come in, in order."""

    parcels: list[str]


class ParcelTask(vf.Task[ParcelData]):
    """A morning at the desk."""


class ParcelDeskConfig(vf.EnvConfig):
    """One clerk, who only talks."""

    clerk: vf.AgentConfig = vf.AgentConfig(harness=TalkConfig())


class ParcelDesk(vf.Env[ParcelDeskConfig]):
    """Brings one parcel after another, and says where it went."""

    async def run(self, task, agents):  # type: ignore[no-untyped-def]
        """One episode."""
        coming, right = list(task.data.parcels), 0
        async with agents.clerk.interaction(task) as talk:
            segment = await talk.turn()
            while coming and not segment.terminated:
                parcel, shelf = coming.pop(0), segment.last_reply.strip()[-1:]
                right += shelf == SHELF[parcel.rsplit(" ", 1)[0]]
                if not coming:
                    break
                segment = await talk.turn(answer(shelf, coming[0]))
        talk.trace.record_reward("right", right / len(task.data.parcels))


def question(parcel: str) -> str:
    """What the desk asks first."""
    return f"{RULES} Answer with the shelf. First: a {parcel}."


def answer(shelf: str, parcel: str) -> str:
    """The desk's reply to a shelf, and its next question."""
    put = f"On shelf {shelf}." if shelf in ("A", "B", "C") else "There is no such shelf."
    return f"{put} Next: a {parcel}."


def mornings() -> list[list[str]]:
    """Three parcels a morning: each sequence of kinds once, with varying things."""
    orders = list(itertools.product(KINDS, repeat=3))
    random.Random(0).shuffle(orders)
    return [
        [f"{kind} {THINGS[(number + 3 * place) % len(THINGS)]}" for place, kind in enumerate(kinds)]
        for number, kinds in enumerate(orders)
    ]


class Parcels(vf.Taskset[ParcelTask]):
    """All mornings."""

    def load(self) -> Iterator[ParcelTask]:
        """One after another."""
        for number, parcels in enumerate(mornings(), start=1):
            data = ParcelData(name=f"morning {number}", prompt=question(parcels[0]), parcels=parcels)
            yield ParcelTask(data, self.config.task)
