"""The judge's phases, one file each: this list is the only one.

Their names are those of the paper's logs, but for ``score``, which is ``stage3`` there.
"""

from __future__ import annotations

from draco_ray.judging.phases.base import Phase
from draco_ray.judging.phases.credit import Credit
from draco_ray.judging.phases.score import Score
from draco_ray.judging.phases.stage1 import Stage1
from draco_ray.judging.phases.stage2 import Stage2
from draco_ray.judging.phases.union import Union

PHASES: dict[str, Phase] = {phase.name: phase for phase in (Stage1, Stage2, Union, Score, Credit)}
"""In the order in which a group needs them: where calls wait for each other later phases go first, since they end
groups that are under way."""


def urgency(name: str | None) -> int:
    """Rank of a phase's calls, the lowest first; what belongs to no phase is the least urgent."""
    names = list(PHASES)
    return -names.index(name) if name in names else 0
