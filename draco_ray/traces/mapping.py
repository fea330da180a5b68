"""Mappings: small YAML files that describe records of an unknown format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draco_ray.config import plain_yaml
from draco_ray.errors import ConfigError
from draco_ray.traces.entry import BadTrace, Entry, json_type_name
from draco_ray.traces.formats import Format, ReadOptions, build_trace, number, path_value
from draco_ray.traces.messages import entries
from draco_ray.traces.model import Trace, escape_surrogates, printable_id


class FieldMapping(BaseModel):
    """Dotted paths into a record, such as ``run.messages`` or ``choices.0.text``."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    messages: str
    """The conversation: its messages are in a known dialect, or have the field names that the keys below give."""
    records: str | None = None
    """Path to the records in a JSON document; by default the document is a record or a list of records."""
    task_id: str | None = None
    trace_id: str | None = None
    instruction: str | None = None
    """The agent's task, if the conversation does not contain it."""
    system: str | None = None
    tools: str | None = None
    outcome: str | None = None
    """The trace's own reward; it is stored beside the judge's reward and never shown to a judge."""
    role: str | None = None
    """Within a message: the speaker."""
    content: str | None = None
    """Within a message: the text."""
    tool_calls: str | None = None
    """Within a message: the tool calls."""
    roles: dict[str, str] = Field(default_factory=dict)
    """Role names in the records -> system, user, assistant or tool."""
    action_pattern: str | None = None
    """For code agents: a regular expression whose first group is the code that was run."""


def load_mapping(path: Path) -> FieldMapping:
    """Read a mapping file.

    Raises:
        ConfigError: the file cannot be read, has an unknown key, or has no key ``messages``.
    """
    try:
        tree = plain_yaml.load(path.read_text(encoding="utf-8"))
        if not isinstance(tree, Mapping):
            raise ConfigError(
                f"mapping {path}: expected keys such as `messages: run.messages`, found {json_type_name(tree)}"
            )
        mapped = FieldMapping.model_validate(dict(tree))
        if mapped.action_pattern is not None and re.compile(mapped.action_pattern).groups < 1:
            raise ConfigError(f"mapping {path}: action_pattern: expected a group, ( ), around the code that is run")
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        known = ", ".join(FieldMapping.model_fields)
        raise ConfigError(f"mapping {path}: {where}: {problem['msg']}; keys are {known}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, re.error) as error:
        raise ConfigError(f"mapping {path}: cannot be read: {' '.join(str(error).split())}") from None
    return mapped


def mapped_format(mapped: FieldMapping) -> Format:
    """The format that a mapping describes."""
    return Format(
        name="mapped",
        shape=f'an object with the conversation at "{mapped.messages}"',
        recognises=lambda record: path_value(record, mapped.messages) is not None,
        read=_reader(mapped),
    )


def _reader(mapped: FieldMapping) -> Callable[[Any, ReadOptions], Iterator[Trace]]:
    def text(record: object, path: str | None) -> str:
        value = None if path is None else path_value(record, path)
        return value if isinstance(value, str) else "" if value is None else str(value)

    def read(record: Any, reading: ReadOptions) -> Iterator[Trace]:
        messages = path_value(record, mapped.messages)
        if messages is None:
            raise BadTrace(f'nothing at "{mapped.messages}", where the mapping expects the messages')
        said = entries(_renamed(messages, mapped))
        if system := text(record, mapped.system):
            said = [Entry(role="system", text=escape_surrogates(system)), *said]
        yield build_trace(
            said,
            record,
            reading,
            task_id=printable_id(text(record, mapped.task_id)),
            trace_id=printable_id(text(record, mapped.trace_id)),
            instruction=escape_surrogates(text(record, mapped.instruction)) or None,
            tools=None if mapped.tools is None else path_value(record, mapped.tools),
            outcome=None if mapped.outcome is None else number(path_value(record, mapped.outcome)),
        )

    return read


def _renamed(messages: object, mapped: FieldMapping) -> object:
    own = {"role": mapped.role, "content": mapped.content, "tool_calls": mapped.tool_calls}
    if not isinstance(messages, list) or not (any(own.values()) or mapped.roles):
        return messages
    found = []
    for message in messages:
        if not isinstance(message, Mapping):
            return messages
        renamed = {**message, **{name: path_value(message, path) for name, path in own.items() if path is not None}}
        said_by = renamed.get("role")
        found.append({**renamed, "role": mapped.roles.get(str(said_by), said_by)})
    return found
