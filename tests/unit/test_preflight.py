"""What a cluster that cannot carry the run is told: one line, with the number that is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from pydantic import ValidationError
from rich.console import Console
from safetensors.numpy import save_file

from draco_ray.cli import main
from draco_ray.config.load import load_config
from draco_ray.config.schema import DracoConfig, LearnerConfig, SelfJudgeConfig
from draco_ray.engine.model_config import PUBLIC_CONFIGS
from draco_ray.errors import ClusterError, ConfigError, StoreError
from draco_ray.judging.prompts import KEY_FILE
from draco_ray.judging.reply_cache import REPLIES_FILE, check_local_disk, file_system_of
from draco_ray.lab.planning.model_shape import model_shape
from draco_ray.runs.directory import RunDirectory
from draco_ray.training import preflight, run
from draco_ray.training.checks import CheckContext, check_model
from draco_ray.training.cluster import check_resources
from draco_ray.training.preflight import (
    SUBMITTED_JOB_VARIABLE,
    adapter_bytes,
    check_disk,
    check_object_store,
    check_outlives_job,
    check_paid_replies,
    check_replies,
    check_trainable,
    probe_node,
    step_size,
)
from tests.support.mounts import patch_mounts
from tests.support.small_run import small_run
from tests.support.tiny_model import build_tiny_model

BIG = {"CPU": 200.0, "GPU": 8.0, "judge": 16.0}


@pytest.fixture
def paper() -> DracoConfig:
    return load_config("qwen3.6-27b")


def refusal(config: DracoConfig, *nodes: dict[str, float]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_resources(config, nodes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_cluster_with_enough_passes(paper: DracoConfig) -> None:
    check_resources(paper, [BIG])


def test_no_judge_resource_says_how_to_offer_one(paper: DracoConfig) -> None:
    line = refusal(paper, BIG | {"judge": 0.0})
    assert "has 0 units of the custom resource 'judge'" in line
    assert "--resources='{\"judge\": 16}'" in line


def test_judge_slots_are_needed_only_where_a_rubric_is_used(paper: DracoConfig) -> None:
    assert "judge.workers=2 and the union phase's worker need 3" in refusal(paper, BIG | {"judge": 2.0})
    # What evaluation asks.
    check_resources(paper.updated(algorithm={"reward": "outcome"}), [BIG | {"judge": 0.0}])
    for setting in ("outcome", "random"):
        check_resources(load_config("qwen3.6-27b", setting=setting), [BIG | {"judge": 0.0}])


def test_run_directories_among_a_jobs_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_0"
    package.mkdir(parents=True)
    monkeypatch.chdir(package)
    with pytest.raises(ConfigError, match=r"^run.root=runs is inside the files .* set run.root to a folder that outl"):
        check_outlives_job(Path("runs"))
    check_outlives_job(tmp_path / "runs")


def test_a_submitted_job_is_told_where_its_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs where the cluster was started, which nobody chose."""
    monkeypatch.delenv(SUBMITTED_JOB_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    check_outlives_job(Path("runs"))
    monkeypatch.setenv(SUBMITTED_JOB_VARIABLE, "{}")
    with pytest.raises(ConfigError, match=rf"^run.root=runs is a relative path .*{tmp_path}/runs\).* set run.root"):
        check_outlives_job(Path("runs"))
    check_outlives_job(tmp_path / "runs")
    check_outlives_job("s3://bucket/runs")


MOUNTS = (
    ("/", "ext4"),
    ("/shared", "nfs4"),
    ("/home/a b", "cifs"),
    ("/far", "fuse.sshfs"),
    ("/own", "fuse.fuse-overlayfs"),
    ("/shared/scratch", "xfs"),
    ("/auto", "autofs"),
    ("/auto", "nfs"),
)


def test_the_file_system_of_a_path_is_that_of_the_innermost_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_mounts(monkeypatch, *MOUNTS)
    paths = ("/var/x", "/shared", "/sharedness", "/shared/scratch/x", "/home/a b/runs", "/auto/x")
    assert [file_system_of(Path(path)) for path in paths] == [
        ("ext4", Path("/")),
        ("nfs4", Path("/shared")),
        ("ext4", Path("/")),
        ("xfs", Path("/shared/scratch")),
        ("cifs", Path("/home/a b")),
        ("nfs", Path("/auto")),
    ]


def test_unknown_mounts_are_no_reason_to_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_mounts(monkeypatch)
    check_local_disk(tmp_path)
    patch_mounts(monkeypatch, ("/nowhere\udcff", "nfs4"))
    check_local_disk(tmp_path)


def test_replies_on_a_file_system_that_machines_share_are_refused_with_what_mends_it(
    paper: DracoConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_mounts(monkeypatch, *MOUNTS)

    def check(run: str, *, cache: str | None = None, root: str | Path = Path("runs"), **more: object) -> None:
        judge = paper.judge.model_copy(update={"cache": cache and Path(cache), **more})
        where = paper.run.model_copy(update={"root": root})
        check_replies(paper.model_copy(update={"judge": judge, "run": where}), Path(run))

    with pytest.raises(
        ConfigError,
        match=r"stored in /shared/runs/first/judge_cache: /shared is .* \(nfs4\), .* choose a folder on a local disk "
        r"\(.*judge.cache of a training run\); or start a new run with run.root=file:///shared/runs",
    ):
        check("/shared/runs/first")
    with pytest.raises(ConfigError, match=r"/far is .* \(fuse.sshfs\), .* choose a folder .*training run\)$"):
        check("/var/runs/first", cache="/far/replies")
    with pytest.raises(ConfigError, match=r"choose a folder .*, or set run.local$"):
        check("/shared/local/first", root="s3://bucket/runs")
    check("/shared/runs/first", cache="/var/replies")
    check("/shared/scratch/runs/first")
    check("/own/runs/first")
    # Where no replies are kept it does not matter.
    check("/shared/runs/first", self_judge=SelfJudgeConfig(enabled=True))


def test_a_run_is_told_where_its_replies_cannot_lie_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_mounts(monkeypatch, (str(tmp_path), "nfs4"))
    config = load_config("sandbox", [f"run.root={tmp_path}"])
    folder = RunDirectory.create(tmp_path / "first", "")
    with pytest.raises(ConfigError, match=r"judge replies cannot be stored in .*first/judge_cache"):
        run._train(config, {}, None, folder, None, Console())  # type: ignore[arg-type]


def test_a_run_without_the_replies_it_has_paid_for_is_refused_until_another_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = small_run(tmp_path / "run"), load_config("sandbox")

    def elsewhere(name: str) -> DracoConfig:
        return load_config("sandbox", [f"judge.cache={tmp_path / name}"])

    with pytest.raises(StoreError) as refusal:
        check_paid_replies(folder, config, config)
    assert str(refusal.value) == (
        f"judge replies: {folder.judge_cache / REPLIES_FILE} is missing, although this run has paid for replies; "
        "restore the file from a copy, or choose another folder (--out, or judge.cache of a training run), which means "
        "paying for these replies again"
    )
    check_paid_replies(folder, config, elsewhere("new"))
    # From then on they are there, or should be.
    check_paid_replies(folder, elsewhere("new"), elsewhere("new"))
    with pytest.raises(StoreError, match="gone/replies.sqlite is missing"):
        check_paid_replies(folder, elsewhere("gone"), elsewhere("gone"))
    for key, problem in ((b"", "is damaged"), (b"0" * 31, "is damaged"), (None, "is missing")):
        (tmp_path / "new" / KEY_FILE).unlink() if key is None else (tmp_path / "new" / KEY_FILE).write_bytes(key)
        with pytest.raises(StoreError, match=f"new/{KEY_FILE} {problem}.* restore the file from a copy"):
            check_paid_replies(folder, elsewhere("new"), elsewhere("new"))
    (tmp_path / "new" / REPLIES_FILE).write_bytes(b"")
    for check in (
        lambda: check_paid_replies(folder, config, elsewhere("new")),
        lambda: check_replies(elsewhere("new"), folder.path),
    ):
        with pytest.raises(
            StoreError, match="new/replies.sqlite are damaged: the file is empty; restore the file from a copy"
        ):
            check()
    # A judge that is not paid keeps none, and a run that has asked nothing has none yet.
    check_paid_replies(folder, load_config("sandbox", setting="self-judge"), config)
    check_paid_replies(folder, config, load_config("sandbox", setting="outcome"))
    check_paid_replies(RunDirectory.create(tmp_path / "young", ""), config, config)


def test_too_few_gpus(paper: DracoConfig) -> None:
    line = refusal(paper, BIG | {"GPU": 7.0})
    assert "1 of 4 learner workers (1 GPUs and 1 CPUs each, on one node) do not fit into 7 GPUs" in line


def test_an_engine_must_fit_one_node(paper: DracoConfig) -> None:
    line = refusal(paper, *[{"GPU": 1.0, "CPU": 60.0, "judge": 3.0}] * 8)
    assert "2 of 2 engines (2 GPUs and 1 CPUs each, on one node) do not fit" in line


def test_too_few_cpus_counts_the_evaluation_workers_too(paper: DracoConfig) -> None:
    # 48 slots, 2 engines, 4 learner workers, one CPU each.
    check_resources(paper, [BIG | {"CPU": 54.0}])
    assert "1 of 48 rollout workers" in refusal(paper, BIG | {"CPU": 53.0})
    evaluating = load_config("qwen3.6-27b", ["train.evaluate_before_after=true"])
    assert "1 of 96 rollout workers" in refusal(evaluating, BIG | {"CPU": 101.0})
    check_resources(evaluating, [BIG | {"CPU": 102.0}])


def test_the_estimate_grows_with_what_a_step_makes(paper: DracoConfig) -> None:
    size = step_size(paper)
    tokens = 16 * 6 * (4096 + 24576)
    assert size.rollouts == 96
    assert size.trajectories == 21 * tokens
    # Shown to stage2, union, score and credit, four bytes a token each.
    assert size.judge_calls == 4 * 4 * tokens
    assert step_size(load_config("qwen3.6-27b", ["judge.score_votes=3"])).judge_calls == 6 * 4 * tokens
    assert step_size(load_config("qwen3.6-27b", setting="outcome")).judge_calls == 0


def test_the_adapter_is_counted_exactly_from_the_checkpoint(tmp_path: Path, paper: DracoConfig) -> None:
    prefix = "model.layers.{}.".format
    sizes = {
        "model.embed_tokens.weight": (50, 100),
        "lm_head.weight": (50, 100),
        **{
            prefix(layer) + name: size
            for layer in range(2)
            for name, size in {
                "self_attn.q_proj.weight": (100, 100),
                "self_attn.k_proj.weight": (20, 100),
                "self_attn.q_proj.bias": (100,),
                "mlp.down_proj.weight": (100, 300),
                "mlp.experts.0.gate_proj.weight": (30, 100),
                "conv1d.weight": (10, 1, 4),
            }.items()
        },
    }
    save_file({name: np.zeros(size, np.float16) for name, size in sizes.items()}, tmp_path / "model.safetensors")
    assert adapter_bytes(str(tmp_path), paper.learner) == 4 * 2 * 16 * (200 + 120 + 400)
    only_queries = paper.learner.model_copy(update={"lora_target": r".*\.q_proj"})
    assert adapter_bytes(str(tmp_path), only_queries) == 4 * 2 * 16 * 200
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert adapter_bytes(str(tmp_path), paper.learner) == 0
    assert adapter_bytes("nobody/no-such-model", paper.learner) == 0
    assert adapter_bytes(".cache/no-such-model", paper.learner) == 0
    # The paper's models are known without a download.
    assert 0.25 * 2**30 < step_size(paper).adapter < 0.5 * 2**30


def test_what_is_counted_before_a_run_is_the_adapter_that_the_plan_counts(tmp_path: Path, paper: DracoConfig) -> None:
    model = build_tiny_model(tmp_path / "model")
    shape = model_shape(str(model))
    assert adapter_bytes(str(model), paper.learner) == 4 * shape.adapter_parameters("all-linear", 16)


def test_an_object_store_too_small_states_the_estimate(paper: DracoConfig) -> None:
    needed = step_size(paper).object_store
    check_object_store(paper, needed)
    with pytest.raises(
        ClusterError, match=r"have 0\.08 GiB, but a step of 96 rollouts may need 1\.00 GiB .*trajectories"
    ):
        check_object_store(paper, 80 << 20)
    ahead = load_config("qwen3.6-27b", ["train.staleness=1"])
    # Of everything but the adapter.
    both = 2 * needed - 2 * step_size(paper).adapter
    check_object_store(ahead, both)
    with pytest.raises(ClusterError, match="for 2 concurrent steps"):
        check_object_store(ahead, both - 1)


def test_the_sandbox_fits_the_smallest_object_store() -> None:
    check_object_store(load_config("sandbox"), 80 << 20)


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_full_disk_says_what_a_step_needs(
    tmp_path: Path, paper: DracoConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_disk(load_config("sandbox"), tmp_path)
    needed = step_size(paper).disk
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 10**12 - needed + 1, needed - 1))
    with pytest.raises(StoreError, match=r"1\.83 GiB free, but a training step may write 1\.83 GiB"):
        check_disk(paper, tmp_path)


def test_a_disk_without_room_for_files_is_found_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.statvfs(tmp_path).f_files:
        pytest.skip("this file system has no limit of files")
    monkeypatch.setattr(preflight, "FILES_PER_ROLLOUT", 10**15)
    with pytest.raises(
        StoreError, match=r"its file system allows \d+ more files, but a training step may write \d+; remove"
    ):
        check_disk(load_config("sandbox"), tmp_path)


def test_a_node_looks_for_the_data_and_the_model(tmp_path: Path) -> None:
    assert probe_node([str(tmp_path)]) is None
    assert probe_node([str(tmp_path), "/no/such/model", "/nor/this"]) == "/no/such/model"


EXPERTS = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 65536,
}
OTHER = {"model_type": "gpt_oss"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ({"num_experts": 4} | OTHER, r"of an unsupported family \(gpt_oss\); expected one of qwen3_moe, "),
        ({"text_config": {"num_experts": 4} | OTHER}, r"of an unsupported family \(gpt_oss\)"),
        ({"num_local_experts": 8} | OTHER, r"of an unsupported family \(gpt_oss\)"),
        ({"n_routed_experts": 256} | OTHER, r"of an unsupported family \(gpt_oss\)"),
        ({"num_experts": 4, "mlp_only_layers": [0]}, r"in only some layers \(mlp_only_layers, decoder_sparse_step\)"),
        ({"num_experts": 4, "decoder_sparse_step": 2}, r"in only some layers \(mlp_only_layers, decoder_sparse_step\)"),
        ({"num_experts": 4, "quantization_config": {"bits": 4}}, r"in a quantized checkpoint \(quantization_config\)"),
    ],
)
def test_a_mixture_of_experts_that_is_not_trained_here_is_refused_in_one_line(
    tmp_path: Path, text: dict[str, Any], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS | {"num_experts": 1} | text))
    inner = text.get("text_config", text)
    key, number = next(iter(inner.items()))
    with pytest.raises(
        ConfigError, match=rf"^model .*: a mixture of experts \({key}={number}\) {problem}.*dense model$"
    ):
        check_trainable(str(tmp_path), LearnerConfig())
    # The plan says the same of it.
    with pytest.raises(SystemExit):
        main(["plan", "qwen3.6-27b", f"model.path={tmp_path}"])
    assert f"a mixture of experts ({key}={number})" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "asked"),
    [
        (r".*_proj", r"model\.layers\.0\.mlp\.experts\.gate_up_proj"),
        (r".*\.(q_proj|down_proj)", r"model\.layers\.0\.mlp\.experts\.down_proj"),
        (r"model\.layers\.1\..*\.experts\.3\.w1", r"model\.layers\.1\.mlp\.experts\.3\.w1"),
        (r".*\.(o_proj|gate)", r"model\.layers\.0\.mlp\.gate"),
        (r".*", r"model\.layers\.0\.mlp\.gate"),
    ],
)
def test_a_target_that_asks_for_experts_is_refused_in_one_line(
    tmp_path: Path, target: str, asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    refused = rf"^learner\.lora_target=.* matches experts or their router \({asked}\), which stay frozen; "
    advice = r"expected all-linear, which means self_attn\.q_proj, .*, self_attn\.o_proj for this model, or a regex"
    with pytest.raises(ConfigError, match=refused + advice):
        check_trainable(str(tmp_path), LearnerConfig(lora_target=target))
    with pytest.raises(SystemExit):
        main(["plan", "qwen3.6-27b", f"model.path={tmp_path}", f"learner.lora_target='{target}'"])
    assert "matches experts or their router" in capsys.readouterr().err


def test_experts_in_8_bits_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    check_trainable(str(tmp_path), LearnerConfig())
    with pytest.raises(
        ConfigError, match=r"^learner\.base_precision=int8: .* the experts .*; set learner\.base_precision=model"
    ):
        check_trainable(str(tmp_path), LearnerConfig(base_precision="int8"))
    with pytest.raises(SystemExit):
        main(["plan", "qwen3.6-27b", f"model.path={tmp_path}", "learner.base_precision=fp8"])
    error = capsys.readouterr().err
    assert "learner.base_precision=fp8: only linear layers can be stored in 8 bits, but the experts of" in error


def test_dense_models_and_those_that_are_not_here_pass(tmp_path: Path) -> None:
    check_trainable(str(build_tiny_model(tmp_path / "model")), LearnerConfig())
    check_trainable("somebody/unknown", LearnerConfig())


@pytest.mark.parametrize(("workers", "key", "heads"), [(4, "num_attention_heads", 6), (3, "linear_num_value_heads", 8)])
def test_heads_that_workers_cannot_share_are_refused_in_one_line(
    tmp_path: Path, workers: int, key: str, heads: int, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = dict(PUBLIC_CONFIGS["Qwen/Qwen3.6-27B"])
    shape |= {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
    }
    for config in (shape, {"model_type": "qwen3_5", "text_config": shape}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        check_trainable(str(tmp_path), LearnerConfig(workers=2, context_parallel=2))
        line = f"learner.context_parallel={workers} does not divide the {heads} heads of model {tmp_path} ({key}); "
        with pytest.raises(ConfigError, match=f"^{re.escape(line)}expected one of 1, 2$"):
            check_trainable(str(tmp_path), LearnerConfig(workers=workers, context_parallel=workers))
        keys = [f"model.path={tmp_path}", f"learner.workers={workers}", f"learner.context_parallel={workers}"]
        with pytest.raises(SystemExit):
            main(["plan", "qwen3.6-27b", *keys])
        assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "gpus", "key", "fitting"),
    [
        ("Qwen/Qwen3.6-27B", 3, "num_key_value_heads=4", "1, 2, 4, 8"),
        ("Qwen/Qwen3.6-27B", 16, "num_attention_heads=24", "1, 2, 4, 8"),
        ("Qwen/Qwen2.5-32B-Instruct", 5, "num_key_value_heads=8", "1, 2, 4, 8"),
    ],
)
def test_gpus_that_do_not_divide_a_model_are_refused_before_an_engine_loads_it(
    tmp_path: Path, model: str, gpus: int, key: str, fitting: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC_CONFIGS[model]))
    for good in (1, 2, 4, 8):
        check_trainable(str(tmp_path), LearnerConfig(), good)
    line = f"engine.tensor_parallel={gpus} does not divide model {tmp_path} ({key}); expected one of {fitting}"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        check_trainable(str(tmp_path), LearnerConfig(), gpus)


def test_training_on_gpus_that_do_not_divide_a_model_ends_before_anything_starts(
    tmp_path: Path,
) -> None:
    model = build_tiny_model(tmp_path / "model")
    paper = load_config("qwen3.6-27b", [f"model.path={model}", "engine.tensor_parallel=3", "engine.gpus_per_engine=3"])
    with pytest.raises(ConfigError, match="engine.tensor_parallel=3 does not divide model"):
        check_model(CheckContext(paper, Console(quiet=True)))


def test_workers_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"learner\.context_parallel=3 does not divide learner\.workers=4"):
        LearnerConfig(workers=4, context_parallel=3)


def test_training_a_mixture_of_experts_of_another_family_ends_before_anything_starts(
    tmp_path: Path,
) -> None:
    model = build_tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_experts": 4}))
    paper = load_config("qwen3.6-27b", [f"model.path={model}"])
    with pytest.raises(ConfigError, match="a mixture of experts"):
        check_model(CheckContext(paper, Console(quiet=True)))
