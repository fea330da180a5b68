"""What a user types becomes a configuration, or one clear line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from draco_ray.config.ineffective_keys import check_effective
from draco_ray.config.keys import described_keys, dotted_keys
from draco_ray.config.load import PRESETS, dump_config, load_config, preset_names, setting_names
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


def test_a_preset_may_take_an_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("verifiers:owner/gsm8k@1.2", ["environment.options.taskset.split=test"])
    assert config.environment.options["taskset"] == {"id": "owner/gsm8k@1.2", "split": "test"}
    assert (config.environment.use, config.agent.use) == ("verifiers", "verifiers")
    monkeypatch.chdir(tmp_path)
    assert load_config("verifiers:./a.py").environment.options == {"taskset": {"id": str(tmp_path / "a.py")}}
    # A file of that name is that file.
    (tmp_path / "verifiers:mine").write_text("seed: 9\n")
    assert load_config("verifiers:mine").seed == 9
    # A file may extend the preset, and names the key itself.
    (tmp_path / "child.yaml").write_text("extends: verifiers\nenvironment: {options: {taskset: {id: mine}}}\n")
    assert load_config("child.yaml").environment.options["taskset"] == {"id": "mine"}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("verifiers:", "config 'verifiers:': expected verifiers:TASKSET"),
        ("sandbox:x", "config 'sandbox:x': expected sandbox without an argument"),
        ("verifers:x", "config 'verifers:x': neither a file nor a preset"),
    ],
)
def test_an_argument_that_is_missing_or_too_much_is_said(source: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert str(caught.value).startswith(said)


def test_the_resolved_configuration_reads_back(tmp_path: Path) -> None:
    config = load_config(None, ["judge.extra_body={thinking: true}", "run.name=x"], "random")
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(str(file)) == config
    assert load_config(str(tmp_path)) == config, "a run directory is a source too"


def test_a_setting_that_is_typed_as_a_key_sets_its_keys_and_not_only_its_name() -> None:
    typed, asked = load_config("sandbox", ["setting=no-credit"]), load_config("sandbox", [], "no-credit")
    assert typed == asked
    assert typed.algorithm.rule == "grpo"
    # What else is typed still wins, and other names are only names.
    assert load_config("sandbox", ["setting=no-credit", "algorithm.rule=no_std"]).algorithm.rule == "no_std"
    mine = load_config("sandbox", ["setting=mine"], "no-credit")
    assert (mine.setting, mine.algorithm) == ("mine", asked.algorithm)


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
        ("judge=3", "config key judge: this is a section"),
        # The class of this section belongs to a part outside the core.
        (
            "tau_bench.user.temperatur=1",
            "unknown config key tau_bench.user.temperatur; did you mean tau_bench.user.temp",
        ),
        ("tau_bench.user.temperature=-1", "config key tau_bench.user.temperature: input should be greater than or"),
        ("judge.model", "expected key=value"),
        ("engine.top_p=[", "engine.top_p: value is not YAML"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_unknown_keys_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"modle": {"path": "x"}, "agent": {"promt": "x", "max_turn": 3}, "judge": "lean"})
    assert str(caught.value) == (
        "unknown config key agent.promt; did you mean agent.prompt?; unknown config key agent.max_turn; did you mean "
        "agent.max_turns?; config key judge: this is a section; expected keys below it, found 'lean'; unknown config "
        "key modle; did you mean model?"
    )


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


def test_every_key_has_a_type_a_value_and_a_meaning() -> None:
    keys = {key.name: key for key in described_keys(load_config("sandbox"))}
    assert list(keys) == list(dotted_keys())
    assert [name for name, key in keys.items() if not key.meaning.endswith(".") or "anything" in key.kind] == [
        "environment.options",
        "engine.vllm",
        "judge.extra_body",
        "learner.options",
    ]
    assert (keys["algorithm.group_size"].kind, keys["algorithm.group_size"].default) == ("integer >= 2", "6")
    assert keys["judge.limits.dollars"].kind.startswith("number >= 0 | null")
    assert keys["algorithm.reward"].kind == "rubric | outcome | random"
    assert keys["run.trackers"].kind == "list of tensorboard | wandb | mlflow"
    # What is printed can be typed.
    asked = ["judge.rule_judge.start=false"]
    config = load_config("sandbox", asked)
    for key in described_keys(config):
        assert load_config("sandbox", [*asked, f"{key.name}={key.value}"]) == config


def one_line(source: str | None, overrides: Sequence[str] = (), setting: str | None = None) -> str:
    """What a configuration is refused with."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides, setting)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_file_that_extends_itself_is_refused_with_the_ring(tmp_path: Path, length: int) -> None:
    for index in range(length):
        # The same files by another way each time.
        after = tmp_path / "." / ".." / tmp_path.name / f"{(index + 1) % length}.yaml"
        (tmp_path / f"{index}.yaml").write_text(f"extends: {after}\n")
    line = one_line(str(tmp_path / "0.yaml"))
    assert "extends itself" in line
    assert line.count(" -> ") == length
    (tmp_path / "entry.yaml").write_text(f"extends: {tmp_path / '0.yaml'}\n")
    assert "extends itself" in one_line(str(tmp_path / "entry.yaml"))


