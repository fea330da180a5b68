"""What tau2's process is told: the job as a file without keys, and the keys in its environment."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draco_ray.benchmarks.tau.installation import DENSE_RETRIEVAL, DOMAIN, Tau2
from draco_ray.benchmarks.tau.policy import TauPolicy
from draco_ray.benchmarks.tau.server import ServedPolicy
from draco_ray.config.schema import TauBenchConfig, TauModelConfig, provider_key
from draco_ray.errors import ConfigError
from draco_ray.judging.model_limits import refuses_temperature

STEPS_PER_TURN = 2
"""tau2's max_steps counts messages of both sides."""
JUDGE_KEY, EMBEDDER_KEY = "DRACO_TAU_JUDGE_KEY", "DRACO_TAU_EMBEDDER_KEY"
PROVIDER_VARIABLES = {"openai": "OPENAI", "hosted_vllm": "HOSTED_VLLM"}
"""Providers whose endpoint LiteLLM takes from <NAME>_API_BASE and <NAME>_API_KEY."""
PASSED_ON = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "http_proxy",
    "https_proxy",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
)
"""Variables of ours that tau2's process inherits; any other could bring another endpoint or another key."""


def key_variables(config: TauBenchConfig, policy: TauPolicy) -> dict[str, str]:
    """Role -> name of the variable of ours that holds its key."""
    variables = {role: _key_variable(each) for role, each in (("user simulator", config.user), ("judge", config.judge))}
    if config.retrieval in DENSE_RETRIEVAL:
        variables["embedder"] = config.embedder.api_key_env
    if policy.api:
        variables["agent"] = _key_variable(config.agent, policy.model)
    return variables


def _key_variable(config: TauModelConfig, model: str | None = None) -> str:
    return config.api_key_env or provider_key(model or config.model)


def read_keys(config: TauBenchConfig, policy: TauPolicy) -> dict[str, str]:
    """Role -> key.

    Raises:
        ConfigError: one is not set.
    """
    variables = key_variables(config, policy)
    for role, variable in variables.items():
        if not os.environ.get(variable):
            raise ConfigError(
                f"{role}: no key in the environment variable {variable}; export it (any text where the endpoint asks "
                "for none), or name another variable in tau_bench"
            )
    return {role: os.environ[variable] for role, variable in variables.items()}


def tau2_environment(
    config: TauBenchConfig,
    tau2: Tau2,
    policy: TauPolicy,
    endpoint: ServedPolicy | None,
    keys: Mapping[str, str],
    tmp: Path,
) -> dict[str, str]:
    """The whole environment of tau2's process.

    Args:
        endpoint: of the policy served here; None for an API policy.
        tmp: private folder for temporary files.

    Raises:
        ConfigError: two roles need one variable with different values, or an endpoint cannot be told to the provider.
    """
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    local = [name for name in (os.environ.get("NO_PROXY"), "127.0.0.1", "localhost") if name]
    environment |= {
        "NO_PROXY": ",".join(local),
        "no_proxy": ",".join(local),
        "TAU2_DATA_DIR": str(tau2.data),
        "TMPDIR": str(tmp),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHON_DOTENV_DISABLED": "1",
        "PYTHONUNBUFFERED": "1",
        JUDGE_KEY: keys["judge"],
    }
    if "embedder" in keys:
        environment[EMBEDDER_KEY] = keys["embedder"]
    roles = [_provider_variables("tau_bench.user", config.user, config.user.model, keys["user simulator"])]
    if endpoint is not None:
        roles.append({"HOSTED_VLLM_API_BASE": endpoint.api_base, "HOSTED_VLLM_API_KEY": endpoint.key})
    else:
        roles.append(_provider_variables("tau_bench.agent", config.agent, policy.model, keys["agent"]))
    first, second = roles
    for name in first.keys() & second.keys():
        if first[name] != second[name]:
            raise ConfigError(
                f"tau_bench: agent and user simulator need different {name}, which LiteLLM reads for both; give them "
                "one endpoint and key, or models of different providers"
            )
    return environment | {name: value for role in roles for name, value in role.items() if value}


