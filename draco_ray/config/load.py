"""Builds a `DracoConfig` from a preset or YAML file, a setting, and ``key=value`` overrides, of which later ones win.

A file may extend another with ``extends: NAME``, or several, of which later ones win. In a file, a text that begins
with ``./`` is a path relative to the file; ``~/``, in a file or an override, is the home directory. Every mistake
is reported in one line with the key, the value found, the value expected, and the most similar key.
"""

from __future__ import annotations

import copy
import difflib
import errno
import functools
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from draco_ray.config import plain_yaml
from draco_ray.config.config_signature import config_edit_problem, is_ours, is_run_directory
from draco_ray.config.keys import dotted_keys, leaves, subtree, value_of
from draco_ray.config.machine import cpu_values
from draco_ray.config.plans import with_plan
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
"""Parent of `prompts/` in an installed package."""
PROJECT = PACKAGE.parent
"""Parent of `prompts/` in a checkout, including editable installs."""
PRESETS = PACKAGE / "config" / "presets"
CONFIG_FILE = "config.yaml"
"""Name of a run directory's configuration."""
MAX_DEPTH = 100
"""Maximum nesting depth of a configuration."""
MAX_VALUES = 100_000
"""Maximum number of values of a configuration."""
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Layer:
    """The keys set by one source; later layers win."""

    tree: Mapping[str, Any]
    theirs: Path | None = None
    """The layer's file, if it is in another user's run directory or is extended by such a file."""


def load_config(
    source: str | Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
    setting: str | None = None,
    *,
    trust: bool = False,
) -> DracoConfig:
    """Build the configuration of a run.

    Args:
        source: a preset's name (see `preset_names`), a YAML file, a run directory, or a nested mapping; None: the
            paper's defaults. If a preset takes an argument, add it after a colon, ``NAME:VALUE``.
        overrides: ``dotted.key=value``; the value is read as YAML.
        setting: a setting's name (see `setting_names`); ``setting=NAME`` in the overrides is the same.
        trust: accept every key even from another user's run directory. Otherwise keys that start a program, send an API
            key or prompts somewhere, weaken the jail or name a place to write must be given as overrides. Reading a run
            needs no trust; acting on its configuration does.

    Raises:
        ConfigError: one line per mistake.
    """
    layers: list[_Layer] = []
    if isinstance(source, Mapping):
        layers.append(_Layer(source))
    elif source is not None:
        source, argument = _argument(source)
        layers += [*_read(source), _Layer(argument)]
    typed: dict[str, Any] = {}
    for words in overrides:
        _merge(typed, parse_override(words))
    if typed.get("setting") in setting_names():
        # A run with this name but without the setting's keys would be mistaken for that setting in every table.
        setting = typed["setting"]
    if setting is not None:
        layers.append(_Layer(_read_setting(setting)))
    layers.append(_Layer(typed))
    tree: dict[str, Any] = {}
    for layer in layers:
        _merge(tree, with_plan(layer.tree))
    tree = _with_paths(tree, "~/", Path(os.path.expanduser("~")))
    try:
        config = DracoConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(problem) for problem in error.errors())) from None
    _check_one_judge(config, layers, typed)
    if not trust:
        _refuse_foreign(config, layers)
    return config


def read_tree(path: Path) -> dict[str, Any]:
    """A YAML file's mapping, with paths that begin with ``./`` resolved.

    Raises:
        ConfigError: it cannot be read, or is not a mapping.
    """
    return _with_paths(_parse(_read_text(path), path), "./", path.parent.resolve())


