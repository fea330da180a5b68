"""The files in ``cluster/``: well formed, large enough for the presets, and without a secret.

KubeRay's own schemas are not committed. ``KubeRay*`` below demand the fields these manifests rely on and refuse any
other name; where KUBERAY_CRDS names a folder with KubeRay's ``ray.io_rayclusters.yaml`` and ``ray.io_rayjobs.yaml``,
the manifests are checked against those as well.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
import yaml
from image_check import ENVIRONMENTS, environment, instructions, last_stage, login
from pydantic import BaseModel, ConfigDict
from ray.autoscaler._private.aws.config import DEFAULT_AMI, _check_ami
from ray.autoscaler._private.util import prepare_config, validate_config

from draco_ray.config.load import load_config
from draco_ray.errors import ConfigError
from draco_ray.training.cluster import check_resources

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER = REPOSITORY / "cluster"
PRESETS = ("qwen3.6-27b", "qwen2.5-32b")


def loaded(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((CLUSTER / name).read_text(encoding="utf-8"))
    return content


# AWS, through Ray's cluster launcher.


def aws_nodes() -> list[dict[str, float]]:
    """Resources of the nodes that are there before anything scales."""
    cluster = loaded("aws.yaml")
    types = cluster["available_node_types"]
    started = [cluster["head_node_type"]]
    started += [name for name, kind in types.items() for _ in range(kind["min_workers"])]
    return [types[name]["resources"] for name in started]


def test_aws_passes_rays_own_check() -> None:
    prepared = prepare_config(loaded("aws.yaml"))
    validate_config(prepared)
    assert prepared["available_node_types"]["head"]["max_workers"] == 0
    broken = loaded("aws.yaml")
    broken["available_node_types"]["judge"]["max_worker"] = 3
    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepare_config(broken))


@pytest.mark.parametrize("preset", PRESETS)
def test_aws_carries_the_presets_before_it_scales(preset: str) -> None:
    check_resources(load_config(preset), aws_nodes())
    with pytest.raises(ConfigError, match="GPUs"):
        check_resources(load_config(preset, ["engine.engines=3"]), aws_nodes())


def test_aws_judge_nodes_come_and_go() -> None:
    cluster = loaded("aws.yaml")
    judge = cluster["available_node_types"]["judge"]
    assert judge["min_workers"] == 0
    assert 0 < judge["max_workers"] <= cluster["max_workers"] - 1
    assert judge["resources"]["judge"] > 0
    assert not judge["resources"]["CPU"], "rollout workers would land on a node that goes away"


def test_aws_starts_ray_with_token_and_secrets_from_the_platform() -> None:
    cluster = loaded("aws.yaml")
    for part in ("head_start_ray_commands", "worker_start_ray_commands"):
        start = cluster[part][-1]
        assert "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN OPENAI_API_KEY" in start
        for variable in ("RAY_AUTH_TOKEN", "OPENAI_API_KEY"):
            assert re.search(rf'{variable}="\$\(python /app/cluster/aws_secret\.py [\w/-]+\)" &&', start)
        # What ray itself is started with is visible to every user of the machine.
        assert not re.search(r"(?i)token|key|secret|\$\(", start.split("ray start")[1])


def test_aws_names_an_image_of_today_for_every_node() -> None:
    prepared = prepare_config(loaded("aws.yaml"))
    _check_ami(prepared)
    images = {kind["node_config"]["ImageId"] for kind in prepared["available_node_types"].values()}
    assert not images & set(DEFAULT_AMI.values()), "Ray's default of 2022"
    (image,) = images
    # EC2 looks it up where a node is started.
    assert re.fullmatch(r"resolve:ssm:/aws/service/deeplearning/ami/x86_64/[\w.-]+/latest/ami-id", image)


# Kubernetes, through KubeRay.


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class KubeRayContainer(Strict):
    name: str
    image: str
    env: list[dict[str, Any]]
    ports: list[dict[str, Any]]
    resources: dict[Literal["requests", "limits"], dict[str, str]]
    volumeMounts: list[dict[str, str]]


class KubeRayPod(Strict):
    securityContext: dict[str, Any]
    containers: list[KubeRayContainer]
    volumes: list[dict[str, Any]]
    tolerations: list[dict[str, str]] = []
    terminationGracePeriodSeconds: int | None = None


class KubeRayTemplate(Strict):
    spec: KubeRayPod


class KubeRayHead(Strict):
    rayStartParams: dict[str, str]
    template: KubeRayTemplate


class KubeRayWorkers(KubeRayHead):
    groupName: str
    replicas: int
    minReplicas: int
    maxReplicas: int


class KubeRayAuth(Strict):
    mode: Literal["token"]


class KubeRayScaling(Strict):
    version: Literal["v1", "v2"]
    idleTimeoutSeconds: int


class KubeRayClusterSpec(Strict):
    rayVersion: str
    enableInTreeAutoscaling: Literal[True]
    authOptions: KubeRayAuth
    autoscalerOptions: KubeRayScaling
    headGroupSpec: KubeRayHead
    workerGroupSpecs: list[KubeRayWorkers]


class KubeRayJobSpec(Strict):
    entrypoint: str
    submissionMode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]
    backoffLimit: int
    shutdownAfterJobFinishes: bool
    ttlSecondsAfterFinished: int
    rayClusterSpec: KubeRayClusterSpec


class KubeRayManifest(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: str
    metadata: dict[str, str]
    spec: dict[str, Any]


def kuberay_cluster() -> KubeRayClusterSpec:
    manifest = KubeRayManifest.model_validate(loaded("kuberay/raycluster.yaml"))
    assert manifest.kind == "RayCluster"
    return KubeRayClusterSpec.model_validate(manifest.spec)


def kuberay_job() -> KubeRayJobSpec:
    manifest = KubeRayManifest.model_validate(loaded("kuberay/rayjob.yaml"))
    assert manifest.kind == "RayJob"
    return KubeRayJobSpec.model_validate(manifest.spec)


def pods() -> list[KubeRayHead]:
    cluster = kuberay_cluster()
    return [cluster.headGroupSpec, *cluster.workerGroupSpecs]


def ray_resources(pod: KubeRayHead) -> dict[str, float]:
    """What Ray makes of a pod: the container's limits, unless a start parameter says otherwise."""
    limits = pod.template.spec.containers[0].resources["limits"]
    custom = json.loads(json.loads(pod.rayStartParams.get("resources", '"{}"')))
    return {
        "CPU": float(pod.rayStartParams.get("num-cpus", limits["cpu"])),
        "GPU": float(limits.get("nvidia.com/gpu", 0)),
        **custom,
    }


