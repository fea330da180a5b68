"""The configuration: one typed tree. Every default is the paper's (Table "hparams"), every typo stops the run.

Imports only pydantic and the standard library, so that ``draco train --help`` is quick and nothing heavy loads before
the configuration is validated. Each part of the program receives only its subtree, never the root.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.functional_serializers import SerializeAsAny
from pydantic_core import PydanticCustomError

from draco_ray.config.file_names import FileName
from draco_ray.config.plans import with_plan
from draco_ray.config.vllm_arguments import argument_problem
from draco_ray.registry import find_component

CONFIRMED: dict[str, Any] = {"confirmed": ""}
"""Marks a key that starts a program, sends an API key or prompts somewhere, weakens the jail or names a place to write.
If another user's run directory sets such a key, `draco_ray.config.load` refuses it until the user confirms it."""
CONFIRMED_PATH: dict[str, Any] = {"confirmed": ":"}
"""Like `CONFIRMED`, but only values with a colon need confirmation: they name code to import. A value without a colon
names a part that is built in or registered by an installed package."""
CONFIRMED_URL: dict[str, Any] = {"confirmed": "://"}
"""Marks a key with a model's name, which for LiteLLM may contain the address to which prompts and API key are sent."""


def _absolute(name: str) -> str:
    """Make the file path in a part's name absolute, because workers may have another working directory."""
    file, colon, attribute = name.rpartition(":")
    return f"{Path(file).resolve()}:{attribute}" if colon and file.endswith(".py") else name


def _compiles(expression: str) -> str:
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return expression


Part = Annotated[str, AfterValidator(_absolute), Field(json_schema_extra=CONFIRMED_PATH)]
"""Name of a part that users can replace, such as an agent or an advantage rule; see `draco_ray.registry`."""


class ConfigSection(BaseModel):
    """A node of the configuration: unknown keys are errors, values are frozen, docstrings are the help."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse booleans for numbers, because pydantic accepts true as 1."""
        if isinstance(value, bool) and not _takes_truth(cls.model_fields[str(info.field_name)].annotation):
            raise PydanticCustomError("no_truth", "true and false are not allowed here")
        return value


def _takes_truth(annotation: Any) -> bool:
    return annotation in (bool, Any, object) or any(map(_takes_truth, get_args(annotation)))


class DataConfig(ConfigSection):
    """Where tasks come from and in which order they are trained on."""

    root: Path = Path("data/appworld")
    """Folder with the environment's tasks. For AppWorld it contains ``data/`` with ``tasks/``, ``base_dbs/``,
    ``api_docs/`` and ``datasets/``: official AppWorld data, or a sandbox built by ``draco sandbox build``."""
    train_split: FileName = "train"
    """Split to train on."""
    eval_split: FileName = "dev"
    """Split of the before/after evaluation; training never reads it."""
    eval_tasks: int | None = Field(None, ge=1)
    """Evaluate only this many tasks, the first of the split; null: all."""


class ModelConfig(ConfigSection):
    """The policy's frozen base model."""

    path: str = "Qwen/Qwen3.6-27B"
    """Model directory or hub name, with its tokenizer and chat template."""
    chat_template: str | None = None
    """Chat template: a Jinja file or hermes (part of this package), e.g. for a model whose own template has no tools;
    null: the tokenizer's. The run directory stores the template's text."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of the frozen base; the adapter is always float32 in the learner."""


class AgentConfig(ConfigSection):
    """The agent's loop and its limits."""

    use: Part = "code"
    """code (a loop like AppWorld's ReAct code agent), tool_calling (tools in the model's chat template), command (your
    program, which calls an OpenAI-compatible endpoint; docs/any-agent.md), verifiers (a harness of that package, with
    environment.use=verifiers), or your own package.module:Class or folder/file.py:Class."""
    command: str | None = Field(None, json_schema_extra=CONFIRMED)
    """With agent.use=command: the command that plays one episode. It is not run by a shell. If its first word is
    python, it is run by the interpreter that runs draco."""
    function: Part | None = None
    """Instead of a command: a Python function, package.module:name or folder/file.py:name, which runs in its own
    process."""
    harness: str | None = Field(None, json_schema_extra=CONFIRMED)
    """Instead of agent.command, with environment.use=workspace: the coding agent that plays the episodes, which is
    claude-code, codex, mini-swe-agent, opencode, or a YAML file that describes your own (docs/coding-agents.md)."""
    container: str | None = Field(None, json_schema_extra=CONFIRMED)
    """With environment.use=workspace: a command, e.g. docker run, that starts a container for the agent instead of the
    jail (docs/coding-agents.md)."""
    folder: Path = Field(Path("."), json_schema_extra=CONFIRMED)
    """Working directory of the command."""
    pass_environment: tuple[str, ...] = Field((), json_schema_extra=CONFIRMED)
    """Additional environment variables for the command, besides PATH, HOME and similar ones: e.g. keys of services."""
    side_calls: tuple[Annotated[str, AfterValidator(_compiles)], ...] = ()
    """Regular expressions that mark requests without credit, e.g. for a title or a summary of the history. Each is
    searched in the first and in the last message with the role system or user."""
    timeout_seconds: float = Field(3600.0, gt=0)
    """Time limit for one run of the command; when it is exceeded, all processes of the command are ended."""
    tool_parser: str | None = None
    """How tool calls are parsed: a tool parser of vLLM, e.g. hermes (Qwen2.5, Qwen3), qwen3_xml (Qwen3.5, Qwen3.6) or
    llama3_json; null: derived from how the chat template writes calls."""
    prompt: Path | None = None
    """Prompt template; a relative path is looked up in the working directory, then where the project is installed.
    null: the environment's, for AppWorld prompts/agent_think.txt."""
    thinking: bool = True
    """Whether turns open with a <think> block: selects the chat template's thinking mode."""
    max_turns: int = Field(50, ge=1)
    """Maximum turns of a rollout, which ends as turn_limit after them."""
    max_prompt_length: int = Field(4096, ge=1)
    """Maximum tokens of a task's prompt; tasks with longer prompts are not trained on."""
    max_response_length: int = Field(24576, ge=1)
    """Maximum tokens after the prompt: turns, chat template and tool output."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Maximum tokens sampled in one turn; null: the rest of max_response_length, as in the paper."""
    max_output_characters: int = Field(20000, ge=100)
    """Length to which a tool output is truncated; a note says how much is missing."""
    closing_turn: Literal["step", "gap"] | None = None
    """Whether the final message of an episode is a step, which gets credit, or a gap, which gets none; null: a gap for
    agent.use=code, as in the paper, and a step for all other agents."""