def preset_names() -> list[str]:
    """Names `load_config` accepts as a source."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def setting_names() -> list[str]:
    """Names `load_config` accepts as a setting."""
    return sorted(path.stem for path in (PRESETS / "settings").glob("*.yaml"))


def dump_config(config: DracoConfig) -> str:
    """The resolved configuration as YAML for `load_config`."""
    return plain_yaml.dump(config.model_dump(mode="json"))


def project_file(path: Path) -> Path:
    """Find a file of the project: in the working directory, else where the project is installed.

    Raises:
        ConfigError: the file is in neither place.
    """
    for candidate in (path, PACKAGE / path, PROJECT / path):
        if candidate.exists():
            return candidate
    raise ConfigError(f"{path}: no such file in {Path.cwd()} or {PACKAGE}")


def _read(source: str, children: tuple[Path, ...] = (), *, named_by_theirs: bool = False) -> list[_Layer]:
    """The layers of a source, preceded by those of the files it extends.

    Files extended by another user's file count as that user's, except presets.
    """
    path = _source_file(source)
    if (real := Path(os.path.realpath(path))) in children:
        ring = " -> ".join(str(each) for each in (*children[children.index(real) :], real))
        raise ConfigError(f"config {path}: extends itself ({ring}); remove one `extends`")
    text = _read_text(path)
    tree = _with_paths(_parse(text, path), "./", path.parent.resolve())
    parents = tree.pop("extends", None) or []
    if path.parent == PRESETS:
        tree.pop("argument", None)
    run = path if path.name == CONFIG_FILE else real
    of_run = Path(source).is_dir() or any(map(is_run_directory, (path.parent, *real.parents)))
    if of_run and run.name == CONFIG_FILE and (problem := config_edit_problem(run.parent, text)) is not None:
        raise ConfigError(f"config {path}: changed since the run wrote it: {problem}")
    ours = run.name == CONFIG_FILE and is_ours(run.parent, text)
    theirs = not ours and (of_run or named_by_theirs) and real.parent != PRESETS
    layers: list[_Layer] = []
    for parent in parents if isinstance(parents, list) else [parents]:
        layers += _read(str(parent), (*children, real), named_by_theirs=theirs)
    if path == PRESETS / "cpu.yaml":
        layers.append(_Layer(cpu_values()))
    return [*layers, _Layer(tree, path if theirs else None)]


def _argument(source: str) -> tuple[str, dict[str, Any]]:
    """Split ``NAME:VALUE`` into the source's name and the tree of keys that its argument sets."""
    name, colon, value = source.partition(":")
    if not colon or name not in preset_names() or os.path.lexists(source):
        return source, {}
    key = _parse(_read_text(PRESETS / f"{name}.yaml"), PRESETS / f"{name}.yaml").get("argument")
    if key is None or not value:
        expected = (
            f"expected {name}:{key.rpartition('.')[0].rpartition('.')[2].upper()}"
            if key
            else f"expected {name} without an argument"
        )
        raise ConfigError(f"config {source!r}: {expected}")
    return name, _nested(key, str(Path.cwd() / value) if value.startswith("./") else value)


def _with_paths(node: Any, begin: str, folder: Path) -> Any:
    """``node`` with every text that begins with ``begin`` turned into a path in ``folder``."""
    if isinstance(node, dict):
        return {key: _with_paths(value, begin, folder) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_paths(value, begin, folder) for value in node]
    return str(folder / node.removeprefix(begin)) if isinstance(node, str) and node.startswith(begin) else node


def _source_file(source: str) -> Path:
    """The configuration file that ``source`` names: a preset's, a run directory's, or ``source`` itself."""
    path = Path(source)
    try:
        if path.is_dir():
            path = path / CONFIG_FILE
        if os.path.lexists(path):
            return path
    except OSError as error:
        raise ConfigError(f"config {source[:100]!r}: {error.strerror}") from None
    if source in preset_names():
        return PRESETS / f"{source}.yaml"
    hint = _nearest(source, preset_names())
    raise ConfigError(f"config {source!r}: neither a file nor a preset ({', '.join(preset_names())}){hint}")


