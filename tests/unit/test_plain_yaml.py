"""YAML values are what they look like, to us and to readers of YAML 1.1."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from draco_ray.config import plain_yaml
from draco_ray.config.load import load_config
from draco_ray.errors import ConfigError
from draco_ray.judging.prompts import load_static_rubric
from draco_ray.traces.mapping import load_mapping


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12:30:45", "12:30:45"),
        ("010", 10),
        ("+5", 5),
        ("-0", 0),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("5e-5", 5e-5),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        (".inf", math.inf),
        ("1e5x", "1e5x"),
        ("on", "on"),
        ("No", "No"),
        ("TRUE", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("2026-11-24", "2026-11-24"),
        ("=", "="),
    ],
)
def test_a_value_is_what_it_looks_like(text: str, value: object) -> None:
    read = plain_yaml.load(f"a: {text}")["a"]
    assert (read, type(read)) == (value, type(value))


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.from_regex(r"[-+.eE0-9:_x]+")
)
WORDS = st.sampled_from(
    ["on", "No", "y", "010", "0o7", "1e5", "12:30", "2026-11-24", "null", "~", "<<", "=", ".inf", "1_0"]
)


@given(st.recursive(LEAVES | WORDS, lambda inner: st.lists(inner) | st.dictionaries(st.text() | WORDS, inner)))
def test_what_is_written_is_read_back_in_both_versions(value: Any) -> None:
    text = plain_yaml.dump(value)
    assert plain_yaml.load(text) == yaml.safe_load(text) == value


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3", "x: {a: 1, a: 1}", "- a: 1\n  'a': 2"])
def test_a_key_that_comes_twice_is_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="the key 'a' is given twice"):
        plain_yaml.load(text)


def test_a_merged_mapping_may_be_overridden() -> None:
    text = "one: &one {a: 1, b: 2}\ntwo: &two {<<: *one, b: 3}\nthree: {<<: *two, a: 4}"
    assert plain_yaml.load(text)["three"] == {"a": 4, "b": 3}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "learner.learning_rate=true",
            "config key learner.learning_rate: true and false are not allowed here, found True",
        ),
        ("train.steps=no", "config key train.steps: input should be a valid integer"),
        ("train.steps=False", "config key train.steps: true and false are not allowed here, found False"),
        ("train.steps=12:30:45", "config key train.steps: input should be a valid integer"),
        ("judge={model: a, model: b}", "override judge: value is not YAML: the key 'model' is given twice"),
    ],
)
def test_no_configuration_takes_a_value_for_another(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as problem:
        load_config(overrides=[override])
    assert str(problem.value).startswith(said)
    assert "\n" not in str(problem.value)


def test_text_stays_text_and_truth_has_its_usual_words() -> None:
    config = load_config(
        overrides=["judge.model=on", "run.name=2026-11-24", "judge.structured_output=off", "train.steps=010"]
    )
    assert (config.judge.model, config.run.name, config.train.steps) == ("on", "2026-11-24", 10)
    assert config.judge.structured_output is False


@pytest.mark.parametrize(
    "text", ["[" * 5000, "1" * 5000, "!!int 0x1", "!!float x", "a: 1\na: 2", "\0", "2026-13-99"], ids=len
)
def test_whatever_a_file_holds_its_reader_fails_in_one_line_that_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text, encoding="utf-8")
    readers = (load_static_rubric, load_mapping, lambda path: load_config(str(path)))
    for read in readers:
        with pytest.raises(ConfigError) as problem:
            read(path)
        assert str(path) in str(problem.value)
        assert "\n" not in str(problem.value)
    with pytest.raises(ConfigError):
        load_config(overrides=[f"judge={text}"])
