"""The judges that an analysis can ask: the rule judge in this process, or any LiteLLM model."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from draco_ray.config.schema import (
    RULE_JUDGE,
    DracoConfig,
    JudgeConfig,
    LocalJudgeConfig,
    RuleJudgeConfig,
    SelfJudgeConfig,
)
from draco_ray.errors import ConfigError
from draco_ray.judging.completion import Completer, Completion, Request
from draco_ray.judging.endpoint import describe_judge
from draco_ray.registry import find_component
from draco_ray.sandbox.rule_judge.answering import answer
from draco_ray.sandbox.rule_judge.noise import ANSWER_FUNCTIONS, Noise

log = logging.getLogger(__name__)

OWN_JUDGE = "own"
"""Name of a run's own judge on the command line; asking it again measures how far a judge agrees with itself."""
POLICY_JUDGE = "policy"
"""Name of a run's own policy on the command line: the previous step's checkpoint judges each step."""


class RuleCompleter:
    """The rule judge without its server: a `draco_ray.judging.completion.Completer`."""

    def __init__(self, rules: Callable[[str], tuple[str | None, str]] = answer) -> None:
        """``rules``: function that answers a prompt; default: the sandbox's rules."""
        self._rules = rules

    async def __call__(self, request: Request) -> Completion:
        """Answer the request's first message; the rules ignore later messages."""
        _, text = self._rules(request.messages[0].content)
        return Completion(text=text, finish_reason="stop", model=RULE_JUDGE, started_at=0.0, seconds=0.0)

    async def forget(self, request: Request) -> None:
        """Do nothing: no answer is kept."""

    async def check(self) -> None:
        """Do nothing: the rule judge runs in this process and always answers."""


def configured_rules(config: JudgeConfig, seed: int) -> RuleCompleter:
    """The rule judge of a configuration, with the rules and the noise configured there.

    Raises:
        ConfigError: ``judge.rule_judge.use`` names nothing.
    """
    noise = config.rule_judge.model_dump(include={"false_pass", "false_fail", "wrong_step", "missed_criterion"})
    answers = find_component("judge.rule_judge.use", config.rule_judge.use, ANSWER_FUNCTIONS)
    return RuleCompleter(Noise(**noise, seed=seed).blur(answers))


def configures_judge(config: DracoConfig) -> bool:
    """Whether a configuration names a judge."""
    judge = config.judge
    return "model" in judge.model_fields_set or judge.rule_judge.start or judge.self_judge.enabled


@dataclass(frozen=True, kw_only=True)
class NamedJudge:
    """A judge, as named on the command line."""

    model: str
    """LiteLLM model name, `RULE_JUDGE`, `OWN_JUDGE` (the judge of the run's configuration) or `POLICY_JUDGE`."""
    api_base: str | None = None
    """Endpoint; None: the one configured for this model, else the provider's."""
    api_key_env: str | None = None
    """Environment variable with the API key; None: the one configured for this model, else ``<PROVIDER>_API_KEY``."""

    def __post_init__(self) -> None:
        """Reject an endpoint for a judge that runs locally. Raises: ConfigError."""
        if self.model in (RULE_JUDGE, POLICY_JUDGE) and (self.api_base is not None or self.api_key_env is not None):
            raise ConfigError(f"judge {self.model}: runs in this process; leave out endpoint and key")


def judge_config(config: JudgeConfig, judge: NamedJudge, cache: Path | None) -> JudgeConfig:
    """``config`` with another judge: keeps prompts, sampling, attempts and prices; if the model is unchanged, also
    endpoint, key and extra body.

    Args:
        config: the judge configuration to change.
        judge: the judge to ask.
        cache: folder of the durable reply cache; not used for the rule judge, which answers faster than a disk.

    Raises:
        ConfigError: the run's own judge was its policy, which changes with every step, or a server that has ended.
    """
    model, rules = judge.model, RuleJudgeConfig()
    if model == OWN_JUDGE:
        _check_own(config, judge)
        model, rules = RULE_JUDGE if config.rule_judge.start else config.model, config.rule_judge
    kept = config if model == config.model else JudgeConfig()
    return config.model_copy(
        update={
            "model": model,
            "api_base": judge.api_base or kept.api_base,
            "api_key_env": judge.api_key_env or kept.api_key_env,
            "extra_body": kept.extra_body,
            "rule_judge": rules,
            "self_judge": SelfJudgeConfig(),
            "local": LocalJudgeConfig(),
            "cache": None if model == RULE_JUDGE else cache,
        }
    )


def _check_own(config: JudgeConfig, judge: NamedJudge) -> None:
    """Refuse a run's own judge that cannot be asked again. Raises: ConfigError."""
    if config.self_judge.enabled:
        raise ConfigError(
            "--judge own: this run's judge was its own policy, which changed at every step; to ask its checkpoints "
            f"use --judge {POLICY_JUDGE}"
        )
    if config.local.enabled and judge.api_base is None:
        raise ConfigError(
            f"--judge own: this run's judge {config.model} was served by the run itself; serve it again (`vllm "
            "serve`) and set --api-base to its endpoint"
        )


def judge_description(named: str, config: JudgeConfig) -> str:
    """Description of the judge and its endpoint, printed before the first request."""
    return named if named == POLICY_JUDGE or config.model == RULE_JUDGE else describe_judge(config)


def folder_name(judge: str) -> str:
    """A judge's folder for its tables.

    >>> folder_name("openai/gpt-5.4")
    'openai_gpt-5.4'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "_", judge).strip(".") or "judge"


def open_completer(config: JudgeConfig, seed: int = 0) -> Completer:
    """A completer: the rule judge if the model is `RULE_JUDGE`, otherwise LiteLLM with the durable cache of ``config``.

    ``seed``: the run's seed, for the noise of its rule judge.
    """
    if config.model == RULE_JUDGE:
        return configured_rules(config, seed)
    from draco_ray.judging.build import open_model
    from draco_ray.judging.reply_cache import ReplyCache

    if config.jury:
        log.warning(
            "judge.jury has %d further judges, which are not used here; only %s is used",
            len(config.jury),
            config.model,
        )
    return open_model(config, None if config.cache is None else ReplyCache(config.cache), leases=None)
