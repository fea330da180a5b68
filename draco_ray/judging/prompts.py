"""Prompt sets: five templates in a folder, checked when they are loaded and filled in a single pass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draco_ray.config.load import project_file
from draco_ray.errors import ConfigError
from draco_ray.records import Phase

FILES = {
    Phase.STAGE1: "generate_rubrics.txt",
    Phase.STAGE2: "generate_rubrics_from_trajectory.txt",
    Phase.UNION: "union_rubrics.txt",
    Phase.SCORE: "score_rubrics.txt",
    Phase.CREDIT: "credit_assignment.txt",
}
"""The paper's file names."""

AVAILABLE = {
    Phase.STAGE1: frozenset({"agent_prompt", "task"}),
    Phase.STAGE2: frozenset({"agent_prompt", "task_input", "agent_trajectory", "existing_rubrics"}),
    Phase.UNION: frozenset({"agent_prompt", "task", "candidate_rubrics", "group_trajectories"}),
    Phase.SCORE: frozenset({"agent_prompt", "task_input", "agent_trajectory", "rubrics"}),
    Phase.CREDIT: frozenset(
        {
            "agent_prompt",
            "task_input",
            "agent_trajectory",
            "steps_summary",
            "num_steps",
            "num_rubrics",
            "rubric_scores",
        }
    ),
}
"""What a phase's prompt may mention; `draco_ray.judging.render` says what each becomes."""

REQUIRED: dict[Phase, tuple[frozenset[str], ...]] = {
    Phase.STAGE1: (frozenset({"agent_prompt"}),),
    Phase.STAGE2: (frozenset({"agent_trajectory"}), frozenset({"existing_rubrics"})),
    Phase.UNION: (frozenset({"candidate_rubrics"}), frozenset({"group_trajectories"})),
    Phase.SCORE: (frozenset({"agent_trajectory"}), frozenset({"rubrics"})),
    Phase.CREDIT: (frozenset({"rubric_scores"}), frozenset({"steps_summary", "agent_trajectory"})),
}
"""What it must mention: at least one name of each group."""

_PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """One prompt set."""

    folder: Path
    templates: Mapping[Phase, str]

    def fill(self, phase: Phase, values: Mapping[str, object]) -> str:
        """The prompt of ``phase``. A placeholder inside a value stays text: values are never looked into.

        Args:
            phase: whose template.
            values: placeholder name -> text, at least for every name the template mentions.
        """
        return _PLACEHOLDER.sub(lambda match: str(values[match.group(1)]), self.templates[phase])


def load_prompts(folder: Path) -> Prompts:
    """Read the prompt set in ``folder`` (found as `project_file` does).

    Raises:
        ConfigError: a missing file, an unknown placeholder, or a missing one that the phase cannot do without.
    """
    folder = project_file(folder)
    templates = {}
    for phase, name in FILES.items():
        path = folder / name
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompt set {folder}: {name} cannot be read: {error}") from None
        mentioned = set(_PLACEHOLDER.findall(text))
        if unknown := sorted(mentioned - AVAILABLE[phase]):
            known = ", ".join(sorted(AVAILABLE[phase]))
            raise ConfigError(f"prompt {path}: unknown placeholder {{{{ {unknown[0]} }}}}; {phase} knows {known}")
        for names in REQUIRED[phase]:
            if not names & mentioned:
                wanted = " or ".join(f"{{{{ {name} }}}}" for name in sorted(names))
                raise ConfigError(f"prompt {path}: {wanted} is missing; without it the judge sees nothing to judge")
        templates[phase] = text
    return Prompts(folder=folder, templates=templates)
