"""Prompt sets: five templates in a folder, checked when they are loaded and filled in a single pass."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draco_ray.config.load import project_file
from draco_ray.errors import ConfigError, StoreError
from draco_ray.judging.render import evidence_code
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

KEY_FILE = "evidence_key"
_OF_PROCESS = secrets.token_bytes(32)
_PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """One prompt set."""

    folder: Path
    templates: Mapping[Phase, str]
    key: bytes = b""
    """What the codes of evidence are derived from (`draco_ray.judging.render.evidence_code`): secret where anybody is
    judged."""

    def code(self, identity: str) -> str:
        """The code of evidence about ``identity``: a group, so that its prompts share their beginnings."""
        return evidence_code(self.key, identity)

    def fill(self, phase: Phase, values: Mapping[str, object]) -> str:
        """The prompt of ``phase``. A placeholder inside a value stays text: values are never looked into.

        Args:
            phase: whose template.
            values: placeholder name -> text, at least for every name the template mentions.
        """

        def value(match: re.Match[str]) -> str:
            text = str(values[match[1]])
            # A block begins on a line of its own, wherever somebody's template puts it.
            before = match.string[: match.start()]
            return f"\n{text}" if "\n" in text and before and not before.endswith("\n") else text

        return _PLACEHOLDER.sub(value, self.templates[phase])


def evidence_key(folder: Path | None) -> bytes:
    """The secret behind the codes of evidence, kept beside the judge's replies: a resumed run asks the same again.

    Args:
        folder: the replies' (`draco_ray.config.schema.JudgeConfig.cache`); None: a secret of this process.

    Raises:
        StoreError: it can neither be read nor written.
    """
    if folder is None:
        return _OF_PROCESS
    new = secrets.token_hex(16)
    path = folder / KEY_FILE
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            # Whole or not at all, and the first of several judge workers decides.
            draft = folder / f"{KEY_FILE}.{new}"
            draft.write_text(new, encoding="ascii")
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
            draft.unlink()
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"the judge's evidence key cannot be kept in {path}: {error.strerror}") from None


def load_prompts(folder: Path, key: bytes = b"") -> Prompts:
    """Read the prompt set in ``folder`` (found as `project_file` does).

    Args:
        folder: five templates under the paper's names.
        key: `evidence_key`, wherever anybody is judged.

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
    return Prompts(folder=folder, templates=templates, key=key)
