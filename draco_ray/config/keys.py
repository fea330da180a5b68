"""Describes every key of the configuration: type, value and meaning."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from draco_ray.config import plain_yaml
from draco_ray.config.schema import ConfigSection, DracoConfig

_WORDS = {str: "text", int: "integer", float: "number", bool: "true | false", Path: "path", type(None): "null"}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True, slots=True)
class Key:
    """A key as shown to users."""

    name: str
    """The dotted key."""
    kind: str
    """Allowed values in words: ``integer >= 1``, ``auto | on | off``."""
    value: str
    """The key's value, as YAML on one line."""
    default: str
    """The default as YAML."""
    meaning: str


def subtree(field: FieldInfo) -> type[ConfigSection] | None:
    """The part of the configuration below a field; None if the field is a leaf."""
    # A section outside the core is declared as a ConfigSection; its default value has the section's own class.
    annotation = (
        type(field.get_default(call_default_factory=True)) if field.annotation is ConfigSection else field.annotation
    )
    return annotation if isinstance(annotation, type) and issubclass(annotation, ConfigSection) else None


def leaves(model: type[ConfigSection] = DracoConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every leaf key of the configuration, dotted, with its field, in order of declaration."""
    for name, field in model.model_fields.items():
        if (below := subtree(field)) is None:
            yield prefix + name, field
        else:
            yield from leaves(below, f"{prefix}{name}.")


def dotted_keys() -> list[str]:
    """Every leaf key of the configuration, in order of declaration."""
    return [key for key, _ in leaves()]


def value_of(config: ConfigSection, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(getattr, key.split("."), config)


def flat(tree: Mapping[str, Any], prefix: str = "", by: str = ".") -> Iterator[tuple[str, Any]]:
    """Keys of a nested mapping, joined by ``by``, and their values; an empty mapping is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}{by}", by)
        else:
            yield f"{prefix}{key}", value


def described_keys(config: DracoConfig) -> Iterator[Key]:
    """The leaf keys of a configuration in order of declaration."""
    values, defaults = (each.model_dump(mode="json") for each in (config, DracoConfig()))
    for key, field in leaves():
        path = key.split(".")
        yield Key(
            name=key,
            kind=describe_allowed_values(field),
            value=_yaml(functools.reduce(operator.getitem, path, values)),
            default=_yaml(functools.reduce(operator.getitem, path, defaults)),
            meaning=" ".join((field.description or "").split()),
        )


def describe_allowed_values(field: FieldInfo) -> str:
    """Allowed values of a field in words."""
    bounds = [
        f"{sign} {getattr(bound, name)}"
        for bound in field.metadata
        for name, sign in _BOUNDS.items()
        if hasattr(bound, name)
    ]
    # Bounds apply to the number, not to null.
    number, null, rest = _words(field.annotation).partition(" | null")
    return " ".join([number, *bounds]) + null + rest


def _words(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(parts[0])
    if origin is Literal:
        return " | ".join(map(str, parts))
    if origin in (Union, types.UnionType):
        return " | ".join(map(_words, parts))
    if origin is tuple:
        return f"list of {_words(parts[0])}"
    if origin is dict:
        return f"mapping to {_words(parts[1])}"
    if annotation in _WORDS:
        return _WORDS[annotation]
    return "mapping" if isinstance(annotation, type) and issubclass(annotation, ConfigSection) else "anything"


def _yaml(value: Any) -> str:
    text = plain_yaml.dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
