"""What is typed has an effect, or is refused in one line: options and keys of every command but `draco judge`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draco_ray.benchmarks.tau.config import TauBenchConfig
from draco_ray.cli import main
from draco_ray.commands.eval_set import parse_set
from draco_ray.commands.evaluate import EvaluateOptions, check_options, find_policy_and_config
from draco_ray.commands.tau import check_overrides as check_tau
from draco_ray.commands.tau import policy_and_config
from draco_ray.config.ineffective_keys import check_training_keys
from draco_ray.config.load import load_config
from draco_ray.errors import ConfigError
from draco_ray.lab.analysis.judges import OWN_JUDGE, NamedJudge, judge_config, open_completer
from draco_ray.lab.evaluation.judged import judge_policy
from draco_ray.traces.load import load_traces


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan sandbox --seed 0", "--seed: no effect without --simulate RUN"),
        ("plan --simulate RUN --gpu-memory-gib 80", "--gpu-memory-gib: no effect with --simulate RUN"),
        ("plan --simulate RUN --setting static --assume x=1", "--setting, --assume: no effect with --simulate RUN"),
        ("replay RUN --api-base http://x", "--api-base: no effect without --judge MODEL"),
        ("replay RUN --judge a/b --rule draco", "--rule: no effect with --judge"),
        ("replay RUN --judge rules --api-base http://x", "judge rules: runs in this process; leave out endpoint"),
        ("attribution-bench --api-key-env K", "judge rules: runs in this process"),
        ("tables RUN --out OUT --format text", "--format: no effect with --out"),
        ("sft sandbox FILE --best 1", "--best: no effect with demonstrations"),
        ("sft sandbox FILE judge.model=m judge.rule_judge.start=false", "judge.model has no effect"),
        ("sft sandbox FILE --new model.path=m", "model.path has no effect with --new"),
        ("sft sandbox FILE learner.kl_coefficient=1", "learner.kl_coefficient has no effect in supervised fine-tuning"),
        ("evaluate --policy starter --every 1", "--every needs --train-curve"),
        ("reevaluate RUN judge.max_tokens=999", "judge.max_tokens has no effect"),
        (
            "rubric author sandbox --out OUT algorithm.group_size=3",
            "algorithm.group_size has no effect here; use --rollouts",
        ),
        ("rubric author sandbox --out OUT train.steps=3", "train.steps has no effect"),
        ("tau check sandbox train.steps=3", "train.steps has no effect"),
        ("eval-set SET --out OUT train.steps=3", "train.steps has no effect"),
        ("eval-set SET --out OUT tau_bench.trials=1", "no effect together with runs"),
        ("train sandbox train.epochs=3", "train.epochs has no effect with train.steps=10"),
        ("train sandbox tau_bench.trials=3", "tau_bench.trials has no effect"),
    ],
)
def test_an_option_without_an_effect_is_refused(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "labels.jsonl").touch()
    (tmp_path / "set.yaml").write_text("settings: {A: starter}\nsplits: dev\nruns: 2\n", encoding="utf-8")
    places = {"RUN": tmp_path / "run", "OUT": tmp_path / "out", "FILE": tmp_path / "labels.jsonl"}
    places["SET"] = tmp_path / "set.yaml"
    with pytest.raises(SystemExit, match="2"):
        main([str(places.get(word, word)) for word in words.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ("write-back", "Missing DIR, --to, --url."),
        ("write-back judged", "Missing --to, --url."),
        ("write-back judged --to otlp", "Missing option '--url'."),
        ("rubric author", "Missing config, --out."),
    ],
)
def test_all_that_is_missing_is_named_at_once(words: str, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert missing in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["judge", "traces", "--judge", ""], "an argument after --judge is empty"),
        (["judge", "traces", "--api-base="], "--api-base= is empty"),
        (["judge", "", "--judge", "rules"], "an argument after judge is empty"),
        (["config", "sandbox", "judge.api_base="], "override 'judge.api_base=': expected key=value"),
        (
            ["config", "sandbox", "judge.rule_judge.start=false", "judge.api_base=''"],
            "key judge.api_base: string should",
        ),
        (["judge", "traces", "--judge", "rules", "--out", "x", "--release"], "--release: no effect with --judge rules"),
        (["evaluate", "--policy", "litellm:a/b", "--api-temperature", "nan"], "Invalid value for '--api-temperature'"),
        (["sandbox", "build", "--scenarios", "0"], "Invalid value for '--scenarios'"),
        (["config", "sandbox", "ray.address=''"], "key ray.address: string should"),
    ],
)
def test_an_empty_value_as_from_an_unset_variable_or_one_beyond_its_range_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert said in capsys.readouterr().err


def test_the_home_directory_is_found_after_an_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config({"run": {"root": "~/runs"}}, ["judge.cache=~/c"]).run.root == tmp_path / "runs"
    with pytest.raises(SystemExit, match="2"):
        main(["judge", "examples/traces", "--judge", "rules", "--rubric=~/none.yaml", "--dry-run"])
    assert f"{tmp_path}/none.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("algorithm.static_rubric=r.yaml", "without algorithm.rubric=static"),
        ("judge.self_judge.thinking=false", "without judge.self_judge.enabled=true"),
        ("judge.local.replicas=2", "without judge.local.enabled=true"),
        ("judge.strong={model: m}", "without judge.jury"),
        ("judge.max_examples=3", "without judge.examples"),
        ("agent.command=x", "without agent.use=command"),
        ("environment.idle_seconds=3", "without environment.min_slots"),
        ("train.keep_best=3", "without train.keep_last"),
        ("learner.mask_level=sequence", "without learner.mask_low or learner.mask_high"),
        ("run.local=here", "unless run.root is an object store"),
    ],
)
def test_a_key_of_training_that_another_switches_off_is_refused(key: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"train: {key.partition('=')[0]} has no effect {reason}"):
        check_training_keys([key], load_config("sandbox", [key]))


def test_keys_that_are_on_are_taken() -> None:
    for typed, setting in (
        (["train.steps=null", "train.epochs=3"], None),
        (["judge.rule_judge.false_pass=0.1", "judge.workers=1"], "outcome"),
        (["judge.self_judge.thinking=false"], "self-judge"),
        (["algorithm.static_rubric=r.yaml"], "static"),
        (["train.keep_last=2", "train.keep_every=3"], None),
    ):
        check_training_keys(typed, load_config("sandbox", typed, setting))


def options(policy: str, *overrides: str, **changes: object) -> EvaluateOptions:
    fields = dict.fromkeys(("run", "last_epochs", "every", "split", "runs", "config", "out", "label"))
    api = dict.fromkeys(("api_base", "api_key_env", "api_temperature"))
    told = {**fields, **api, "train_curve": False, "policy": policy, "overrides": overrides, **changes}
    return EvaluateOptions(**told)  # type: ignore[arg-type]


def test_trials_that_were_typed_are_played(tmp_path: Path) -> None:
    def trials(*words: str, runs: int | None = None) -> int:
        return TauBenchConfig.of(policy_and_config(options("litellm:a/b", *words, runs=runs), tmp_path)[1]).trials

    assert (trials(), trials("tau_bench.trials=1"), trials(runs=2)) == (3, 1, 2)


@pytest.mark.parametrize(
    ("policy", "typed", "changes", "said"),
    [
        ("starter", [], {"api_base": "http://x"}, "--api-base: works only with an API model"),
        ("starter", [], {"api_temperature": 0.0}, "--api-temperature: works only with an API model"),
        ("starter", ["model={path: m}"], {}, "--policy starter and model.path both name the model"),
        (
            "starter",
            ["judge.max_tokens=999"],
            {},
            "judge.max_tokens has no effect because the environment has its own evaluator",
        ),
        ("starter", ["data.eval_split=dev"], {"split": "train"}, "data.eval_split has no effect together with --split"),
        ("litellm:a/b", ["engine.temperature=0"], {}, "engine.temperature has no effect for an API model"),
        ("litellm:a/b", ["judge.temperature=0"], {}, "for an API model; use --api-temperature"),
    ],
)
def test_what_an_evaluation_would_ignore_is_refused(
    policy: str, typed: list[str], changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    asked = options(policy, *typed, **changes)
    with pytest.raises(ConfigError, match=said):
        check_options(asked, *find_policy_and_config(asked, tmp_path), judged=False)


def test_what_an_evaluation_takes_is_taken(tmp_path: Path) -> None:
    typed = ["judge.limits.dollars=3", "judge.prices={b: {input: 1, output: 1}}", "agent.max_turns=3", "data.root=x"]
    asked = options("litellm:a/b", *typed, api_base="http://x", api_temperature=0.0)
    found, config = find_policy_and_config(asked, tmp_path)
    check_options(asked, found, config, judged=False)
    judged = options("starter", "judge.max_tokens=999", "algorithm.rubric=static")
    check_options(judged, *find_policy_and_config(judged, tmp_path), judged=True)
    with pytest.raises(ConfigError, match="--label: no effect, because this environment has no evaluator"):
        check_options(options("starter", label="A"), *find_policy_and_config(judged, tmp_path), judged=True)
    outcome = find_policy_and_config(options("starter", "algorithm.reward=outcome"), tmp_path)
    with pytest.raises(ConfigError, match=r"needs algorithm\.reward=rubric and judge\.self_judge\.enabled=false"):
        judge_policy(*outcome, split="dev", runs=1, out=tmp_path / "out")


def test_keys_of_tau_bench_that_a_policy_or_a_retrieval_does_not_use_are_refused() -> None:
    config = load_config(None, ["tau_bench.retrieval=bm25"])
    for typed, api, said in (
        ("tau_bench.embedder.model=m", False, "with retrieval=bm25"),
        ("tau_bench.agent.model=m", True, "together with --policy"),
        ("tau_bench.agent.api_base=http://x", False, "for a policy that is served here"),
        ("tau_bench.server.port=1", True, "for an API model"),
        ("agent.max_turns=3", False, "in tau-bench evaluations"),
        ("train.steps=3", False, "this command reads only"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_tau([typed], config, [api])
    check_tau(["tau_bench.agent.temperature=1", "judge.prices={m: {input: 1, output: 1}}"], config, [False, True])


def test_traces_of_a_known_form_take_no_option_about_it(tmp_path: Path) -> None:
    (tmp_path / "run" / "tables").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").touch()
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text("messages: log\n")
    with pytest.raises(ConfigError, match="format otel and a mapping both describe"):
        load_traces(tmp_path / "run", format="otel", mapping=mapping)
    for told in ({"format": "otel"}, {"mapping": mapping}, {"group_by": "x"}):
        with pytest.raises(ConfigError, match="rollouts of a run directory are already grouped by task"):
            load_traces(tmp_path / "run", **told)


def test_epochs_of_a_policy_without_any_are_refused() -> None:
    with pytest.raises(ConfigError, match="last_epochs works only with a run"):
        parse_set({"settings": {"a": {"policy": "m", "last_epochs": 2}}, "splits": "dev"}, "set")


async def test_a_runs_own_rule_judge_answers_by_the_runs_rules(tmp_path: Path) -> None:
    from draco_ray.judging.completion import Request
    from draco_ray.records import Message

    rules = tmp_path / "rules.py"
    rules.write_text("def answer(prompt):\n    return None, 'mine'\n")
    run = load_config("sandbox", [f"judge.rule_judge.use={rules}:answer"]).judge
    asked = Request(messages=(Message(role="user", content="x"),))
    assert (await open_completer(judge_config(run, NamedJudge(model=OWN_JUDGE), None))(asked)).text == "mine"
    assert (await open_completer(judge_config(run, NamedJudge(model="rules"), None))(asked)).text != "mine"


@pytest.mark.parametrize("named", [True, False])
def test_the_bench_measures_the_judge_that_its_configuration_names(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draco_ray.commands import attribution_bench

    asked: list[NamedJudge] = []

    def bench(*, judge: NamedJudge, **_: object) -> list[Path]:
        asked.append(judge)
        return []

    monkeypatch.setattr(attribution_bench, "attribution_bench", bench)
    file = tmp_path / "judge.yaml"
    file.write_text(json.dumps({"judge": {"model": "a/b"} if named else {"max_tokens": 999}}))
    with pytest.raises(SystemExit, match="0"):
        main(["attribution-bench", "--config", str(file)])
    assert [judge.model for judge in asked] == [OWN_JUDGE if named else "rules"]