def tau2_job(
    config: TauBenchConfig,
    tau2: Tau2,
    policy: TauPolicy,
    endpoint: ServedPolicy | None,
    folder: Path,
    *,
    unreadable: list[str],
) -> dict[str, Any]:
    """The job as JSON, for `tau2_runner`; holds no key.

    Args:
        folder: where tau2's results go.
        unreadable: files and folders the agent's shell must not read.
    """
    agent = endpoint.model if endpoint else policy.model
    return {
        "domain": DOMAIN,
        "retrieval": config.retrieval,
        "tasks": list(task_ids(config, tau2)),
        "trials": config.trials,
        "max_steps": STEPS_PER_TURN * config.max_turns,
        "seed": config.seed,
        "concurrency": config.concurrency,
        "episode_retries": config.episode_retries,
        "episode_timeout_seconds": config.episode_timeout_seconds,
        "agent": {"model": agent, "args": sampling(config.agent, agent)},
        "user": {"model": config.user.model, "args": sampling(config.user)},
        "judge": {
            "model": config.judge.model,
            "api_base": config.judge.api_base,
            "args": sampling(config.judge),
            "key": JUDGE_KEY,
        },
        "embedder": {"model": config.embedder.model, "api_base": config.embedder.api_base, "key": EMBEDDER_KEY},
        "embeddings_cache": str(_embeddings_folder(config)),
        "unreadable": unreadable,
        "results": str(folder / "results.json"),
        "judge_calls": str(folder / "judge_calls.jsonl"),
    }


def task_ids(config: TauBenchConfig, tau2: Tau2) -> tuple[str, ...]:
    """The tasks to run, in the checkout's order.

    Raises:
        ConfigError: a configured one does not exist.
    """
    if config.tasks is None:
        return tau2.tasks
    if strange := sorted(set(config.tasks) - set(tau2.tasks)):
        raise ConfigError(f"tau_bench.tasks: {strange[0]!r} is no task of {DOMAIN}; expected e.g. {tau2.tasks[0]!r}")
    return tuple(task for task in tau2.tasks if task in config.tasks)


def sampling(config: TauModelConfig, model: str | None = None) -> dict[str, Any]:
    """What tau2 is told of how a model samples.

    A temperature that LiteLLM knows the model to refuse is none of it: tau2 has LiteLLM leave such out unsaid.

    Args:
        config: endpoint and temperature.
        model: LiteLLM's name of it; None: the configured one.
    """
    if config.temperature is None or refuses_temperature(model or config.model, config.api_base, config.temperature):
        return {}
    return {"temperature": config.temperature}


def _provider_variables(key: str, config: TauModelConfig, model: str, value: str) -> dict[str, str]:
    name, others = litellm_variables(key, config, model)
    return {name: value, **others}


def litellm_variables(key: str, config: TauModelConfig, model: str) -> tuple[str, dict[str, str]]:
    """The variable from which LiteLLM takes a model's key, and others with their values.

    Args:
        key: of the configuration, for messages.

    Raises:
        ConfigError: its endpoint cannot be told to the provider.
    """
    provider = model.partition("/")[0]
    if provider in PROVIDER_VARIABLES:
        name = PROVIDER_VARIABLES[provider]
        return f"{name}_API_KEY", {f"{name}_API_BASE": config.api_base or ""}
    if config.api_base:
        raise ConfigError(
            f"{key}.api_base: cannot be told to provider {provider!r}; expected one of "
            f"{', '.join(PROVIDER_VARIABLES)} in {key}.model"
        )
    return _key_variable(config, model), {}


def _embeddings_folder(config: TauBenchConfig) -> Path:
    """One per model and endpoint: tau2's own cache key does not know them."""
    source = f"{config.embedder.model} {config.embedder.api_base}"
    return config.embeddings_cache.expanduser().resolve() / hashlib.sha256(source.encode()).hexdigest()[:16]
