"""What a user types becomes a configuration, or one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from draco_ray.config.load import dotted_keys, dump_config, load_config, preset_names, setting_names
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ConfigError


def test_the_defaults_are_a_valid_configuration() -> None:
    assert load_config() == DracoConfig()


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("learner: {learning_rate: 0.1, lora_rank: 4}\nalgorithm: {rule: draco}\n")
    config = load_config(str(file), ["learner.learning_rate=5e-5"], "no-credit")
    assert config.learner.learning_rate == 5e-5, "YAML 1.1 would read 5e-5 as text"
    assert config.learner.lora_rank == 4
    assert config.algorithm.rule == "grpo"
    assert config.setting == "no-credit"


def test_a_file_can_extend_a_preset_or_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 3\ntrain: {epochs: 2, prompts_per_step: 4}\n")
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {tmp_path / 'base.yaml'}\ntrain: {{epochs: 7}}\n")
    config = load_config(str(child))
    assert (config.seed, config.train.epochs, config.train.prompts_per_step) == (3, 7, 4)


def test_the_resolved_configuration_reads_back(tmp_path: Path) -> None:
    config = load_config(None, ["judge.extra_body={thinking: true}", "run.name=x"], "random")
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(str(file)) == config
    assert load_config(str(tmp_path)) == config, "a run directory is a source too"


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("setting", [None, *setting_names()])
def test_every_preset_loads_with_every_setting(name: str, setting: str | None) -> None:
    config = load_config(name, [], setting)
    assert setting is None or config.setting == setting


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learner.leraning_rate=1", "unknown config key learner.leraning_rate; did you mean learner.learning_rate?"),
        ("lerner.workers=1", "unknown config key lerner; did you mean learner?"),
        ("group_size=6", "did you mean algorithm.group_size?"),
        ("algorithm.group_size=1", "algorithm.group_size: input should be greater than or equal to 2, found 1"),
        ("algorithm.reward=gold", "algorithm.reward"),
        ("judge=3", "config key judge: is a section"),
        ("judge.model", "expected key=value"),
        ("engine.top_p=[", "engine.top_p: value is not YAML"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "setting", "expected"),
    [
        ("no-such-preset", None, "neither a file nor a preset"),
        (None, "drako", "did you mean draco?"),
    ],
)
def test_an_unknown_name_lists_what_there_is(source: str | None, setting: str | None, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected.replace("?", r"\?")):
        load_config(source, [], setting)


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match="expected a mapping"):
        load_config(str(file))


def test_every_key_has_a_dotted_name() -> None:
    keys = list(dotted_keys())
    assert "judge.rule_judge.start" in keys
    assert len(keys) == len(set(keys))
