"""Describes every key of the configuration: type, value and meaning."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from draco_ray.config import plain_yaml
from draco_ray.config.schema import DracoConfig, Tree

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


def subtree(field: FieldInfo) -> type[Tree] | None:
    """The part of the configuration below a field; None if the field is a leaf."""
    # A section outside the core is declared as a Tree; its default value has the section's own class.
    annotation = type(field.get_default(call_default_factory=True)) if field.annotation is Tree else field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Tree) else None


def dotted_keys(model: type[Tree] = DracoConfig, prefix: str = "") -> Iterator[str]:
    """Every leaf key of the configuration, dotted, in order of declaration."""
    for key, field in model.model_fields.items():
        below = subtree(field)
        if below is None:
            yield prefix + key
        else:
            yield from dotted_keys(below, f"{prefix}{key}.")


def described_keys(config: Tree, prefix: str = "") -> Iterator[Key]:
    """The leaf keys of a configuration in order of declaration."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if subtree(field) is not None:
            yield from described_keys(value, f"{prefix}{name}.")
            continue
        yield Key(
            name=prefix + name,
            kind=kind(field),
            value=_yaml(value),
            default=_yaml(field.get_default(call_default_factory=True)),
            meaning=" ".join((field.description or "").split()),
        )


def kind(field: FieldInfo) -> str:
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
    return "mapping" if isinstance(annotation, type) and issubclass(annotation, Tree) else "anything"


def _yaml(value: Any) -> str:
    text = plain_yaml.dump(_plain(value), default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    if isinstance(value, Tree):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {key: _plain(below) for key, below in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
