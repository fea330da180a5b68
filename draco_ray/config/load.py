"""From what the user typed to a `DracoConfig`: preset or YAML file, then a setting, then ``key=value`` overrides.

Later ones win. A config file may start from another with ``extends: NAME``. Every mistake becomes one line that names
the key, what was found, what is expected, and the nearest right key.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from draco_ray.config.schema import DracoConfig, Tree
from draco_ray.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
"""Where `prompts/` lies once the package is installed."""
PROJECT = PACKAGE.parent
"""Where it lies in a checkout, an editable install included."""
PRESETS = PACKAGE / "config" / "presets"


def load_config(source: str | None = None, overrides: Iterable[str] = (), setting: str | None = None) -> DracoConfig:
    """Build the configuration of a run.

    Args:
        source: a preset's name (see `preset_names`), a YAML file, or a run directory; None is the paper's defaults.
        overrides: ``dotted.key=value``; the value is read as YAML.
        setting: a setting's name (see `setting_names`).

    Raises:
        ConfigError: one line per mistake.
    """
    tree: dict[str, Any] = {}
    if source is not None:
        _merge(tree, _read(source))
    if setting is not None:
        _merge(tree, _read_setting(setting))
    for override in overrides:
        _merge(tree, _parse_override(override))
    _check_keys(tree)
    try:
        return DracoConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(problem) for problem in error.errors())) from None


def preset_names() -> list[str]:
    """Names `load_config` accepts as a source."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def setting_names() -> list[str]:
    """Names `load_config` accepts as a setting."""
    return sorted(path.stem for path in (PRESETS / "settings").glob("*.yaml"))


def dump_config(config: DracoConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def project_file(path: Path) -> Path:
    """Find a file that ships with the project: in the working directory, else where the project is installed.

    Raises:
        ConfigError: if it is in neither place.
    """
    for candidate in (path, PACKAGE / path, PROJECT / path):
        if candidate.exists():
            return candidate
    raise ConfigError(f"{path}: no such file in {Path.cwd()} or {PACKAGE}")


def _read(source: str) -> dict[str, Any]:
    preset = PRESETS / f"{source}.yaml"
    path = Path(source)
    if path.is_dir():
        path = path / "config.yaml"
    if not path.is_file():
        if not preset.is_file():
            hint = _nearest(source, preset_names())
            raise ConfigError(f"config {source!r}: neither a file nor a preset ({', '.join(preset_names())}){hint}")
        path = preset
    tree = _read_yaml(path)
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    base = _read(str(parent))
    _merge(base, tree)
    return base


def _read_setting(name: str) -> dict[str, Any]:
    path = PRESETS / "settings" / f"{name}.yaml"
    if not path.is_file():
        hint = _nearest(name, setting_names())
        raise ConfigError(f"setting {name!r} is unknown; expected one of {', '.join(setting_names())}{hint}")
    return _read_yaml(path)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config {path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config {path}: expected a mapping of keys, found {type(tree).__name__}")
    return tree


def _parse_override(text: str) -> dict[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"override {text!r}: expected key=value, e.g. learner.learning_rate=1e-4")
    try:
        leaf = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {key}: value is not YAML: {' '.join(str(error).split())}") from None
    if isinstance(leaf, str) and (number := _as_number(leaf)) is not None:
        leaf = number
    tree: Any = leaf
    for part in reversed(key.strip().split(".")):
        tree = {part: tree}
    return tree


def _as_number(text: str) -> float | None:
    """YAML 1.1 reads 5e-5 as a string; people mean the number."""
    try:
        return float(text)
    except ValueError:
        return None


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _subtree(model: type[Tree], key: str) -> type[Tree] | None:
    annotation = model.model_fields[key].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Tree) else None


def dotted_keys(model: type[Tree] = DracoConfig, prefix: str = "") -> Iterator[str]:
    """Every leaf key of the configuration, dotted, in the order it is declared."""
    for key in model.model_fields:
        below = _subtree(model, key)
        if below is None:
            yield prefix + key
        else:
            yield from dotted_keys(below, f"{prefix}{key}.")


def _check_keys(tree: Mapping[str, Any], model: type[Tree] = DracoConfig, prefix: str = "") -> None:
    for key, value in tree.items():
        if key not in model.model_fields:
            raise ConfigError(f"unknown config key {prefix}{key}{_nearest_key(prefix, key)}")
        below = _subtree(model, key)
        if below is not None and not isinstance(value, Mapping):
            raise ConfigError(f"config key {prefix}{key}: is a section, expected keys below it, found {value!r}")
        if below is not None:
            _check_keys(value, below, f"{prefix}{key}.")


def _nearest_key(prefix: str, key: str) -> str:
    """The most similar key, a sibling if one is close, else the same leaf name elsewhere in the tree."""
    keys = list(dotted_keys()) + [name for name in DracoConfig.model_fields if _subtree(DracoConfig, name)]
    siblings = {name.removeprefix(prefix).split(".")[0] for name in keys if name.startswith(prefix)}
    close = difflib.get_close_matches(key, sorted(siblings), n=1, cutoff=0.6)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    leaves = {name.rsplit(".", 1)[-1]: name for name in keys}
    close = difflib.get_close_matches(key, list(leaves), n=1, cutoff=0.6)
    return f"; did you mean {leaves[close[0]]}?" if close else "; `draco config` lists them all"


def _nearest(word: str, among: list[str]) -> str:
    close = difflib.get_close_matches(word, among, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _describe(problem: Mapping[str, Any]) -> str:
    if not problem["loc"]:
        # Of several keys together, which the message names.
        return f"config: {problem['ctx']['error']}"
    key = ".".join(str(part) for part in problem["loc"])
    return f"config key {key}: {problem['msg'][:1].lower()}{problem['msg'][1:]}, found {problem['input']!r}"