def _node(tree: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key in a tree, or `_ABSENT`."""
    node: Any = tree
    for part in key.split("."):
        node = node.get(part, _ABSENT) if isinstance(node, Mapping) else _ABSENT
    return node


def _last(layers: Sequence[_Layer], key: str) -> int:
    """Index of the last layer that sets a key; -1: none."""
    return max((place for place, each in enumerate(layers) if _node(each.tree, key) is not _ABSENT), default=-1)


def _check_one_judge(config: DracoConfig, layers: Sequence[_Layer], typed: Mapping[str, Any]) -> None:
    """Refuse a judge's model, endpoint or API key that has no effect because a switch selects another judge.

    The switches are ``judge.rule_judge.start`` and ``judge.self_judge.enabled``. Such a setting is refused only if it
    comes from the command line or from a later source than the switch. One file may have both, because `draco config`
    prints every key.
    """
    switches = {"judge.rule_judge.start": config.judge.rule_judge, "judge.self_judge.enabled": config.judge.self_judge}
    for switch in (name for name, part in switches.items() if getattr(part, name.rpartition(".")[2])):
        for key in ("judge.model", "judge.api_base", "judge.api_key_env"):
            if _last(layers, key) > _last(layers, switch) or _node(typed, key) is not _ABSENT:
                raise ConfigError(
                    f"{key}={value_of(config, key)} has no effect with {switch}=true; set {switch}=false or leave "
                    f"{key} out"
                )


def _refuse_foreign(config: DracoConfig, layers: Sequence[_Layer]) -> None:
    foreign: dict[str, Path] = {}
    for layer in layers:
        for key in keys_needing_confirmation():
            if (node := _node(layer.tree, key)) is _ABSENT:
                continue
            # A plain value replaces the other user's value. A mapping is merged, so the other user's entries remain.
            if not isinstance(node, Mapping):
                foreign.pop(key, None)
            if layer.theirs is not None:
                foreign[key] = layer.theirs
    default, marks = DracoConfig(), keys_needing_confirmation()
    named = {
        f"{key}={value}": path
        for key, path in foreign.items()
        if (value := value_of(config, key)) != value_of(default, key) and marks[key] in str(value)
    }
    if named:
        raise ConfigError(
            f"{next(iter(named.values()))}: a run directory that somebody else made sets {', '.join(named)}; check "
            "these values, then set the keys yourself (KEY=VALUE) or add --trust"
        )


def _read_setting(name: str) -> dict[str, Any]:
    if name not in setting_names():
        hint = _nearest(name, setting_names())
        raise ConfigError(f"setting {name!r} is unknown; expected one of {', '.join(setting_names())}{hint}")
    path = PRESETS / "settings" / f"{name}.yaml"
    return _parse(_read_text(path), path)


def _read_text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "not a regular file")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: cannot be read: {' '.join(str(error).split())}") from None


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        tree = plain_yaml.load(text) or {}
        _check_values(tree, str(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"config {path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config {path}: expected a mapping of keys, found {type(tree).__name__}")
    return tree


def _check_values(tree: Any, where: str) -> None:
    """Refuse values that no key allows or YAML cannot hold: inf, nan, NUL, lone surrogates, cycles, huge trees."""
    seen, left = 0, [("", 0, tree)]
    while left:
        key, depth, node = left.pop()
        seen += 1
        # Values repeated by YAML aliases are counted each time.
        if depth > MAX_DEPTH or seen > MAX_VALUES:
            raise ConfigError(
                f"config {where}{key}: contains itself, is nested more than {MAX_DEPTH} levels deep, or has more than "
                f"{MAX_VALUES} values"
            )
        if isinstance(node, dict | list):
            items = node.items() if isinstance(node, dict) else enumerate(node)
            left += [(f"{key[:200]}: {name}", depth + 1, value) for name, value in items]
        elif isinstance(node, float) and not math.isfinite(node):
            raise ConfigError(f"config {where}{key}: expected a finite number, found {node}")
        elif isinstance(node, str) and re.search("[\0\ud800-\udfff]", node):
            raise ConfigError(
                f"config {where}{key}: {node[:100]!a} contains a NUL character or half of a character (a lone "
                "surrogate), which is not allowed"
            )


def parse_override(text: str) -> dict[str, Any]:
    """The configuration tree that one ``KEY=VALUE`` sets. Raises: ConfigError."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip() or not value.strip():
        raise ConfigError(
            f"override {text!r}: expected key=value, e.g. learner.learning_rate=1e-4 or data.eval_tasks=null"
        )
    try:
        leaf = plain_yaml.load(value)
        _check_values(leaf, f"key {key}")
    except yaml.YAMLError as error:
        raise ConfigError(f"override {key}: value is not YAML: {' '.join(str(error).split())}") from None
    return _nested(key.strip(), leaf)


def _nested(key: str, leaf: Any) -> dict[str, Any]:
    """The nested mapping with one leaf, at a dotted key."""
    tree: Any = leaf
    for part in reversed(key.split(".")):
        tree = {part: tree}
    nested: dict[str, Any] = tree
    return nested


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)


@functools.cache
def keys_needing_confirmation() -> dict[str, str]:
    """Keys that the user must confirm if another user's run directory sets them: dotted key -> text.

    A value needs confirmation only if it contains the text; an empty text means any value.
    """
    marks = {key: field.json_schema_extra for key, field in leaves()}
    return {
        key: str(mark["confirmed"]) for key, mark in marks.items() if isinstance(mark, dict) and "confirmed" in mark
    }


def _nearest_key(prefix: str, key: str) -> str:
    """A hint with the most similar key: a sibling, else a similar leaf elsewhere in the tree."""
    keys = dotted_keys() + [name for name in DracoConfig.model_fields if subtree(DracoConfig.model_fields[name])]
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
        # The error concerns several keys, which the message names.
        return f"config: {problem['ctx']['error']}"
    *above, name = map(str, problem["loc"])
    prefix = "".join(f"{part}." for part in above)
    if problem["type"] == "extra_forbidden":
        return f"unknown config key {prefix}{name}{_nearest_key(prefix, name)}"
    if problem["type"] == "model_type":
        return f"config key {prefix}{name}: this is a section; expected keys below it, found {problem['input']!r}"
    return f"config key {prefix}{name}: {problem['msg'][:1].lower()}{problem['msg'][1:]}, found {problem['input']!r}"