def gibibytes(quantity: str) -> float:
    return float(quantity.removesuffix("Gi"))


@pytest.mark.parametrize("preset", PRESETS)
def test_kuberay_carries_the_presets_before_it_scales(preset: str) -> None:
    cluster = kuberay_cluster()
    nodes = [ray_resources(cluster.headGroupSpec)]
    nodes += [ray_resources(group) for group in cluster.workerGroupSpecs for _ in range(group.minReplicas)]
    check_resources(load_config(preset), nodes)
    with pytest.raises(ConfigError, match="GPUs"):
        check_resources(load_config(preset, ["learner.workers=5"]), nodes)


def test_kuberay_judge_pods_come_and_go() -> None:
    (judge,) = [group for group in kuberay_cluster().workerGroupSpecs if group.groupName == "judge"]
    assert (judge.minReplicas, judge.replicas) == (0, 0)
    assert judge.maxReplicas > 0
    assert ray_resources(judge)["judge"] > 0
    assert ray_resources(judge)["CPU"] == 0


def test_kuberay_pods_are_unprivileged_and_get_their_secrets_from_kubernetes() -> None:
    for pod in pods():
        spec = pod.template.spec
        assert spec.securityContext["runAsNonRoot"] is True
        (container,) = spec.containers
        secret = {entry["name"]: entry["valueFrom"]["secretKeyRef"] for entry in container.env if "valueFrom" in entry}
        assert set(secret) == {load_config(PRESETS[0]).judge.key_variable}
        mounts = {mount["mountPath"]: mount["name"] for mount in container.volumeMounts}
        volumes = {volume["name"]: volume for volume in spec.volumes}
        assert volumes[mounts["/shared"]]["persistentVolumeClaim"]["claimName"] == "draco-shared"
        # Ray keeps its objects there; in memory that counts towards the container's.
        shm = gibibytes(volumes[mounts["/dev/shm"]]["emptyDir"]["sizeLimit"])
        assert int(pod.rayStartParams["object-store-memory"]) / 2**30 < shm
        assert shm < gibibytes(container.resources["limits"]["memory"])
    assert loaded("kuberay/storage.yaml")["spec"]["accessModes"] == ["ReadWriteMany"]


def test_kuberay_job_runs_on_the_same_cluster_and_its_words_are_a_configuration() -> None:
    job = kuberay_job()
    assert job.rayClusterSpec == kuberay_cluster()
    program, command, preset, *words = shlex.split(job.entrypoint)
    assert (program, command) == ("draco", "train")
    # A try that follows another finds the run there, on a cluster that has nothing of the one before.
    assert job.backoffLimit > 0
    assert "--resume-or-start" in words
    config = load_config(preset, [word for word in words if word != "--resume-or-start"])
    assert config.run.name is not None
    assert isinstance(config.run.root, str)
    assert config.train.steps == 100
    for path in (config.data.root, Path(str(config.run.root).removeprefix("file://")), Path(config.model.path)):
        assert path.is_relative_to("/shared")


