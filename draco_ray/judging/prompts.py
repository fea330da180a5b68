"""Prompt sets, a folder with a template for each phase, and static rubrics."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draco_ray.config import plain_yaml
from draco_ray.config.config_signature import create_once
from draco_ray.config.load import project_file
from draco_ray.errors import ConfigError, StoreError
from draco_ray.judging.phases import PHASES, Score, Verdicts
from draco_ray.judging.render import evidence_code
from draco_ray.judging.reply import ENTRIES_KEY, with_tag
from draco_ray.judging.reply_cache import RESTORE
from draco_ray.records import Criterion

FACTS_PLACEHOLDER = "environment_facts"
"""Placeholder that every template may contain."""
ROOT_NOTE = f'\n\nGive the array as the value of "{ENTRIES_KEY}" in one JSON object: {{"{ENTRIES_KEY}": [...]}}.\n'
"""Added to a template that asks for a bare array, such as the paper's: the root of the schema is an object."""
NO_FACTS = "- Nothing beyond what the agent was told."

MERGED_FOLDER = Path("prompts/judge")
"""Folder with the templates of merged phases, for prompt sets without them."""
SCORING = (Score.name, Verdicts.name)
"""Phases whose prompts contain the corrected verdicts of `Prompts.examples`."""
KEY_FILE = "evidence_key"
_OF_PROCESS = secrets.token_bytes(32)
_PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """One prompt set."""

    folder: Path
    templates: Mapping[str, str]
    """Phase -> template."""
    key: bytes = b""
    """Secret key of the evidence codes (`draco_ray.judging.render.evidence_code`)."""
    facts: str = ""
    """Facts about the environment: ``{{ environment_facts }}``."""
    examples: str = ""
    """Corrected verdicts, prepended to the scoring prompts (`draco_ray.judging.labels.examples_text`)."""

    def code(self, identity: str) -> str:
        """The evidence code of ``identity``; a group has one code, so that its prompts share a prefix."""
        return evidence_code(self.key, identity)

    def length(self, phase: str) -> int:
        """Length of the template of ``phase`` in characters."""
        return len(self.templates[phase]) + (len(self.examples) if phase in SCORING else 0)

    def fill(self, phase: str, values: Mapping[str, object]) -> str:
        """The prompt of ``phase``, with its tag. Placeholders inside a value are not replaced.

        Args:
            phase: the phase whose template is filled.
            values: placeholder name -> text, at least for every name the template mentions.
        """

        def value(match: re.Match[str]) -> str:
            text = (self.facts.strip() or NO_FACTS) if match[1] == FACTS_PLACEHOLDER else str(values[match[1]])
            # A text of several lines begins on a new line, even if its placeholder is in the middle of a line.
            start = match.string[: match.start()]
            return f"\n{text}" if "\n" in text and start and not start.endswith("\n") else text

        before = self.examples if phase in SCORING else ""
        template = self.templates[phase]
        after = "" if f'"{ENTRIES_KEY}"' in template else ROOT_NOTE
        return with_tag(before + _PLACEHOLDER.sub(value, template) + after)


def evidence_key(folder: Path | None) -> bytes:
    """The secret key of the evidence codes, stored beside the replies so that a resumed run sends the same prompts.

    Args:
        folder: the folder of the replies (`draco_ray.config.schema.JudgeConfig.cache`); None: the key is not stored,
            and valid in this process only.

    Raises:
        StoreError: the key can neither be read nor written, or is damaged.
    """
    if folder is None:
        return _OF_PROCESS
    path = folder / KEY_FILE
    try:
        create_once(path, secrets.token_hex(16).encode())
        if re.fullmatch(rb"[0-9a-f]{32}", key := path.read_bytes()) is None:
            raise StoreError(f"the judge's evidence key in {path} is damaged; {RESTORE}")
        return key
    except OSError as error:
        raise StoreError(f"the judge's evidence key cannot be stored in {path}: {error.strerror}") from None


def load_prompts(folder: Path, key: bytes = b"", facts: str | None = None, examples: str = "") -> Prompts:
    """Read the prompt set in ``folder`` (found as `project_file` does).

    Args:
        folder: the folder with the template of every phase.
        key: see `evidence_key`.
        facts: facts about the environment; None if there are none.
        examples: prepended to the scoring prompt.

    Raises:
        ConfigError: a file is missing, or a template has an unknown placeholder or lacks a required one.
    """
    folder = project_file(folder)
    templates = {}
    for phase in PHASES.values():
        path = folder / phase.template
        if phase.merged and not path.exists():
            path = project_file(MERGED_FOLDER / phase.template)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompt set {folder}: {phase.template} cannot be read: {error}") from None
        mentioned = set(_PLACEHOLDER.findall(text))
        if unknown := sorted(mentioned - phase.placeholders - {FACTS_PLACEHOLDER}):
            known = ", ".join(sorted({*phase.placeholders, FACTS_PLACEHOLDER}))
            raise ConfigError(
                f"prompt {path}: unknown placeholder {{{{ {unknown[0]} }}}}; expected one of {known} in {phase.name}"
            )
        for names in phase.required:
            if not names & mentioned:
                wanted = " or ".join(f"{{{{ {name} }}}}" for name in sorted(names))
                raise ConfigError(
                    f"prompt {path}: placeholder {wanted} is missing; without it the judge does not see what to judge"
                )
        templates[phase.name] = text
    return Prompts(folder=folder, templates=templates, key=key, facts=facts or "", examples=examples)


def render_phase(phase: str, folder: Path) -> str:
    """The prompt of ``phase`` for its example inputs, with the prompt set at ``folder``.

    Raises:
        ConfigError: the prompt set cannot be used.
    """
    # The example uses AppWorld, which is not imported when other traces are judged.
    from draco_ray.environments.appworld.environment import APPWORLD_FACTS
    from draco_ray.judging.example import EXAMPLES

    return EXAMPLES[phase].prompt(load_prompts(folder, facts=APPWORLD_FACTS))


class _Criterion(BaseModel):
    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)

    title: str = Field(min_length=1)
    description: str = Field(min_length=1)
    evaluator_instruction: str = Field(min_length=1)


def load_static_rubric(path: Path) -> tuple[Criterion, ...]:
    """Read a static rubric: a YAML list of criteria, whose order is kept.

    Args:
        path: the file; `project_file` says where it is searched for.

    Raises:
        ConfigError: the file is missing or unreadable, is not a list, has no criterion or the same title twice, or a
            field of a criterion is missing, empty or unknown.
    """
    path = project_file(path)
    try:
        entries = plain_yaml.load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"static rubric {path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(entries, list) or not entries:
        found = "an empty list" if entries == [] else type(entries).__name__
        raise ConfigError(f"static rubric {path}: expected a list of criteria, found {found}")
    criteria: list[Criterion] = []
    for number, entry in enumerate(entries, start=1):
        try:
            criterion = _Criterion.model_validate(entry)
        except ValidationError as error:
            problem = error.errors()[0]
            field = next(iter(problem["loc"]), "entry")
            raise ConfigError(f"static rubric {path}: criterion {number}: {field}: {problem['msg']}") from None
        if any(criterion.title.casefold() == other.title.casefold() for other in criteria):
            raise ConfigError(f"static rubric {path}: criterion {number}: the title {criterion.title!r} is given twice")
        criteria.append(Criterion(**criterion.model_dump(), source="static"))
    return tuple(criteria)
