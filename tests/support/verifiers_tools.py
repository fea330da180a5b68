"""A taskset with a tool for the tests of `environment.use: verifiers`; verifiers' own Python reads it."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["Shelves"]


class Shelf(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """A toolset for looking at places."""

    @vf.tool
    def look(self, place: str) -> str:
        """Looks at a place."""
        return f"Nothing is on {place}."


class Shelves(vf.Taskset[vf.Task]):
    """A taskset with one task."""

    @classmethod
    def toolsets(cls, config):  # type: ignore[no-untyped-def]
        """Return the only toolset."""
        return [Shelf(vf.SharedToolsetConfig())]

    def load(self):  # type: ignore[no-untyped-def]
        """Return the only task."""
        yield vf.Task(vf.TaskData(name="find", prompt="Where is the parcel?", system_prompt="Be brief."))


if __name__ == "__main__":
    Shelf.run()