@pytest.mark.skipif("KUBERAY_CRDS" not in os.environ, reason="KUBERAY_CRDS names no folder with KubeRay's CRDs")
@pytest.mark.parametrize(("crd", "manifest"), [("rayclusters", "raycluster"), ("rayjobs", "rayjob")])
def test_kuberay_manifests_fit_the_custom_resource_definitions(crd: str, manifest: str) -> None:
    definition = yaml.safe_load((Path(os.environ["KUBERAY_CRDS"]) / f"ray.io_{crd}.yaml").read_text(encoding="utf-8"))
    (version,) = [entry for entry in definition["spec"]["versions"] if entry["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    _refuse_unknown_fields(schema["properties"]["spec"])
    jsonschema.validate(loaded(f"kuberay/{manifest}.yaml"), schema)
    broken = loaded(f"kuberay/{manifest}.yaml")
    broken["spec"]["nonsense"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema)


def _refuse_unknown_fields(schema: Any) -> None:
    """As the API server does with strict validation: a field the schema does not name is an error."""
    if isinstance(schema, list):
        for entry in schema:
            _refuse_unknown_fields(entry)
    if isinstance(schema, dict):
        if schema.get("x-kubernetes-int-or-string"):
            schema.pop("type", None)
        if "properties" in schema and "x-kubernetes-preserve-unknown-fields" not in schema:
            schema.setdefault("additionalProperties", False)
        for entry in schema.values():
            _refuse_unknown_fields(entry)


def test_a_stopped_run_has_two_minutes_to_tidy_up_and_copy_wherever_its_driver_is() -> None:
    """`ray job stop` kills after three seconds where the head lacks this variable, and Kubernetes after thirty."""
    waits = "RAY_JOB_STOP_WAIT_TIME_S"
    assert f" {waits}=120 " in loaded("aws.yaml")["head_start_ray_commands"][-1]
    assert environment(last_stage(DOCKERFILE), "/usr/bin")[waits] == "120"
    for cluster in (kuberay_cluster(), kuberay_job().rayClusterSpec):
        head = cluster.headGroupSpec.template.spec
        assert {"name": waits, "value": "120"} in head.containers[0].env
        assert head.terminationGracePeriodSeconds == 120


# The image.


DOCKERFILE = (CLUSTER / "Dockerfile").read_text(encoding="utf-8")
"""`make image-check` carries out its last stage."""


def test_image_runs_as_an_ordinary_user() -> None:
    assert [argument for name, argument in instructions(DOCKERFILE) if name == "USER"] == ["draco"]
    assert instructions(DOCKERFILE)[-1][0] == "USER"


def test_image_is_pinned_by_the_lock_files() -> None:
    installs = [
        part
        for name, text in instructions(DOCKERFILE)
        if name == "RUN"
        for part in text.split("&&")
        if "pip install" in part
    ]
    assert all("--no-deps" in install for install in installs)
    assert sum("-r requirements/appworld.lock" in install for install in installs) == 1
    assert sum("-r ${LOCK}" in install for install in installs) == 1
    assert ("ARG", "LOCK=requirements/cpu.lock") in instructions(DOCKERFILE)


def test_image_holds_no_secret_and_nothing_that_is_not_asked_for() -> None:
    named = [text for name, text in instructions(DOCKERFILE) if name in ("ARG", "ENV")]
    assert not any(re.search(r"(?i)\w*(key|secret|password|auth_token)\w*=", text) for text in named)
    ignored = (CLUSTER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in ignored if line and not line.startswith("#")]
    assert patterns[0] == "*"
    allowed = {pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")}
    copied = [text.split() for name, text in instructions(DOCKERFILE) if name == "COPY" and "--from" not in text]
    sources = {source.rstrip("/") for words in copied for source in words[:-1]}
    assert sources == allowed
    assert all((REPOSITORY / source).exists() for source in sources)


def test_image_has_its_programs_on_the_path_of_a_login_shell(tmp_path: Path) -> None:
    """Ray's launcher gives every command through one, and Debian's ``/etc/profile`` sets PATH anew."""
    copied = [text.split() for name, text in last_stage(DOCKERFILE) if name == "COPY" and "--from" not in text]
    (profile,) = [source for source, target in copied if re.fullmatch(r"/etc/profile\.d/\w+\.sh", target)]
    text = (
        (REPOSITORY / profile).read_text(encoding="utf-8").replace("/opt/draco/bin", str(Path(sys.executable).parent))
    )
    (tmp_path / ".bashrc").touch()
    asked = "python -c 'import sys; print(sys.executable)'; command -v ray draco"

    def said(profile: str) -> list[str]:
        # In the place of /etc/profile.d: read by the same shell, right after /etc/profile.
        (tmp_path / ".profile").write_text(profile, encoding="utf-8")
        variables = {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
        done = subprocess.run(
            login(asked), env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        return done.stdout.split()

    assert said(text) == [str(Path(sys.executable).with_name(name)) for name in ("python", "ray", "draco")]
    assert said("PATH=/usr/bin:/bin") != said(text)


def test_image_has_what_rays_launcher_calls_and_where_the_code_looks() -> None:
    stage = last_stage(DOCKERFILE)
    installed = " ".join(text for name, text in stage if name == "RUN" and "apt-get install" in text).split()
    assert {"openssh-client", "rsync", "wget", "bubblewrap"} <= set(installed)
    variables = environment(stage, "/usr/bin")
    assert variables["PATH"] == "/opt/draco/bin:/usr/bin"
    brought = {text.split()[-1] for name, text in stage if name == "COPY" and "--from=build" in text}
    assert brought == set(ENVIRONMENTS)
    assert variables["DRACO_APPWORLD_PYTHON"] == "/opt/appworld/bin/python"
