"""YAML with only obvious scalars: decimal numbers, true, false, null; everything else is text.

PyYAML reads YAML 1.1, where ``12:30:45`` is 45045, ``010`` is 8, ``on`` is true and ``5e-5`` is text, and duplicate
keys are accepted. This module and PyYAML read this module's output alike.
"""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_PLAIN = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+", list("-+0123456789")),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": ("<<", ["<"]),
}


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Like PyYAML's method, but refuses duplicate keys."""
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (name := (key.tag, key.value)) in seen:
                    problem = f"the key {key.value!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(name)
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Read as decimal, even with leading zeros."""
        return int(self.construct_scalar(node))


class _Dumper(yaml.SafeDumper):
    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Quote a text with characters that PyYAML takes for line breaks."""
        style = '"' if re.search("[\x85\u2028\u2029]", data) else None
        return self.represent_scalar(f"{_TAG}str", data, style=style)


_Loader.yaml_implicit_resolvers = {}
for _kind, (_pattern, _first) in _PLAIN.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _kind, re.compile(rf"(?:{_pattern})\Z"), _first)
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)
_Dumper.add_representer(str, _Dumper.represent_str)


@functools.lru_cache(maxsize=32)
def _read(text: str) -> Any:
    """Parse a document; cached, because a command reads its run's configuration several times."""
    return yaml.load(text, _Loader)


def load(text: str) -> Any:
    """The document's value.

    Raises:
        yaml.YAMLError: it is invalid, has a duplicate key, or is nested too deeply.
    """
    try:
        # A copy, because callers modify it.
        return copy.deepcopy(_read(text))
    except RecursionError:
        raise yaml.YAMLError("the document is nested too deeply") from None
    except ValueError as error:
        raise yaml.YAMLError(str(error)) from None


def dump(value: Any, **style: Any) -> str:
    """``value`` as YAML for `load` and any YAML 1.1 reader; ``style``: see ``yaml.dump``."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **style)
