"""Open the judge that a configuration describes: over LiteLLM, or the policy itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from draco_ray.config.schema import DracoConfig, JudgeConfig
from draco_ray.judging.completion import Completer
from draco_ray.judging.file_judge import FileJudge
from draco_ray.judging.judge import Judge
from draco_ray.judging.labels import examples_of
from draco_ray.judging.panel import panel_judge, with_fallbacks
from draco_ray.judging.prompts import Prompts, evidence_key, load_prompts, load_static_rubric

if TYPE_CHECKING:
    from draco_ray.judging.endpoint import Servers
    from draco_ray.judging.limiter import Leases
    from draco_ray.judging.reply_cache import ReplyCache


def build_judge(
    config: JudgeConfig,
    leases: Leases | None = None,
    servers: Servers | None = None,
    *,
    replies: ReplyCache | None = None,
    own_replies: bool = False,
    prompts: Prompts | None = None,
) -> Judge:
    """The judge a configuration describes, over LiteLLM.

    Args:
        config: the judge's configuration.
        leases: taken before every request; None: no limits.
        servers: the servers of ``judge.local``.
        replies: the reply store; None: the folder ``config.cache``, if set.
        own_replies: whether the store belongs to one run; the judge's cache keys then do not contain its endpoint.
        prompts: result of `prompts_of` on another host; None: read here.

    Raises:
        ConfigError: the prompt set cannot be used.
    """
    from draco_ray.judging.reply_cache import ReplyCache

    cache = ReplyCache(config.cache) if replies is None and config.cache is not None else replies

    def open_one(judge: JudgeConfig) -> Completer:
        configured = (judge.model, judge.api_base) == (config.model, config.api_base)
        return open_model(
            judge,
            cache,
            leases=leases,
            servers=servers if judge.local.enabled else None,
            endpoint_counts=not (own_replies and configured),
        )

    return panel_judge(config, prompts or prompts_of(config), with_fallbacks(config, open_one), open_one, cache)


def open_model(
    config: JudgeConfig,
    cache: ReplyCache | None,
    *,
    leases: Leases | None,
    servers: Servers | None = None,
    endpoint_counts: bool = True,
) -> Completer:
    """The completer of ``judge.model``: files of a directory, or LiteLLM; for the arguments see `LiteLLMClient`."""
    if config.files is not None:
        return FileJudge(config.files, config.model)
    from draco_ray.judging.client import LiteLLMClient

    return LiteLLMClient(config, cache, leases=leases, servers=servers, endpoint_counts=endpoint_counts)


def prompts_of(config: JudgeConfig) -> Prompts:
    """The prompt set of a configuration, with its evidence key, environment facts and examples.

    Raises: see `load_prompts`, `evidence_key`, `examples_of`.
    """
    return load_prompts(
        config.prompts, evidence_key(config.files or config.cache), config.environment_facts, examples_of(config)
    )


def file_digests(config: DracoConfig) -> dict[str, str]:
    """SHA-256 digests of the contents of the judge's files (prompts, examples, static rubrics), by key and path.

    Raises:
        ConfigError: one of them cannot be used.
    """
    algorithm, judge = config.algorithm, config.judge
    contents: dict[str, object] = {f"judge.prompts={judge.prompts}": dict(load_prompts(judge.prompts).templates)}
    if judge.examples is not None:
        contents[f"judge.examples={judge.examples}"] = examples_of(judge)
    static = algorithm.static_rubric if algorithm.rubric == "static" else None
    held_out = None if judge.held_out is None else judge.held_out.rubric
    for key, path in (("algorithm.static_rubric", static), ("judge.held_out.rubric", held_out)):
        if path is not None:
            contents[f"{key}={path}"] = [asdict(criterion) for criterion in load_static_rubric(path)]
    return {name: hashlib.sha256(json.dumps(content).encode()).hexdigest() for name, content in contents.items()}


def build_self_judge(
    config: JudgeConfig, samplers: Sequence[Any], tokenizer: Any, name: str, prompts: Prompts | None = None
) -> Judge:
    """The policy behind ``samplers`` as its own judge; ``prompts``: see `build_judge`.

    Raises:
        ConfigError: the prompt set or the chat template cannot be used.
    """
    from draco_ray.judging.self_judge import SelfJudgeClient

    complete = SelfJudgeClient(samplers, tokenizer, config, model=f"self/{name}")
    return Judge(complete, prompts or prompts_of(config), config)