class EnvironmentConfig(ConfigSection):
    """Where tasks are done, one at a time in each slot."""

    use: Part = "appworld"
    """appworld; tools (your tasks and tools, docs/own-agent.md); tasks (only tasks, for agents with their own world,
    docs/any-agent.md); workspace (a copy of a repository per rollout, docs/coding-agents.md); tau (retail, airline or
    telecom of tau2-bench, docs/tau_bench.md); verifiers (any taskset of that package, docs/verifiers.md); or your own
    package.module:Class or folder/file.py:Class (docs/extending/environment.md)."""
    options: dict[str, Any] = Field(default_factory=dict, json_schema_extra=CONFIRMED)
    """Options that the environment defines."""
    slots: int = Field(48, ge=1)
    """Maximum number of concurrent rollouts."""
    min_slots: int | None = Field(None, ge=1)
    """Minimum number of slots; more, up to ``slots``, are added while rollouts wait, with nodes from an autoscaler if
    there is one. null: always all."""
    idle_seconds: float = Field(300.0, gt=0)
    """Idle time after which a worker above ``min_slots`` ends, so that its node can be released. Choose it longer than
    a step waits for judge and learner; otherwise slots are restarted in every step."""
    slots_per_worker: int = Field(1, ge=1)
    """Slots (server processes) per RolloutWorker actor."""
    cpus_per_worker: float = Field(1.0, ge=0)
    """CPUs per RolloutWorker actor."""
    appworld_python: str | None = Field(None, json_schema_extra=CONFIRMED)
    """Python of AppWorld's virtual environment; null: DRACO_APPWORLD_PYTHON, else .venv-appworld/bin/python."""
    isolation: Literal["auto", "namespaces", "bubblewrap", "landlock", "rlimits"] = Field(
        "auto", json_schema_extra=CONFIRMED
    )
    """Isolation of the process that runs model-written code; auto: the strongest level the host allows, but never
    rlimits."""
    cell_timeout_seconds: float = Field(125.0, gt=0)
    """Time limit of a code cell. AppWorld interrupts a cell with an error message at 80 % of this limit; the default
    gives AppWorld's own 100 s. If the cell does not stop, its process is killed at the limit, and the rollout fails."""
    start_timeout_seconds: float = Field(60.0, gt=0)
    """Maximum time for an environment to start."""
    max_memory_mib: int = Field(1536, ge=256)
    """Maximum memory of a task's process."""
    max_output_bytes: int = Field(1_000_000, ge=1000)
    """Maximum output of a cell; further output is discarded as it is printed."""
    recycle_after_tasks: int = Field(50, ge=1)
    """With environment.use=verifiers: number of episodes per slot after which a worker's server is replaced. AppWorld
    starts a new server for every task."""
    rollout_retries: int = Field(1, ge=0)
    """Retries of a rollout after server errors before the group continues without it."""

    @property
    def slots_of_worker(self) -> int:
        """Slots per RolloutWorker actor."""
        return min(self.slots_per_worker, self.slots)

    @property
    def workers(self) -> int:
        """Maximum number of RolloutWorker actors."""
        return -(-self.slots // self.slots_per_worker)

    @property
    def min_workers(self) -> int:
        """Minimum number of RolloutWorker actors."""
        return -(-(self.min_slots or self.slots) // self.slots_per_worker)

    @model_validator(mode="after")
    def _elastic(self) -> Self:
        if self.min_slots is not None and self.min_slots > self.slots:
            raise ValueError(f"environment.min_slots={self.min_slots} is more than environment.slots={self.slots}")
        return self


class EngineConfig(ConfigSection):
    """Policy engines (vLLM)."""

    engines: int = Field(1, ge=1)
    """Number of vLLM engines."""
    min_engines: int | None = Field(None, ge=1)
    """Minimum number of engines with which a run starts and continues; more, up to ``engines``, are used when the
    cluster has room for them (spot nodes). null: all."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs over which an engine's weights are split."""
    gpus_per_engine: float = Field(1.0, ge=0)
    """GPUs per engine; 0: vLLM's CPU build. With colocate an engine reserves fractions of its GPUs, and this is their
    sum, e.g. 1.2 for 0.6 of each of two GPUs."""
    cpus_per_engine: float = Field(1.0, ge=0)
    """CPUs per PolicyEngine actor. A CPU engine uses this many threads, divided among its tensor-parallel ranks, at
    least one each."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of a whole GPU's memory, even if the engine has only a part of a GPU."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """KV cache of an engine in GiB; null: on a GPU the rest of gpu_memory_utilization, on the CPU 1."""
    max_num_seqs: int = Field(64, ge=1)
    """Maximum number of sequences an engine decodes concurrently."""
    enforce_eager: bool = False
    """Run without CUDA graphs: starts sooner, decodes slower."""
    temperature: float = Field(1.0, ge=0)
    """Temperature of the policy's sampling."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: share of the probability mass to sample from."""
    top_k: int = Field(-1, ge=-1)
    """Number of most likely tokens to sample from; -1: all."""
    canary_tolerance: float = Field(0.05, gt=0)
    """Mean |engine - learner| log-prob gap in nats that is always accepted after a sync. A larger gap stops the run if
    it exceeds both twice the first step's gap and twice the gap without the adapter, or if the gap without the adapter
    exceeds four times this tolerance. An engine that serves the base model is detected at any gap."""
    max_failures: int = Field(3, ge=0)
    """Maximum replacements of an engine's process before the run stops; lost nodes do not count."""
    stall_seconds: float = Field(600.0, gt=0)
    """Time without progress on a request after which an engine's process is replaced."""
    adapter_directory: Path = Field(Path("/dev/shm/draco-ray"), json_schema_extra=CONFIRMED)
    """Folder for engines' sockets and the adapter files they load."""
    deterministic: bool = False
    """Compute the same numbers on any CPU with the same instructions, however many cores it has: one thread per
    process, one sequence at a time, no prefix cache, and gradients added in the batch's order. Slower; `draco verify`
    can then recompute the adapters."""
    colocate: bool = False
    """Engines and learner take turns on the same GPUs. The learner begins only when a step is generated and judged;
    while it computes, the engines sleep (base weights in host memory, no KV cache)."""
    vllm: dict[str, Any] = Field(default_factory=dict, json_schema_extra=CONFIRMED)
    """Other arguments of vLLM's AsyncEngineArgs, e.g. {kv_cache_dtype: fp8} or {speculative_config: {method: ngram,
    num_speculative_tokens: 4}}. Arguments that other keys set, or that the engine depends on, are refused."""

    @property
    def fewest(self) -> int:
        """Minimum number of engines for the run to continue."""
        return self.engines if self.min_engines is None else self.min_engines

    @model_validator(mode="after")
    def _elastic(self) -> Self:
        if self.fewest > self.engines:
            raise ValueError(f"engine.min_engines={self.min_engines} is more than engine.engines={self.engines}")
        if self.colocate and self.fewest < self.engines:
            raise ValueError(
                f"engine.min_engines={self.min_engines}: with engine.colocate the run needs every engine, because "
                "each shares its GPUs with the learner; expected null"
            )
        return self

    @field_validator("vllm")
    @classmethod
    def _vllm(cls, arguments: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if (problem := argument_problem(arguments, cpu=info.data.get("gpus_per_engine") == 0)) is not None:
            raise ValueError(problem)
        return arguments


class TokenPrices(ConfigSection):
    """Dollars per million tokens."""

    input: float = Field(ge=0)
    cached_input: float | None = Field(None, ge=0)
    """Price of input that is read from the provider's prompt cache; null: the input price."""
    cache_write: float | None = Field(None, ge=0)
    """Price of input that is written to the provider's prompt cache; null: the input price."""
    output: float = Field(ge=0)


class PriceTier(TokenPrices):
    """Prices of requests whose input is longer than ``above`` tokens; they apply to all tokens of the request."""

    above: int = Field(ge=0)


class Price(TokenPrices):
    """Token prices of a model."""

    tiers: tuple[PriceTier, ...] = ()
    """Prices of longer requests."""


LOCAL_PROVIDER = "hosted_vllm/"
"""LiteLLM's prefix for a self-hosted vLLM server."""
RULE_JUDGE = "rules"
"""Name of the offline rule judge of the sandbox."""
FILES_PREFIX = "files:"
"""Prefix of a judge that answers through files in a directory (`draco_ray.judging.file_judge`)."""


def _with_absolute_path(model: str) -> str:
    if not model.startswith(FILES_PREFIX):
        return model
    folder = model.removeprefix(FILES_PREFIX)
    if not folder or Path(folder).is_file():
        raise ValueError(f"{model}: expected files: and the path of a directory, e.g. files:answers")
    # Make the path absolute, because judge workers have other working directories.
    return f"{FILES_PREFIX}{Path(folder).absolute()}"


Model = Annotated[str, AfterValidator(_with_absolute_path)]
NonEmptyStr = Annotated[str, Field(min_length=1)]
"""A text that is not empty."""


def provider_key(model: str) -> str:
    """The environment variable that holds the key of a model's provider.

    >>> provider_key("anthropic/claude-sonnet-4-5"), provider_key("gpt-5.4")
    ('ANTHROPIC_API_KEY', 'OPENAI_API_KEY')
    """
    provider, slash, _ = model.partition("/")
    return f"{provider.upper() if slash else 'OPENAI'}_API_KEY"


class RuleJudgeConfig(ConfigSection):
    """The offline stand-in for a frontier judge: explicit rules behind a real HTTP server (`draco judge-server`)."""

    start: bool = False
    """Start the rule judge's server on this machine and send every judge call there; sets model, api_base and key."""
    use: Part = "sandbox"
    """The rules: the sandbox's, or your function, package.module:function or folder/file.py:function
    (docs/extending/environment.md)."""
    latency_seconds: float = Field(0.0, ge=0)
    """Delay of each reply."""
    false_pass: float = Field(0.0, ge=0, le=1)
    """Share of FAIL verdicts turned into PASS, to measure the effect of judge errors (`make bench-noise`)."""
    false_fail: float = Field(0.0, ge=0, le=1)
    """Share of PASS verdicts turned into FAIL."""
    wrong_step: float = Field(0.0, ge=0, le=1)
    """Share of cited steps replaced by another step of the rollout."""
    missed_criterion: float = Field(0.0, ge=0, le=1)
    """Share of criteria omitted by stage 1 and stage 2."""


class SelfJudgeConfig(ConfigSection):
    """The trained policy as its own judge (Section "Ablations", "Self-judge")."""

    enabled: bool = False
    """Answer the judge's prompts with the current policy; model, api_base and key are then unused."""
    thinking: bool = True
    """Whether the chat template's thinking mode is on for judge prompts."""
    context_tokens: int | None = Field(None, ge=1024)
    """Maximum length of judge prompt and reply together, for which engines reserve context; null: enough for the union
    of a group of full-length rollouts (`draco plan` prints it). Longer prompts are cut."""


class LocalJudgeConfig(ConfigSection):
    """The judge model on the run's own cluster: vLLM servers, scaled with the number of calls (docs/cluster.md)."""

    enabled: bool = False
    """Serve the model of ``judge.model``, hosted_vllm/<hub name or folder>; sets endpoint and key."""
    replicas: int = Field(1, ge=1)
    """Initial and minimum number of servers."""
    max_replicas: int = Field(4, ge=1)
    """Maximum number of servers, added when calls wait; at least ``replicas``."""
    calls_per_replica: int = Field(32, ge=1)
    """Maximum number of concurrent calls per server."""
    idle_seconds: float = Field(300.0, gt=0)
    """Idle time after which a server above ``replicas`` ends and frees its GPUs."""
    start_timeout_seconds: float = Field(1800.0, gt=0)
    """Maximum time for a server to load, including that for a new node; calls wait this long while none is up."""
    stall_seconds: float = Field(60.0, gt=0)
    """Time without a token after which a server is probed; it is replaced if it does not answer the probe within the
    same time."""
    context_tokens: int | None = Field(None, ge=1024)
    """Maximum length of prompt and reply together; null: the model's."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of the served weights; auto: the model's."""
    gpus_per_replica: float = Field(1.0, ge=0)
    """GPUs per server; 0: vLLM's CPU build."""
    cpus_per_replica: float = Field(1.0, ge=0)
    """CPUs that Ray reserves for a server."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs over which a server's weights are split."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory that a server uses."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """KV cache on the CPU in GiB; null: 1."""
    arguments: tuple[str, ...] = Field((), json_schema_extra=CONFIRMED)
    """Other arguments of ``vllm serve``, e.g. --reasoning-parser, mistral, for a judge that reasons without <think>."""


class JudgeLimits(ConfigSection):
    """Limits of all judge workers together; null: no limit."""

    requests_per_minute: float | None = Field(None, ge=1)
    """Requests per minute."""
    tokens_per_minute: float | None = Field(None, ge=1)
    """Input and output tokens per minute; a running request counts with an estimate from similar requests plus a
    margin."""
    dollars: float | None = Field(None, ge=0)
    """Budget of the judge's calls in dollars, over the whole run including all resumes. If a call could exceed it, the
    call is not made; the run stops and can be resumed. A request that may have been billed, but whose reply or token
    usage is unknown, counts with its maximum cost."""


class OtherJudgeConfig(ConfigSection):
    """An additional judge; other settings are those of the main judge."""

    model: Model
    """LiteLLM model name with provider prefix."""
    api_base: NonEmptyStr | None = None
    api_key_env: NonEmptyStr | None = None
    """Environment variable with the key; null: ``<PROVIDER>_API_KEY``."""


class HeldOutJudgeConfig(OtherJudgeConfig):
    """A judge that scores rollouts of a share of the groups and is never trained on (docs/faults.md)."""

    model: Model = ""
    """LiteLLM model name with provider prefix; empty: the judge's own model, which needs ``rubric``."""
    rubric: Path | None = None
    """File with the criteria that it scores by, as for algorithm.static_rubric; null: the rubric of the group."""
    share: float = Field(0.75, gt=0, le=1)
    """Fraction of the groups that the held-out judge scores. In each it scores the half of the rollouts with the
    highest rewards and one rollout of the other half, at most G/2 + 1 of G rollouts, with score_votes calls each."""

    @model_validator(mode="after")
    def _differs(self) -> Self:
        if not self.model and self.rubric is None:
            raise ValueError("judge.held_out: expected another judge or rubric; set judge.held_out.model or .rubric")
        if not self.model and (self.api_base or self.api_key_env):
            raise ValueError("judge.held_out: api_base and api_key_env have no effect without judge.held_out.model")
        return self


class JudgeConfig(ConfigSection):
    """The judge: any LiteLLM model, or the policy itself."""

    rule_judge: RuleJudgeConfig = RuleJudgeConfig()
    self_judge: SelfJudgeConfig = SelfJudgeConfig()
    local: LocalJudgeConfig = LocalJudgeConfig()
    limits: JudgeLimits = JudgeLimits()

    model: Model = Field("openai/gpt-5.4", min_length=1, json_schema_extra=CONFIRMED_URL)
    """LiteLLM model name with provider prefix; or files:DIR, a directory to which prompts are written as numbered files
    and in which replies are awaited."""
    plan: Literal["paper", "default", "lean"] = "default"
    """What is asked of the judge: paper (20 calls for a group of 6), default (without calls that change little), lean
    (9 calls, 6 at later visits: algorithm.merge_proposals, merge_verdicts and rubric_visits). A plan sets only keys
    that are not set anywhere else; a run's own config.yaml sets them all."""
    api_base: NonEmptyStr | None = Field(None, json_schema_extra=CONFIRMED)
    """Endpoint; null: the provider's."""
    api_key_env: NonEmptyStr | None = Field(None, json_schema_extra=CONFIRMED)
    """Environment variable with the key; null: ``<PROVIDER>_API_KEY``. The key itself never appears in a configuration,
    log or command line."""
    temperature: float | None = Field(0.1, ge=0)
    """Temperature of the judge; null: not sent. It is not sent either if the model, according to LiteLLM, does not
    accept it."""
    max_tokens: int = Field(16384, ge=256)
    """Maximum tokens of a reply, including reasoning."""
    context_tokens: int | None = Field(None, ge=1024)
    """Context length of the judge, for prompt and reply; null: from LiteLLM's table or the served model's config.json.
    Longer prompts are cut: first outputs, then turns, then the agent's prompt, all to the same length with the cut
    marked; no step is omitted. If the length is unknown, prompts are cut once the judge rejects them as too long."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Reasoning effort, if the model supports it; null: not sent."""
    extra_body: dict[str, object] = Field(default_factory=dict)
    """Additional fields of the request, e.g. a reasoning switch."""
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """The provider's service tier: flex is cheaper and slower; null: not sent."""
    prompt_cache: Literal["auto", "on", "off"] = "auto"
    """Mark the prefix shared by a group's prompts for the provider's prompt cache: ``cache_control`` for Anthropic's
    models, ``prompt_cache_key`` for OpenAI's. auto: on unless ``api_base`` is set."""
    structured_output: bool = True
    """Request replies in a JSON schema until the endpoint refuses one. A schema prevents thinking in a model that is
    served without a reasoning parser, because such a model thinks in its reply."""
    jury: tuple[OtherJudgeConfig, ...] = Field((), json_schema_extra=CONFIRMED)
    """Additional judges that score every rollout: the majority verdict counts; without a majority, the main judge's."""
    strong: OtherJudgeConfig | None = Field(None, json_schema_extra=CONFIRMED)
    """Judge that decides only the criteria on which judge and jury differ."""
    fallbacks: tuple[OtherJudgeConfig, ...] = Field((), json_schema_extra=CONFIRMED)
    """Judges asked in turn if the judge fails to answer."""
    held_out: HeldOutJudgeConfig | None = Field(None, json_schema_extra=CONFIRMED)
    """Scores a few rollouts of some groups for comparison; its verdicts never reach a reward. See watch.drift."""
    prompts: Path = Path("prompts/judge")
    """Folder of the prompt set."""
    environment_facts: str | None = None
    """Facts about the environment for every judge prompt; null: the environment's own."""
    examples: Path | None = None
    """Labels exported from the page of `draco report`: verdicts that a person corrected are shown to the scoring call
    as examples. `draco agreement` measures whether that helps."""
    max_examples: int = Field(12, ge=1)
    """Maximum number of examples; the first in the file are used."""
    max_stage1_criteria: int = Field(15, ge=1)
    """Maximum number of stage 1 criteria; more are dropped."""
    max_stage2_criteria: int = Field(10, ge=1)
    """Maximum number of stage 2 criteria of a rollout; more are dropped."""
    max_union_criteria: int = Field(24, ge=1)
    """Maximum number of criteria of a group's rubric; more are dropped."""
    score_votes: int = Field(1, ge=1)
    """Scoring calls per rollout; a criterion passes only if it passes in all of them."""
    workers: int = Field(2, ge=1)
    """Initial and minimum number of JudgeWorker actors."""
    max_workers: int = Field(8, ge=1)
    """Maximum number of workers, added when calls wait; at least ``workers``."""
    concurrency_per_worker: int = Field(32, ge=1)
    """Maximum number of concurrent calls per worker; waiting calls cause workers to be added."""
    idle_seconds: float = Field(60.0, gt=0)
    """Idle time after which a worker above ``workers`` ends, so that its node can be released."""
    start_timeout_seconds: float = Field(1800.0, gt=0)
    """Maximum time for the first worker to start, including that for an autoscaled node."""
    request_timeout_seconds: float = Field(600.0, gt=0)
    """Time limit of a request."""
    max_attempts: int = Field(8, ge=1)
    """Maximum requests per call, which is retried after rate limits, timeouts and server errors. All failures of a call
    in one outage of the judge count as one request; see max_outage_seconds."""
    max_outage_seconds: float = Field(3600.0, ge=0)
    """Maximum length of an outage of the judge. During an outage judging is paused, and no call is dropped unless the
    outage uses up its last attempt; after this time the run stops and can be resumed. 0: only max_attempts applies."""
    max_backoff_seconds: float = Field(60.0, gt=0)
    """Maximum pause between two requests of a call."""
    reasks: int = Field(1, ge=0)
    """Retries for a reply that cannot be parsed; the new request quotes the error."""
    cache: Path | None = Field(None, json_schema_extra=CONFIRMED)
    """Folder of the durable reply cache; null: in the run directory."""
    stage1_across_epochs: bool = True
    """Reuse a task's stage 1 criteria in later epochs. false, as in the paper: write new ones in every epoch."""
    prices: dict[str, Price] = Field(
        default_factory=lambda: {
            "gpt-5.4": Price(input=2.5, output=15.0),
            "Qwen3.6-27B": Price(input=0.289, output=0.9),
            "Qwen2.5-32B-Instruct": Price(input=0.66, output=0.8),
        }
    )
    """Reference prices (Section "Evaluation") by model name without provider; for other models LiteLLM's prices
    apply."""

    @property
    def key_variable(self) -> str:
        """The environment variable that holds the key."""
        return self.api_key_env or provider_key(self.model)

    @property
    def files(self) -> Path | None:
        """Directory of a judge that answers through files; None for any other judge."""
        return Path(self.model.removeprefix(FILES_PREFIX)).absolute() if self.model.startswith(FILES_PREFIX) else None

    @model_validator(mode="after")
    def _held_out(self) -> Self:
        other, elsewhere = self.held_out, self.self_judge.enabled or self.rule_judge.start
        if other is None or other.rubric is not None or elsewhere:
            return self
        if (other.model, other.api_base) == (self.model, self.api_base):
            raise ValueError(
                f"judge.held_out: {other.model} is the judge itself, so both would get the same replies; expected "
                "another judge or rubric; set judge.held_out.model or .rubric"
            )
        return self

    @model_validator(mode="after")
    def _local(self) -> Self:
        if not self.local.enabled:
            return self
        if not self.model.startswith(LOCAL_PROVIDER) or self.model == LOCAL_PROVIDER:
            raise ValueError(
                f"judge.model={self.model}: judge.local.enabled cannot serve this model; expected "
                f"{LOCAL_PROVIDER}<name or folder>"
            )
        for name, given in (
            ("judge.api_base", self.api_base is not None),
            ("judge.rule_judge.start", self.rule_judge.start),
            ("judge.self_judge.enabled", self.self_judge.enabled),
        ):
            if given:
                raise ValueError(f"judge.local.enabled: cannot be combined with {name}; unset one of them")
        return self


class AlgorithmConfig(ConfigSection):
    """The reward, and how advantages are computed from it."""

    group_size: int = Field(6, ge=2)
    """G: rollouts per task."""
    reward: Literal["rubric", "outcome", "random"] = "rubric"
    """rubric (the judge's verdicts), outcome (the environment's evaluator; not outcome-blind) or random."""
    rubric: Literal["dynamic", "static"] = "dynamic"
    """dynamic: the judge writes a rubric for each task and its rollouts; static: one fixed list of criteria."""
    static_rubric: Path | None = None
    """File with the criteria of algorithm.rubric=static; null: the environment's, for AppWorld the paper's 21."""
    rule: Part = "draco"
    """How verdicts and citations become step advantages: draco, grpo (no step credit: vanilla GRPO on the reward),
    no_dropout, mixed_only, no_std, score_verdicts, draco_calibrated, or your own package.module:Class or
    folder/file.py:Class."""
    reliability: float | None = Field(None, ge=0, le=1)
    """For draco_calibrated: share of the advantage that follows the judge's citations; the rest is spread evenly. 1 is
    the paper's rule, 0 is uniform GRPO; `draco agreement` and `draco attribution-bench --labels` recommend a value."""
    std_epsilon: float = Field(1e-6, ge=0)
    """Constant added to the standard deviation of a group's rewards, by which advantages are divided (as in verl)."""
    skip_useless_credit_calls: bool = True
    """Skip credit calls that cannot change the update: those of groups with equal rewards or without surviving
    criteria. Their citations are missing from the record."""
    skip_inert_credit_calls: bool = False
    """Skip the credit call of a rollout whose surviving verdicts are unanimous or not applicable: Eq. credit then gives
    every step the same total, whichever steps are cited. Changes the update if the call would have overridden a
    verdict."""
    credit_surviving_only: bool = True
    """Send only surviving criteria to the credit call. The others do not affect the step quality, but the paper's
    prompt contains them, so the judge may answer differently."""
    merge_proposals: bool = False
    """Ask once for the stage 2 criteria of all rollouts of a group, or twice if the prompt exceeds the judge's
    context. The call waits for the group's last rollout."""
    merge_verdicts: bool = False
    """Ask for a rollout's verdicts and the steps that they cite in one call, if the rule uses citations."""
    rubric_visits: int | None = Field(None, ge=1)
    """Number of visits of a task in which criteria are proposed. The second and later visits add to the previous
    visit's rubric; after this number of visits it no longer changes. null: a new rubric at every visit."""


ImportanceLevel = Literal["token", "sequence", "geometric"]
MaskLevel = Literal["token", "sequence", "geometric", "any_token"]


class LearnerConfig(ConfigSection):
    """The learner; the built-in one does GRPO on a LoRA adapter."""

    use: Part = "ray_lora"
    """ray_lora (Ray Train workers), or your own package.module:Class or folder/file.py:Class."""
    options: dict[str, object] = Field(default_factory=dict)
    """Options that your learner defines; ray_lora has none."""
    workers: int = Field(1, ge=1)
    """Number of Ray Train workers."""
    sharding: Literal["none", "full"] = "none"
    """Whether each worker holds the whole base model, or only a shard of it and one complete layer at a time
    (FSDP2)."""
    base_precision: Literal["model", "int8", "fp8"] = "model"
    """Storage of the frozen base's linear layers: in model.dtype, or in 8 bits with a scale per output row, dequantized
    for each product. The engine does not quantize, so its log-probs differ more (engine_k1, engine_k3)."""
    context_parallel: int = Field(1, ge=1)
    """Workers that share each forward pass, for sequences too long for one: each computes a shard of the tokens, and
    attention for a shard of the heads (Ulysses). Must divide workers and the model's heads."""
    gpus_per_worker: float = Field(1.0, ge=0)
    """GPUs per worker; 0: learn on the CPU."""
    cpus_per_worker: float = Field(1.0, ge=0)
    """CPUs that Ray reserves for a worker."""
    lora_rank: int = Field(16, ge=1)
    """Rank of the adapter."""
    lora_alpha: int = Field(32, ge=1)
    """The adapter is scaled by lora_alpha / lora_rank."""
    lora_target: str = "all-linear"
    """Modules to adapt: all-linear, or a regex of their names. In a mixture of experts, all-linear excludes experts and
    router, which stay frozen."""
    learning_rate: float = Field(5e-5, gt=0)
    """Learning rate, constant without warm-up."""
    sft_learning_rate: float | None = Field(None, gt=0)
    """Learning rate of `draco sft`; null: learning_rate."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's beta1."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW's beta2."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    clip_low: float = Field(0.2, ge=0)
    """The probability ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """The probability ratio is clipped at 1 + clip_high."""
    dual_clip: float = Field(3.0, gt=1)
    """Dual clip: bound of the loss for negative advantages, in multiples of the advantage."""
    importance_cap: float | None = Field(None, ge=1)
    """Maximum importance weight p(at the step's start) / p(at sampling) of a token, by which its policy loss is
    multiplied (decoupled PPO, truncated). null: 2 with train.staleness, otherwise no importance weights."""
    importance_level: ImportanceLevel = "token"
    """The ratio that importance_cap bounds: the token's, or the product or geometric mean of its sequence's ratios."""
    mask_low: float | None = Field(None, ge=0)
    """Tokens whose ratio p(at the step's start) / p(at sampling) is lower are excluded from the policy loss; null:
    none."""
    mask_high: float | None = Field(None, gt=0)
    """Tokens whose ratio, as for mask_low, is higher are excluded from the policy loss; null: none."""
    mask_level: MaskLevel = "token"
    """The ratio that mask_low and mask_high bound: the token's own (token) or that of its sequence (sequence or
    geometric, as in importance_level). any_token: if one token's own ratio is outside the bounds, its whole sequence is
    excluded."""
    kl_coefficient: float = Field(0.01, ge=0)
    """Weight of the loss term for the KL divergence from the base model (k3 estimate)."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the loss term for entropy."""
    minibatch_prompts: int = Field(8, ge=1)
    """Prompts (groups) per optimizer update, as verl interprets "minibatch size 8"."""
    micro_batch_tokens: int = Field(32768, ge=1)
    """Maximum tokens of a micro-batch, with a prompt shared by rollouts counted once; a longer sequence gets its
    own."""
    logprob_chunk_tokens: int = Field(1024, ge=1)
    """Maximum tokens whose logits exist at the same time."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass instead of storing them; null: on GPUs, and on a CPU if they would
    take more than half of the free memory. Storing them is 20 % faster."""
    offload_activations: bool = False
    """Store in host memory the layer inputs that gradient_checkpointing keeps."""
    compile: bool = False
    """Compile the decoder's norms and gated MLPs with torch.compile; needs a C++ compiler on a CPU, Triton on a GPU."""
    max_failures: int = Field(3, ge=0)
    """Maximum restarts of failed workers between two checkpoints before the run stops."""
    stall_seconds: float = Field(600.0, gt=0)
    """Time without an answer from a worker's process after which the workers are restarted; a healthy process answers
    even during long passes."""
    hang_seconds: float = Field(1800.0, gt=0)
    """Seconds without a completed layer after which busy workers are restarted, e.g. because a kernel hangs; also the
    time limit of collective operations."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        low, high = self.mask_low, self.mask_high
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"learner.mask_low={low:g} is above learner.mask_high={high:g}, so every token would be excluded; "
                "expected a range of ratios, such as 0.5 to 2"
            )
        if self.workers % self.context_parallel:
            raise ValueError(
                f"learner.context_parallel={self.context_parallel} does not divide learner.workers={self.workers}; "
                "expected a divisor"
            )
        if self.offload_activations and self.gradient_checkpointing is False:
            raise ValueError(
                "learner.offload_activations without learner.gradient_checkpointing would move all activations to the "
                "host and back; set both, or neither"
            )
        return self


class TrainConfig(ConfigSection):
    """The training loop: its steps and epochs, checkpoints and evaluations."""

    prompts_per_step: int = Field(16, ge=1)
    """B: tasks per step."""
    epochs: int = Field(20, ge=1)
    """Passes over the training split."""
    steps: int | None = Field(None, ge=0)
    """Number of steps; null: derived from epochs."""
    skip_solved: int | None = Field(None, ge=1)
    """Number n: if the judge fails no criterion of any rollout of a task in n consecutive visits, the task is skipped
    for n epochs. Uses no ground truth. null: every task is visited in every epoch, as in the paper."""
    staleness: int = Field(0, ge=0, le=8)
    """Number of steps that may run ahead: their rollouts begin while the last rollouts of the current step are judged
    and learned from, with an adapter at most this many versions old. A long rollout continues across steps, each turn
    with the current adapter; learner.importance_cap corrects for this. 0: exactly on-policy."""
    checkpoint_every: int = Field(1, ge=1)
    """Steps between two checkpoints."""
    keep_last: int | None = Field(None, ge=1)
    """Number of latest checkpoints to keep besides those of keep_every and keep_best. null: keep all."""
    keep_every: int | None = Field(None, ge=1)
    """With keep_last: also keep the checkpoint of every so many steps, e.g. to evaluate the last epochs."""
    keep_best: int = Field(0, ge=0)
    """With keep_last: number of best checkpoints to keep as well. Best are those with the highest pass rate, or mean
    reward if there is no judge; it is measured on the training rollouts that the checkpoint's policy sampled."""
    evaluate_before_after: bool = False
    """Measure TGC on the evaluation split before the first and after the last step, or, if the environment has no
    evaluator, the judge's pass rate."""
    evaluate_every: int | None = Field(None, ge=1)
    """With evaluate_before_after: measure also after every so many steps, for a learning curve."""
    evaluation_runs: int = Field(1, ge=1)
    """Rollouts per task in each evaluation of evaluate_before_after and evaluate_every."""

    @model_validator(mode="after")
    def _curve(self) -> Self:
        if self.evaluate_every is not None and not self.evaluate_before_after:
            raise ValueError(
                f"train.evaluate_every={self.evaluate_every} has no effect with train.evaluate_before_after=false; "
                "set it to true, or set train.evaluate_every=null"
            )
        return self


class WatchConfig(ConfigSection):
    """When an unattended run prints messages, and when it stops; a stopped run can be resumed."""

    empty_steps: int = Field(1, ge=1)
    """Number of consecutive steps whose groups were all dropped after which the run stops."""
    judge_failures: float = Field(0.5, gt=0, le=1)
    """Share of failed judge phases of a step above which the run stops."""
    drift: Literal["off", "warn", "stop"] = "warn"
    """What happens after a step with significant evidence that the held-out judge (judge.held_out) gives the
    best-rewarded rollouts a lower pass share than middle-ranked ones, or than before while the judge does not: a sign
    that the policy exploits the judge. It flags at most about 5 % of runs without a hack, unless one of the judges is
    wrong about the best rollouts (draco_ray/algorithm/drift.py)."""
    quiet_seconds: float = Field(600.0, gt=0)
    """Time without progress after which a message says what the run waits for; repeated at this interval."""
    heartbeat_seconds: float | None = Field(60.0, gt=0)
    """Interval of progress lines if the output is not a terminal; null: none."""
    step_seconds: float | None = Field(43200.0, gt=0)
    """Time limit of a step, and of an evaluation between steps; null: no limit."""
    start_seconds: float | None = Field(7200.0, gt=0)
    """Time limit for engines, judge and learner to start, including that for autoscaled nodes."""


StoreUrl = Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://")]
"""URL of a place in an object store."""


class RunConfig(ConfigSection):
    """The run directory."""

    root: Annotated[StoreUrl | Path, Field(union_mode="left_to_right")] = Field(
        Path("runs"), json_schema_extra={"confirmed": "://"}
    )
    """Folder for run directories, or an object store for copies of them: s3://BUCKET/PREFIX, gs://, abfss://."""
    local: Path | None = Field(None, json_schema_extra=CONFIRMED)
    """If run.root is an object store: local folder for the directories of running runs. null: a private folder
    in this user's cache."""
    name: FileName | None = None
    """Name of the run; null: <setting>-<date>-<time>-<random>."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Trackers that get each step's metrics besides metrics.jsonl; wandb and mlflow are extras of the package."""

    @field_validator("root")
    @classmethod
    def _root(cls, root: str | Path) -> str | Path:
        # Refuse a misspelled URL, which would otherwise become a folder of that name in the working directory.
        if isinstance(root, Path) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(root)):
            raise ValueError(f"{root}: not a folder or a URL; expected a folder, or a URL such as s3://BUCKET/PREFIX")
        return root


class RayConfig(ConfigSection):
    """How to find Ray."""

    address: NonEmptyStr | None = Field(None, json_schema_extra=CONFIRMED)
    """Address of the cluster; null: RAY_ADDRESS, else a new Ray on this machine."""
    object_store_mib: int | None = Field(None, ge=80)
    """Size of the object store of a Ray started here."""
    dashboard: bool = True
    """Start the dashboard of a Ray started here."""


def _outside(path: str) -> Any:
    """A field for a section defined outside the core; the section's class is imported when a configuration is built."""
    return Field(default_factory=lambda: find_component("config", path, {})())


class DracoConfig(ConfigSection):
    """Everything a run needs to know."""

    setting: FileName = "draco"
    """Name of the setting, for tables; its preset sets the keys that define it."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of task order, sampling and the adapter's initial weights."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    agent: AgentConfig = AgentConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    engine: EngineConfig = EngineConfig()
    judge: JudgeConfig = JudgeConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    train: TrainConfig = TrainConfig()
    watch: WatchConfig = WatchConfig()
    tau_bench: SerializeAsAny[ConfigSection] = _outside("draco_ray.benchmarks.tau.config:TauBenchConfig")
    run: RunConfig = RunConfig()
    ray: RayConfig = RayConfig()

    def updated(self, **sections: Mapping[str, Any]) -> Self:
        """A copy with other values in some sections, e.g. ``updated(judge={"cache": folder})``; values are not
        validated."""
        changed = {name: getattr(self, name).model_copy(update=dict(values)) for name, values in sections.items()}
        return self.model_copy(update=changed)

    @field_validator("tau_bench", mode="before")
    @classmethod
    def _of_its_class(cls, given: object, info: ValidationInfo) -> object:
        default = cls.model_fields[str(info.field_name)].get_default(call_default_factory=True)
        return type(default).model_validate(given)

    @model_validator(mode="before")
    @classmethod
    def _plan(cls, given: Any) -> Any:
        return with_plan(given)

    @model_validator(mode="after")
    def _deterministic(self) -> Self:
        learner = self.learner
        if self.engine.deterministic and (
            self.engine.gpus_per_engine or learner.gpus_per_worker or learner.workers > 1
        ):
            raise ValueError(
                "engine.deterministic works only on CPUs with one learner worker; set engine.gpus_per_engine=0, "
                "learner.gpus_per_worker=0 and learner.workers=1"
            )
        return self

    @model_validator(mode="after")
    def _colocated(self) -> Self:
        """Accept only GPU shares with which Ray places one engine and one worker on each GPU."""
        engine, learner = self.engine, self.learner
        if not engine.colocate:
            return self
        where = "engine.colocate: "
        if engine.gpus_per_engine == 0 or learner.gpus_per_worker == 0:
            raise ValueError(f"{where}vLLM cannot sleep on the CPU; set engine.colocate=false")
        parallel = engine.tensor_parallel
        if engine.engines * parallel != learner.workers:
            raise ValueError(
                f"{where}{engine.engines} engines of {parallel} GPUs do not match {learner.workers} learner workers; "
                "expected engine.engines times engine.tensor_parallel to equal learner.workers"
            )
        share, rest = engine.gpus_per_engine / parallel, learner.gpus_per_worker
        if not (0.5 < share < 1 and (1 - share) / 2 < rest <= 1 - share + 1e-9):
            raise ValueError(
                f"{where}each GPU must hold one engine and one learner worker, but their shares are {share:g} and "
                f"{rest:g}; expected more than half of the GPU and the rest, e.g. engine.gpus_per_engine="
                f"{0.6 * parallel:g} and learner.gpus_per_worker=0.4"
            )
        if self.train.staleness:
            raise ValueError(f"{where}engines that sleep cannot run ahead; set train.staleness=0")
        return self