def test_one_parent_of_two_is_no_ring(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("seed: 3\n")
    (tmp_path / "b.yaml").write_text(f"extends: {tmp_path / 'a.yaml'}\n")
    (tmp_path / "c.yaml").write_text(f"extends: {tmp_path / 'b.yaml'}\n")
    assert load_config(str(tmp_path / "c.yaml")).seed == 3


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan", "inf", "-Infinity", "nan", "1e999", "NaN"])
@pytest.mark.parametrize("key", ["learner.learning_rate", "judge.limits.dollars", "train.steps", "seed"])
def test_a_number_that_is_none_is_refused(tmp_path: Path, key: str, number: str) -> None:
    assert key in one_line(None, [f"{key}={number}"])
    tree = number
    for part in reversed(key.split(".")):
        tree = f"{{{part}: {tree}}}"
    (tmp_path / "mine.yaml").write_text(tree)
    assert key.rsplit(".", 1)[-1] in one_line(str(tmp_path / "mine.yaml"))


def test_no_number_hides_where_anything_may_stand() -> None:
    assert "judge.extra_body" in one_line(None, ["judge.extra_body={a: [1, .nan]}"])
    assert load_config(None, ["judge.extra_body={a: [1, nan]}"]).judge.extra_body == {"a": [1, "nan"]}


@pytest.mark.parametrize("override", ['run.root="a\\0b"', 'data.root="\\0"', 'judge.extra_body={a: ["\\0"]}'])
def test_a_nul_is_refused_wherever_it_stands(override: str) -> None:
    assert "contains a NUL" in one_line(None, [override])


@pytest.mark.parametrize(
    "name",
    ["..", ".", "../up", "a/../b", "/absolute", "a/b", "a\\b", '""', "' '", '"a\\nb"', '"a\\0b"', "...", "x" * 201],
)
@pytest.mark.parametrize("key", ["run.name", "setting", "data.train_split", "data.eval_split"])
def test_a_name_that_leads_out_of_its_folder_is_refused(key: str, name: str) -> None:
    assert key in one_line(None, [f"{key}={name}"])


@pytest.mark.parametrize("name", ["draco-1", "Größe 3", "a..b", ".hidden", "v1.2"])
def test_other_names_are_fine(name: str) -> None:
    assert load_config(None, [f"run.name={name!r}"]).run.name == name


@pytest.mark.parametrize("name", ["../sandbox", "./draco", "..", "", str(PRESETS / "settings" / "draco")])
def test_a_setting_is_one_that_is_listed(name: str) -> None:
    assert "is unknown" in one_line(None, (), name)


@pytest.mark.parametrize("name", ["../presets/sandbox", "settings/draco", "x" * 5000, "", "\udcff"])
def test_a_preset_is_one_that_is_listed(name: str) -> None:
    assert one_line(name or "./no such")


@pytest.mark.parametrize(
    "text",
    [
        "judge: &a {extra_body: *a}",
        "judge: {extra_body: &a {again: *a}}",
        "judge: {extra_body: &a [*a]}",
        "judge: {extra_body: " + "{a: " * 200 + "1" + "}" * 200 + "}",
        "[" * 5000,
        "a: 2024-13-45",
        "{[1]: 2}",
        "1: 2",
        "null: 2",
        "seed: " + "9" * 5000,
        "judge: {extra_body: {a: &a [" + "x, " * 50 + "], b: &b [" + "*a, " * 50 + "], c: &c [" + "*b, " * 50
        + "], d: &d [" + "*c, " * 50 + "], e: [" + "*d, " * 50 + "]}}",
        "extends: [1]",
        "extends: {a: 1}",
    ],
    ids=range(13),
)  # fmt: skip
def test_yaml_that_no_configuration_is_written_in_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert one_line(str(tmp_path / "mine.yaml"))


def test_a_source_that_is_no_plain_file_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "queue.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "run").mkdir()
    for name in ("queue.yaml", "loop.yaml", "run"):
        assert name in one_line(str(tmp_path / name))


@pytest.mark.parametrize("switch", ["judge.rule_judge.start", "judge.self_judge.enabled"])
def test_a_judge_that_would_not_be_asked_is_not_named_in_vain(switch: str, tmp_path: Path) -> None:
    on = ["judge.rule_judge.start=false", f"{switch}=true"]
    for key in ("judge.model=openai/m", "judge.api_base=http://m/v1", "judge.api_key_env=M"):
        with pytest.raises(ConfigError, match=f"{key} has no effect with {switch}=true; set {switch}=false"):
            load_config("sandbox", [*on, key])
    file = tmp_path / "mine.yaml"
    file.write_text("extends: sandbox\njudge: {model: openai/m}\n")
    with pytest.raises(ConfigError, match="judge.model=openai/m has no effect with judge.rule_judge.start=true"):
        load_config(str(file))
    file.write_text("extends: sandbox\njudge: {model: openai/m, rule_judge: {start: false}}\n")
    # A setting that comes later has another judge, and that is what was asked for.
    assert load_config(str(file), [], "self-judge").judge.self_judge.enabled
    # A file may hold both: `draco config` prints every key.
    whole = load_config("sandbox", on)
    file.write_text(dump_config(whole))
    assert load_config(str(file)) == whole


def test_keys_without_an_effect_are_named_with_the_reason() -> None:
    idle = {"judge": "alone", "judge.limits": "", "judge.limits.dollars": "twice"}
    check_effective("it", ["judge.limits={requests_per_minute: 3}", "seed=1"], ("judge", "seed"), idle)
    for typed, said in (
        ("judge.model=m", "it: judge.model has no effect alone"),
        ("judge.limits={dollars: 3}", "it: judge.limits.dollars has no effect twice"),
        ("train={steps: 3}", "it: train.steps has no effect; this command reads only judge, seed"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_effective("it", [typed], ("judge", "seed"), idle)
