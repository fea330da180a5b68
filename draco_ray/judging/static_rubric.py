"""A rubric that is the same for every task: the settings without dynamic rubrics score against it."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draco_ray.config import plain_yaml
from draco_ray.config.load import project_file
from draco_ray.errors import ConfigError
from draco_ray.records import Criterion


class _Criterion(BaseModel):
    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)

    title: str = Field(min_length=1)
    description: str = Field(min_length=1)
    evaluator_instruction: str = Field(min_length=1)


def load_static_rubric(path: Path) -> tuple[Criterion, ...]:
    """Read a YAML list of criteria, in its order (found as `project_file` does).

    Raises:
        ConfigError: not such a list, a field missing, empty or unknown, no criterion, or a title twice.
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
            raise ConfigError(f"static rubric {path}: criterion {number}: the title {criterion.title!r} comes twice")
        criteria.append(
            Criterion(
                title=criterion.title,
                description=criterion.description,
                evaluator_instruction=criterion.evaluator_instruction,
                source="static",
            )
        )
    return tuple(criteria)
