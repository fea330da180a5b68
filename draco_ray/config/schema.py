"""The configuration: one typed tree. Every default is the paper's (Table "hparams"), every typo stops the run.

Imports only pydantic and the standard library, so that ``draco train --help`` is quick and nothing heavy loads before
the configuration is known to be good. A part of the program receives its subtree, never the root.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from draco_ray.config.file_names import FileName
from draco_ray.config.vllm_arguments import argument_problem

CONFIRMED: dict[str, Any] = {"confirmed": ""}
"""Marks a key that names a program, where a key or prompts are sent, a weaker jail, or a place that is written: from a
run directory that somebody else made it is taken only if the user says so (`draco_ray.config.load`)."""
CONFIRMED_PATH: dict[str, Any] = {"confirmed": ":"}
"""Marks a key whose value is code where it has a colon, and one of our own parts where it has none."""
CONFIRMED_URL: dict[str, Any] = {"confirmed": "://"}
"""Marks a model's name: LiteLLM takes some with an address for where to send prompts, and the key with them."""


def _absolute(name: str) -> str:
    """A part in a file under its absolute path: workers need not share this process's working directory."""
    file, colon, attribute = name.rpartition(":")
    return f"{Path(file).resolve()}:{attribute}" if colon and file.endswith(".py") else name


def _compiles(expression: str) -> str:
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return expression


Part = Annotated[str, AfterValidator(_absolute), Field(json_schema_extra=CONFIRMED_PATH)]
"""A part by name; see `draco_ray.registry`."""


class Tree(BaseModel):
    """A node of the configuration: unknown keys are errors, values are frozen, docstrings are the help."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Pydantic takes true for 1."""
        if isinstance(value, bool) and not _takes_truth(cls.model_fields[str(info.field_name)].annotation):
            raise PydanticCustomError("no_truth", "neither true nor false can stand here")
        return value


def _takes_truth(annotation: Any) -> bool:
    return annotation in (bool, Any, object) or any(map(_takes_truth, get_args(annotation)))


class DataConfig(Tree):
    """Where tasks come from and in which order they are trained on."""

    root: Path = Path("data/appworld")
    """Where the environment finds its tasks. AppWorld's data root is the folder that holds ``data/`` with ``tasks/``,
    ``base_dbs/``, ``api_docs/``, ``datasets/``.
    Official AppWorld data or a sandbox built by ``draco sandbox build``."""
    train_split: FileName = "train"
    """Split that is trained on."""
    eval_split: FileName = "dev"
    """Split of the before/after evaluation; training never reads it."""
    eval_tasks: int | None = Field(None, ge=1)
    """Evaluate only the first so many tasks of the split; null means all."""


class ModelConfig(Tree):
    """The policy's frozen base model."""

    path: str = "Qwen/Qwen3.6-27B"
    """Model directory or hub name, with its tokenizer and chat template."""
    chat_template: str | None = None
    """A Jinja file, or hermes (comes with this package), in place of the tokenizer's own chat template, e.g. for a
    model whose template has no tools; null: the tokenizer's own. A run directory holds its text."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the frozen base; the adapter is always float32 in the learner."""


class AgentConfig(Tree):
    """The agent's loop and its limits."""

    use: Part = "code"
    """code (our loop after AppWorld's ReAct code agent), tool_calling (tools in the model's own chat template),
    command (a program of your own that asks an OpenAI-compatible endpoint, docs/any-agent.md), verifiers (its own
    harnesses, with environment.use=verifiers), or one of your own, package.module:Class or folder/file.py:Class."""
    command: str | None = Field(None, json_schema_extra=CONFIRMED)
    """Of agent.use=command: what plays one episode, in the words of a command line; no shell reads it, and a bare
    python is the one that runs draco."""
    function: Part | None = None
    """In its place a Python function, package.module:name or folder/file.py:name, called in a process of its own."""
    harness: str | None = Field(None, json_schema_extra=CONFIRMED)
    """In its place a coding agent in environment.use=workspace: claude-code, codex, mini-swe-agent, opencode, or a YAML
    file of your own (docs/coding-agents.md)."""
    folder: Path = Field(Path("."), json_schema_extra=CONFIRMED)
    """Working directory of the command."""
    pass_environment: tuple[str, ...] = Field((), json_schema_extra=CONFIRMED)
    """Environment variables that the command gets beside PATH, HOME and their like: keys of services that it uses."""
    side_calls: tuple[Annotated[str, AfterValidator(_compiles)], ...] = ()
    """Regular expressions of requests that get no credit, e.g. for a title or a summary of the history: searched in the
    first message of the system or user, and in the last one."""
    timeout_seconds: float = Field(3600.0, gt=0)
    """Wall clock of one run of the command; it and all that it started are ended then."""
    tool_parser: str | None = None
    """How turns of tool_calling are read: a tool parser of vLLM, e.g. hermes (Qwen2.5, Qwen3), qwen3_xml (Qwen3.5,
    Qwen3.6), llama3_json; null: by the form in which the chat template writes calls."""
    prompt: Path | None = None
    """Prompt template; a relative path is looked up in the working directory, then where the project is installed.
    null: the environment's own, for AppWorld prompts/agent_think.txt."""
    thinking: bool = True
    """Whether turns open with a <think> block: selects the chat template's thinking mode."""
    max_turns: int = Field(50, ge=1)
    """Turns of a rollout; it then ends as turn_limit."""
    max_prompt_length: int = Field(4096, ge=1)
    """Tokens; tasks whose prompt is longer are filtered before training."""
    max_response_length: int = Field(24576, ge=1)
    """Tokens of everything after the prompt: turns, template glue and tool output."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Tokens sampled in one turn at most; null: what the response has left, the only limit of the paper."""
    max_output_characters: int = Field(20000, ge=100)
    """Length at which one tool output is cut, the cut marked in the text."""
    closing_turn: Literal["step", "gap"] | None = None
    """Whether the message that ends an episode is a step, with credit, or a gap; null: a gap for agent.use=code, as in
    the paper, a step for all others."""


class EnvironmentConfig(Tree):
    """Where tasks are done, one at a time in each slot."""

    use: Part = "appworld"
    """appworld; tools (your own tasks and tools, docs/own-agent.md); tasks (tasks alone, for agents that bring their
    own world, docs/any-agent.md); workspace (a copy of a repository for each rollout, docs/coding-agents.md); tau
    (retail, airline or telecom of tau2-bench, docs/tau_bench.md); verifiers (any taskset of that package,
    docs/verifiers.md); or one of your own, package.module:Class or folder/file.py:Class
    (docs/extending/environment.md)."""
    options: dict[str, Any] = Field(default_factory=dict, json_schema_extra=CONFIRMED)
    """Of tools, tasks and workspace, or of an environment of your own: whatever it takes."""
    slots: int = Field(48, ge=1)
    """Rollouts in the environment at one time."""
    min_slots: int | None = Field(None, ge=1)
    """Slots that there are at any time; further ones, up to ``slots``, come with the rollouts that wait, and with them
    nodes where an autoscaler has some. null: all of them are always there."""
    idle_seconds: float = Field(300.0, gt=0)
    """Time a worker above ``min_slots`` is not needed before it ends, so that its node can go; longer than a step waits
    for judge and learner, or slots come anew with every step."""
    slots_per_worker: int = Field(1, ge=1)
    """Slots (server processes) each RolloutWorker actor owns."""
    cpus_per_worker: float = Field(1.0, ge=0)
    """Of a RolloutWorker actor."""
    appworld_python: str | None = Field(None, json_schema_extra=CONFIRMED)
    """Python of AppWorld's own environment; null: DRACO_APPWORLD_PYTHON, else .venv-appworld/bin/python."""
    isolation: Literal["auto", "namespaces", "bubblewrap", "landlock", "rlimits"] = Field(
        "auto", json_schema_extra=CONFIRMED
    )
    """How the child that runs model-written code is confined; auto: the strongest the host allows, never rlimits."""
    cell_timeout_seconds: float = Field(125.0, gt=0)
    """Wall clock of one code cell; a child that outlives it is killed and its rollout has failed. AppWorld
    stops the cell at four fifths of it and tells the policy so: here at its own default, 100 s."""
    start_timeout_seconds: float = Field(60.0, gt=0)
    """Time one environment may take to start."""
    max_memory_mib: int = Field(1536, ge=256)
    """Memory of one child."""
    max_output_bytes: int = Field(1_000_000, ge=1000)
    """What one cell may print before it is cut at the source."""
    recycle_after_tasks: int = Field(50, ge=1)
    """Tasks after which a child is replaced, before it grows."""
    recycle_above_mib: int = Field(900, ge=256)
    """Resident memory above which a child is replaced after its task."""
    rollout_retries: int = Field(1, ge=0)
    """Fresh environments a rollout may use after a server error before the group goes on without it."""

    @property
    def slots_of_worker(self) -> int:
        """Slots that a RolloutWorker actor owns."""
        return min(self.slots_per_worker, self.slots)

    @property
    def workers(self) -> int:
        """The most RolloutWorker actors at one time."""
        return -(-self.slots // self.slots_per_worker)

    @property
    def min_workers(self) -> int:
        """The fewest."""
        return -(-(self.min_slots or self.slots) // self.slots_per_worker)

    @model_validator(mode="after")
    def _elastic(self) -> Self:
        if self.min_slots is not None and self.min_slots > self.slots:
            raise ValueError(
                f"environment.min_slots={self.min_slots} is more than environment.slots={self.slots}; expected at most "
                "as many"
            )
        return self


class EngineConfig(Tree):
    """Policy engines (vLLM)."""

    engines: int = Field(1, ge=1)
    """vLLM engines."""
    min_engines: int | None = Field(None, ge=1)
    """Engines that a run starts and goes on with: further ones, up to ``engines``, are used as they find room, and not
    waited for where they have none or lose it (spot nodes). null: all of them."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that share one engine's weights."""
    gpus_per_engine: float = Field(1.0, ge=0)
    """0 runs vLLM's CPU build. With colocate the sum of its shares, e.g. 1.2 of two GPUs."""
    cpus_per_engine: float = Field(1.0, ge=0)
    """Of a PolicyEngine actor; a CPU engine computes with as many threads, which tensor-parallel ranks share, at least
    one each."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Of a whole GPU, also where an engine is given a share of one."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """KV cache of an engine, GiB; null: on a GPU what gpu_memory_utilization leaves, on the CPU 1."""
    max_num_seqs: int = Field(64, ge=1)
    """Sequences that an engine decodes at one time."""
    enforce_eager: bool = False
    """Run without CUDA graphs: starts sooner, decodes slower."""
    temperature: float = Field(1.0, ge=0)
    """Of the policy's sampling."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Share of probability that the policy samples from."""
    top_k: int = Field(-1, ge=-1)
    """-1: unrestricted."""
    canary_tolerance: float = Field(0.05, gt=0)
    """Mean |engine - learner| log-prob gap after a sync, nats, that is never held against a run. A larger one stops it
    where it is more than twice that of the first step and twice that without the adapter, or four times this without
    the adapter; an engine that serves the base model is found by its answers, at any gap."""
    max_failures: int = Field(3, ge=0)
    """Times the process of one engine is replaced before the run stops; one whose node is gone does not count."""
    stall_seconds: float = Field(600.0, gt=0)
    """Time that an engine may do nothing while something is asked of it, before its process is replaced as stopped."""
    adapter_directory: Path = Field(Path("/dev/shm/draco-ray"), json_schema_extra=CONFIRMED)
    """Where engines write the versions of the adapter they load, and have their sockets."""
    deterministic: bool = False
    """Compute the same numbers on any CPU with the same instructions, however many cores it has: one thread a process,
    one sequence at a time, no prefix cache, gradients added up in the batch's order. Slower; `draco verify` can then
    recompute the adapters."""
    colocate: bool = False
    """Engines and learner take turns on the same GPUs: the engines sleep (base weights in host memory, no KV cache)
    while the learner computes, which then begins only when a step is generated and judged."""
    vllm: dict[str, Any] = Field(default_factory=dict, json_schema_extra=CONFIRMED)
    """Further arguments of vLLM's AsyncEngineArgs, by name, e.g. {kv_cache_dtype: fp8} or {speculative_config: {method:
    ngram, num_speculative_tokens: 4}}. What a key here says already is refused, and what the engine is built on."""

    @property
    def fewest(self) -> int:
        """Engines that must serve for the run to go on."""
        return self.engines if self.min_engines is None else self.min_engines

    @model_validator(mode="after")
    def _elastic(self) -> Self:
        if self.fewest > self.engines:
            raise ValueError(
                f"engine.min_engines={self.min_engines} is more than engine.engines={self.engines}; expected at most "
                "as many"
            )
        if self.colocate and self.fewest < self.engines:
            raise ValueError(
                f"engine.min_engines={self.min_engines}: with engine.colocate every engine shares its GPUs with the "
                "learner and is there as long as it is; expected null"
            )
        return self

    @field_validator("vllm")
    @classmethod
    def _vllm(cls, arguments: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if (problem := argument_problem(arguments, cpu=info.data.get("gpus_per_engine") == 0)) is not None:
            raise ValueError(problem)
        return arguments


class PriceTier(Tree):
    """Dollars per million tokens of a request whose input is longer than ``above``, all of its tokens alike."""

    above: int = Field(ge=0)
    input: float = Field(ge=0)
    cached_input: float | None = Field(None, ge=0)
    """null: the input price."""
    cache_write: float | None = Field(None, ge=0)
    """Of input that is written to the provider's prompt cache; null: the input price."""
    output: float = Field(ge=0)


class Price(Tree):
    """Dollars per million tokens."""

    input: float = Field(ge=0)
    cached_input: float | None = Field(None, ge=0)
    """null: the input price."""
    cache_write: float | None = Field(None, ge=0)
    """Of input that is written to the provider's prompt cache; null: the input price."""
    output: float = Field(ge=0)
    tiers: tuple[PriceTier, ...] = ()
    """Prices of longer requests."""


LOCAL_PROVIDER = "hosted_vllm/"
"""LiteLLM's for a vLLM server of one's own."""
RULES = "rules"
"""Name of the offline judge, which knows the sandbox's tasks."""
FILES = "files:"
"""Prefix of a judge that answers through the files of a directory (`draco_ray.judging.file_judge`)."""


def provider_key(model: str) -> str:
    """The variable that holds a provider's key.

    >>> provider_key("anthropic/claude-sonnet-4-5"), provider_key("gpt-5.4")
    ('ANTHROPIC_API_KEY', 'OPENAI_API_KEY')
    """
    provider, slash, _ = model.partition("/")
    return f"{provider.upper() if slash else 'OPENAI'}_API_KEY"


class RuleJudgeConfig(Tree):
    """The offline stand-in for a frontier judge: explicit rules behind a real HTTP server (`draco judge-server`)."""

    start: bool = False
    """Start its server on loopback for this run and send every call there; model, api_base and key are then its own."""
    use: Part = "sandbox"
    """Its rules: the sandbox's, or a function of your own, package.module:function or folder/file.py:function
    (docs/extending/environment.md)."""
    latency_seconds: float = Field(0.0, ge=0)
    """Time it takes over each reply."""
    false_pass: float = Field(0.0, ge=0, le=1)
    """Share of the verdicts FAIL that come out as PASS: to see how wrong a judge may be (`make bench-noise`)."""
    false_fail: float = Field(0.0, ge=0, le=1)
    """Share of the verdicts PASS that come out as FAIL."""
    wrong_step: float = Field(0.0, ge=0, le=1)
    """Share of the cited steps in whose place another step of the rollout is named."""
    missed_criterion: float = Field(0.0, ge=0, le=1)
    """Share of the criteria that stage 1 and stage 2 leave out."""


class SelfJudgeConfig(Tree):
    """The policy that is being trained as its own judge (Section "Ablations", "Self-judge")."""

    enabled: bool = False
    """Answer the judge's prompts with the current policy; model, api_base and key are then unused."""
    thinking: bool = True
    """Whether its chat template's thinking mode is on, in every phase."""
    context_tokens: int | None = Field(None, ge=1024)
    """Longest judge prompt and reply together, for which the engines are started with room; null: what the union of a
    group of full-length rollouts takes (`draco plan` prints it). A longer prompt is cut."""


class LocalJudgeConfig(Tree):
    """The judge model on the run's own cluster: vLLM servers that come and go with the calls (docs/cluster.md)."""

    enabled: bool = False
    """Serve the model that ``judge.model`` names, hosted_vllm/<hub name or folder>; endpoint and key are then its
    own."""
    replicas: int = Field(1, ge=1)
    """Servers a run begins with, and the fewest it has."""
    max_replicas: int = Field(4, ge=1)
    """The most it has: calls beyond what there is room for bring more; ``replicas`` where that is larger."""
    calls_per_replica: int = Field(32, ge=1)
    """Calls that one server is given at a time, and computes side by side."""
    idle_seconds: float = Field(300.0, gt=0)
    """Time a server above ``replicas`` is not needed before it ends and its GPUs are free."""
    start_timeout_seconds: float = Field(1800.0, gt=0)
    """Time a server may take to load, and for which calls wait while none is up, a node that is added included."""
    stall_seconds: float = Field(60.0, gt=0)
    """Time without a token after which a server is asked for one; it is replaced if it does not answer that within the
    same time."""
    context_tokens: int | None = Field(None, ge=1024)
    """Longest prompt and reply together; null: what the model was made for."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of the served weights; auto is the model's own."""
    gpus_per_replica: float = Field(1.0, ge=0)
    """0 runs vLLM's CPU build."""
    cpus_per_replica: float = Field(1.0, ge=0)
    """CPUs that Ray reserves for a server."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that share one server's weights."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory that a server takes."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """On the CPU; null: 1."""
    arguments: tuple[str, ...] = Field((), json_schema_extra=CONFIRMED)
    """Further words for ``vllm serve``, e.g. --reasoning-parser, mistral, for a judge that reasons without <think>."""


class JudgeLimits(Tree):
    """What all judge workers together may ask for; null is no limit."""

    requests_per_minute: float | None = Field(None, ge=1)
    """Requests of all workers together; null is no limit."""
    tokens_per_minute: float | None = Field(None, ge=1)
    """Input and output; a request under way counts with what its like have used, and a margin."""
    dollars: float | None = Field(None, ge=0)
    """Budget of the run, resumed ones included. A call that could exceed it is not made: the run stops, resumable. A
    request that may have been billed without a reply, or whose reply does not say its usage, counts with the most that
    it may cost."""


class OtherJudgeConfig(Tree):
    """A judge beside the judge; all it does not say is as of that one."""

    model: str
    """LiteLLM model name, provider prefix included."""
    api_base: str | None = None
    api_key_env: str | None = None
    """Environment variable that holds the key; null is ``<PROVIDER>_API_KEY``."""


class JudgeConfig(Tree):
    """The judge: any LiteLLM model, or the policy itself."""

    rule_judge: RuleJudgeConfig = RuleJudgeConfig()
    self_judge: SelfJudgeConfig = SelfJudgeConfig()
    local: LocalJudgeConfig = LocalJudgeConfig()
    limits: JudgeLimits = JudgeLimits()

    model: str = Field("openai/gpt-5.4", json_schema_extra=CONFIRMED_URL)
    """LiteLLM model name, provider prefix included; or files:DIR, a directory in which prompts are written as numbered
    files and replies are waited for."""
    api_base: str | None = Field(None, json_schema_extra=CONFIRMED)
    """Endpoint; null is the provider's own."""
    api_key_env: str | None = Field(None, json_schema_extra=CONFIRMED)
    """Environment variable that holds the key; null is ``<PROVIDER>_API_KEY``. The key itself never enters a config, a
    log or a command line."""
    temperature: float | None = Field(0.1, ge=0)
    """null leaves it out of the request; models that LiteLLM knows to take none are sent none."""
    max_tokens: int = Field(16384, ge=256)
    """Of a reply, its reasoning included."""
    context_tokens: int | None = Field(None, ge=1024)
    """Prompt and reply together, as much as the judge reads; null: what LiteLLM's table or the served model's
    config.json says. Longer prompts are cut: first outputs, then turns, then the agent's prompt, each text to one
    length with the cut marked; no step is left out. Of a judge of which nothing is known prompts are cut
    once it says that they are too long."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """How long the model thinks before it answers, where it can be told; null leaves it out of the request."""
    extra_body: dict[str, object] = Field(default_factory=dict)
    """Sent as is, e.g. a reasoning switch."""
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """The provider's tier, where it has several: flex is cheaper and slower; null leaves it out of the request."""
    prompt_cache: Literal["auto", "on", "off"] = "auto"
    """Tell the provider what prompts of a group share, so that it is read from its prompt cache: ``cache_control`` for
    Anthropic's models, ``prompt_cache_key`` for OpenAI's. auto: not at an ``api_base`` of one's own."""
    structured_output: bool = True
    """Hold replies to a JSON schema where LiteLLM says that the model supports it, and at an ``api_base`` of one's own
    until it refuses. A model that thinks in its answer, served without a reasoning parser, cannot think then."""
    jury: tuple[OtherJudgeConfig, ...] = Field((), json_schema_extra=CONFIRMED)
    """Further judges that score every rollout: the verdict of most counts, the judge's own where none has most."""
    strong: OtherJudgeConfig | None = Field(None, json_schema_extra=CONFIRMED)
    """Decides the criteria on which judge and jury differ, and is asked about no others."""
    fallbacks: tuple[OtherJudgeConfig, ...] = Field((), json_schema_extra=CONFIRMED)
    """Asked in turn what the judge could not answer."""
    prompts: Path = Path("prompts/judge")
    """Folder of the prompt set."""
    environment_facts: str | None = None
    """What every prompt says of the environment; null: what the environment says of itself."""
    examples: Path | None = None
    """Labels, as draco report's page exports them: the verdicts that a person corrected are shown to the scoring call
    as examples. Whether that helps, draco agreement measures."""
    max_examples: int = Field(12, ge=1)
    """Most corrected verdicts that are shown: the first in the file."""
    max_stage1_criteria: int = Field(15, ge=1)
    """Most criteria that stage 1 may write; more are cut."""
    max_stage2_criteria: int = Field(10, ge=1)
    """Most criteria that stage 2 may write for a rollout; more are cut."""
    max_union_criteria: int = Field(24, ge=1)
    """Most criteria of a group's rubric; more are cut."""
    score_votes: int = Field(1, ge=1)
    """Scoring calls per rollout; a criterion passes only if all of them pass it."""
    workers: int = Field(2, ge=1)
    """JudgeWorker actors a run begins with, and the fewest it has."""
    max_workers: int = Field(8, ge=1)
    """The most it has: calls beyond what there is room for bring more; ``workers`` where that is larger."""
    concurrency_per_worker: int = Field(32, ge=1)
    """Calls in flight in one worker; further ones wait, and are what asks for another worker."""
    idle_seconds: float = Field(60.0, gt=0)
    """Time a worker above ``workers`` is not needed before it ends, so that its node can go."""
    start_timeout_seconds: float = Field(1800.0, gt=0)
    """Time the first worker may take to come up, an autoscaled node included."""
    request_timeout_seconds: float = Field(600.0, gt=0)
    """Time one request may take."""
    max_attempts: int = Field(8, ge=1)
    """Requests for one call, the first included, over rate limits, timeouts and server errors. Those that fail while
    the judge answers nobody do not count: see max_outage_seconds."""
    max_outage_seconds: float = Field(3600.0, ge=0)
    """How long a run waits for a judge that answers nobody. Judging is paused meanwhile and nothing is dropped; then
    the run stops, resumable. 0: max_attempts decides alone."""
    max_backoff_seconds: float = Field(60.0, gt=0)
    """Longest pause between two requests of a call."""
    reasks: int = Field(1, ge=0)
    """Times a reply that does not parse is asked again, the error quoted."""
    second_look: float = Field(0.0, ge=0, le=1)
    """Share of scored rollouts whose justifications one more call reads without their scores, to report how often the
    judge contradicts itself; such a call takes some hundred tokens a criterion, and no verdict changes."""
    cache: Path | None = Field(None, json_schema_extra=CONFIRMED)
    """Folder of the durable reply cache; null puts it in the run directory."""
    stage1_across_epochs: bool = True
    """Keep a task's stage1 criteria for the whole run: later epochs are judged from the first one's. false, as in the
    paper, asks for them anew whenever the task comes again."""
    prices: dict[str, Price] = Field(
        default_factory=lambda: {
            "gpt-5.4": Price(input=2.5, output=15.0),
            "Qwen3.6-27B": Price(input=0.289, output=0.9),
            "Qwen2.5-32B-Instruct": Price(input=0.66, output=0.8),
        }
    )
    """Reference prices (Section "Evaluation"), by model name without provider; they win over LiteLLM's own, which hold
    for every other model."""

    @property
    def key_variable(self) -> str:
        """The environment variable that holds the key."""
        return self.api_key_env or provider_key(self.model)

    @property
    def files(self) -> Path | None:
        """Directory of a judge that answers through files; None for any other judge."""
        return Path(self.model.removeprefix(FILES)).absolute() if self.model.startswith(FILES) else None

    @field_validator("model")
    @classmethod
    def _absolute(cls, model: str) -> str:
        # Judge workers run in other directories.
        return f"{FILES}{Path(model.removeprefix(FILES)).absolute()}" if model.startswith(FILES) else model

    @model_validator(mode="after")
    def _local(self) -> Self:
        if not self.local.enabled:
            return self
        if not self.model.startswith(LOCAL_PROVIDER) or self.model == LOCAL_PROVIDER:
            raise ValueError(
                f"judge.local.enabled: judge.model={self.model} is not served here; expected {LOCAL_PROVIDER}<hub name "
                "or folder>"
            )
        for name, given in (
            ("judge.api_base", self.api_base is not None),
            ("judge.rule_judge.start", self.rule_judge.start),
            ("judge.self_judge.enabled", self.self_judge.enabled),
        ):
            if given:
                raise ValueError(f"judge.local.enabled: not together with {name}, which names another judge")
        return self


class AlgorithmConfig(Tree):
    """The reward and what becomes of it."""

    group_size: int = Field(6, ge=2)
    """G: rollouts per task."""
    reward: Literal["rubric", "outcome", "random"] = "rubric"
    """rubric (weighted verdicts), outcome (the environment's evaluator: not outcome-blind) or random."""
    rubric: Literal["dynamic", "static"] = "dynamic"
    """Written by the judge for each task and its rollouts, or one fixed list."""
    static_rubric: Path | None = None
    """The fixed list, of algorithm.rubric=static; null: the environment's own, which AppWorld has: the paper's 21."""
    rule: Part = "draco"
    """How verdicts and citations become step advantages: draco, grpo (no step credit: vanilla GRPO on the reward),
    no_dropout, mixed_only, no_std, score_verdicts, draco_calibrated, or one of your own, package.module:Class or
    folder/file.py:Class."""
    reliability: float | None = Field(None, ge=0, le=1)
    """For draco_calibrated: share of the advantage that follows the judge's citations, the rest is spread evenly. 1 is
    the paper's rule, 0 is uniform GRPO; `draco attribution-bench --labels` recommends one for each judge."""
    std_epsilon: float = Field(1e-6, ge=0)
    """Added to the group's standard deviation (verl)."""
    skip_useless_credit_calls: bool = True
    """Make no credit call where it cannot change the update: zero spread in the group, or no surviving criterion. What
    it would have cited is missing from the record."""
    skip_inert_credit_calls: bool = False
    """Make no credit call for a rollout whose surviving verdicts are unanimous, or do not apply to it: Eq. credit then
    gives every step the same total, whichever steps are named. Changes the update where the call would have overridden
    a verdict."""
    credit_surviving_only: bool = True
    """Send only surviving criteria to the credit call: the others cannot enter the step quality, but the judge then
    reads another prompt than the paper's, which asks about all, and may answer otherwise."""


ImportanceLevel = Literal["token", "sequence", "geometric"]
MaskLevel = Literal["token", "sequence", "geometric", "any_token"]


class LearnerConfig(Tree):
    """What updates the weights: as it ships, GRPO on a LoRA adapter."""

    use: Part = "ray_lora"
    """ray_lora (Ray Train's workers), or a learner of your own, package.module:Class or folder/file.py:Class."""
    options: dict[str, object] = Field(default_factory=dict)
    """For a learner of your own; ray_lora takes none."""
    workers: int = Field(1, ge=1)
    """Ray Train workers."""
    sharding: Literal["none", "full"] = "none"
    """Whether each worker holds the whole base, or one part of it (FSDP2) and a layer at a time while it computes."""
    base_precision: Literal["model", "int8", "fp8"] = "model"
    """How the frozen base's linear layers are held: in model.dtype, or in 8 bits with a scale for each output row, made
    whole for each product. The engine serves the base unrounded, so the two differ by more (engine_k1, engine_k3)."""
    context_parallel: int = Field(1, ge=1)
    """Workers that share every forward pass, for sequences too long for one: each computes its part of the tokens, and
    attention over all of them for its part of the heads (Ulysses). It divides workers and the model's heads."""
    gpus_per_worker: float = Field(1.0, ge=0)
    """0 learns on the CPU."""
    cpus_per_worker: float = Field(1.0, ge=0)
    """CPUs that Ray reserves for a worker."""
    lora_rank: int = Field(16, ge=1)
    """Rank of the adapter."""
    lora_alpha: int = Field(32, ge=1)
    """The adapter is scaled by lora_alpha / lora_rank."""
    lora_target: str = "all-linear"
    """Modules that are adapted: all-linear, or a regex over their names. Of a mixture of experts all-linear is all that
    is beside experts and router, which stay frozen."""
    learning_rate: float = Field(5e-5, gt=0)
    """Constant, no warm-up."""
    sft_learning_rate: float | None = Field(None, gt=0)
    """Of `draco sft`; null: learning_rate."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Of AdamW."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Of AdamW."""
    weight_decay: float = Field(0.01, ge=0)
    """Of AdamW."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    clip_low: float = Field(0.2, ge=0)
    """The probability ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """The probability ratio is clipped at 1 + clip_high."""
    dual_clip: float = Field(3.0, gt=1)
    """Bound of the loss for negative advantages, in multiples of the advantage."""
    importance_cap: float | None = Field(None, ge=1)
    """Most that a token's importance weight may be, p(step's start) / p(at sampling), by which its policy loss is
    multiplied (decoupled PPO, truncated). null: 2 with train.staleness, no weight without."""
    importance_level: ImportanceLevel = "token"
    """What importance_cap bounds: a token's own ratio, the product of its sequence's ratios, or their geometric
    mean."""
    mask_low: float | None = Field(None, ge=0)
    """Tokens whose ratio p(step's start) / p(at sampling) is lower are left out of the policy loss; null: none are."""
    mask_high: float | None = Field(None, gt=0)
    """The same for higher ratios."""
    mask_level: MaskLevel = "token"
    """Which ratio mask_low and mask_high bound: a token's own, its sequence's as in importance_level, or every token's
    (any_token: one outside leaves its whole sequence out)."""
    kl_coefficient: float = Field(0.01, ge=0)
    """Of the k3 estimate against the base model, as a loss term."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Of the entropy, as a loss term."""
    minibatch_prompts: int = Field(8, ge=1)
    """Prompts (groups) an optimizer update; verl's reading of "minibatch size 8"."""
    micro_batch_tokens: int = Field(32768, ge=1)
    """Tokens in one forward pass, a prompt that rollouts share counted once; a longer sequence gets one of its own."""
    logprob_chunk_tokens: int = Field(1024, ge=1)
    """Tokens whose logits exist at one time."""
    gradient_checkpointing: bool | None = None
    """Compute activations again in the backward pass instead of keeping them; null: on GPUs, and on a CPU where they
    would take more than half of the free memory. Keeping them is a fifth faster."""
    offload_activations: bool = False
    """Keep what gradient_checkpointing still keeps, the inputs of all layers, in the host's memory."""
    compile: bool = False
    """Let torch.compile make kernels of a decoder's norms and gated MLPs: on a CPU it needs a C++ compiler, on a GPU
    Triton."""
    max_failures: int = Field(3, ge=0)
    """Times workers that failed are started anew between two checkpoints before the run stops."""
    stall_seconds: float = Field(600.0, gt=0)
    """Time that a worker's process may not answer, before the workers are started anew; a long pass does not keep it
    from answering."""
    hang_seconds: float = Field(1800.0, gt=0)
    """Time in which a worker that has something to do may run no layer of the model, before the workers are started
    anew: its kernel hangs, say. As long as an operation of all workers may take."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        low, high = self.mask_low, self.mask_high
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"learner.mask_low={low:g} is above learner.mask_high={high:g}, which would leave every token out; "
                "expected a range of ratios, such as 0.5 to 2"
            )
        if self.workers % self.context_parallel:
            raise ValueError(
                f"learner.context_parallel={self.context_parallel} does not divide learner.workers={self.workers}; "
                "expected a whole number of groups of workers that share their rows"
            )
        if self.offload_activations and self.gradient_checkpointing is False:
            raise ValueError(
                "learner.offload_activations without learner.gradient_checkpointing would move all that layers keep to "
                "the host and back; set both, or neither"
            )
        return self


Order = Literal["shuffled", "easy_first", "hard_first"]
"""What comes first in an epoch."""


class TrainConfig(Tree):
    """The outer loop."""

    prompts_per_step: int = Field(16, ge=1)
    """B: tasks sampled a step."""
    epochs: int = Field(20, ge=1)
    """Passes over the training split."""
    steps: int | None = Field(None, ge=0)
    """Stop after so many steps; null derives it from epochs."""
    skip_solved: int | None = Field(None, ge=1)
    """Leave a task out for so many epochs once none of its rollouts failed a criterion in as many visits one after the
    other: by the judge's measure, which no ground truth enters. null: every task in every epoch, as in the paper."""
    order: Order = "shuffled"
    """What comes first in an epoch: by the share of the judge's verdicts that a task passed when it was last visited;
    tasks that have not been visited come before all others."""
    staleness: int = Field(0, ge=0, le=8)
    """Steps that run ahead: their rollouts begin while this one's tail is judged and learned, with an adapter at most
    so many versions old, and a long one is played across steps, each turn with the adapter that is live then;
    learner.importance_cap corrects for it. 0 is exactly on-policy."""
    checkpoint_every: int = Field(1, ge=1)
    """Steps between two checkpoints."""
    keep_last: int | None = Field(None, ge=1)
    """Checkpoints that stay beside those of keep_every and keep_best; older ones are removed. null: all stay."""
    keep_every: int | None = Field(None, ge=1)
    """With keep_last: checkpoints of every so many steps stay, too. Evaluating the last epochs needs theirs."""
    keep_best: int = Field(0, ge=0)
    """With keep_last: so many checkpoints stay whose rollouts, played in a later step, had the highest pass rate."""
    evaluate_before_after: bool = False
    """Measure TGC on the evaluation split before the first and after the last step; where the environment has no
    evaluator the judge's pass rate there stands in."""
    evaluate_every: int | None = Field(None, ge=1)
    """With evaluate_before_after: measure after every so many steps as well, for a learning curve."""
    evaluation_runs: int = Field(1, ge=1)
    """Independent rollouts per task of each of these evaluations."""

    @model_validator(mode="after")
    def _curve(self) -> Self:
        if self.evaluate_every is not None and not self.evaluate_before_after:
            raise ValueError(
                f"train.evaluate_every={self.evaluate_every} adds to train.evaluate_before_after, which is false; "
                "expected it to be true, or train.evaluate_every to be null"
            )
        return self


class WatchConfig(Tree):
    """When a run that nobody looks at says something, and when it stops; it can be continued then."""

    empty_steps: int = Field(1, ge=1)
    """Steps in a row in which every group was dropped, after which the run stops."""
    judge_failures: float = Field(0.5, gt=0, le=1)
    """Share of a step's judge phases that may fail; above it the run stops."""
    quiet_seconds: float = Field(600.0, gt=0)
    """Time without any progress after which what is waited for is said, once in each such time."""
    heartbeat_seconds: float | None = Field(60.0, gt=0)
    """Time between two lines on how far a step is, where the output is no terminal; null is none."""
    step_seconds: float | None = Field(43200.0, gt=0)
    """Most that a step may take, or an evaluation between two; null is no limit."""
    start_seconds: float | None = Field(7200.0, gt=0)
    """Most that engines, judge and learner may take to start, nodes that an autoscaler adds included."""


class TauModelConfig(Tree):
    """A model that tau2 reaches through LiteLLM."""

    model: str = Field("openai/gpt-5.4", json_schema_extra=CONFIRMED_URL)
    """LiteLLM model name, provider prefix included."""
    api_base: str | None = Field(None, json_schema_extra=CONFIRMED)
    """Endpoint; null is the provider's own. Of agent and user simulator only with openai/ and hosted_vllm/ models."""
    api_key_env: str | None = Field(None, json_schema_extra=CONFIRMED)
    """Environment variable that holds the key; null is ``<PROVIDER>_API_KEY``. Providers but openai/ and hosted_vllm/
    need LiteLLM's own name."""
    temperature: float | None = Field(0.0, ge=0)
    """null leaves it out of the request."""


class TauEmbedderConfig(Tree):
    """The embedding model behind dense retrieval (alltools-qwen)."""

    model: str = "qwen/qwen3-embedding-8b"
    """Name the endpoint knows it by."""
    api_base: str = Field("https://openrouter.ai/api/v1", json_schema_extra=CONFIRMED)
    """Endpoint of the embedding model."""
    api_key_env: str = Field("OPENROUTER_API_KEY", json_schema_extra=CONFIRMED)
    """Environment variable that holds its key."""


class TauServerConfig(Tree):
    """vLLM's OpenAI-compatible server for the policy; GPUs, memory and sequences are those of `engine`."""

    port: int | None = Field(None, ge=1, le=65535)
    """On 127.0.0.1; null takes a free one."""
    max_model_len: int = Field(131072, ge=1024)
    """Tokens of prompt and reply (appendix "Serving configuration")."""
    native_context: int | None = Field(None, ge=1024)
    """Tokens the model was trained for; YaRN extends it to max_model_len. null reads a local model's config.json."""
    tool_call_parser: str | None = None
    """vLLM's name of the format in which the model calls tools; null derives it for Qwen models."""
    reasoning_parser: str | None = None
    """vLLM's name of the format of its thinking; null derives it for Qwen models."""
    start_timeout_seconds: float = Field(1800.0, gt=0)
    """Time the server may take to load the model."""


class TauBenchConfig(Tree):
    """τ-bench banking, run by tau2-bench in an environment of its own (docs/tau_bench.md)."""

    tau2_python: str | None = Field(None, json_schema_extra=CONFIRMED)
    """Python that can import tau2; null: TAU2_PYTHON, else .venv/bin/python of tau2_home."""
    tau2_home: Path | None = Field(None, json_schema_extra=CONFIRMED)
    """Checkout of tau2-bench, for its data; null: TAU2_HOME."""
    tau2_version: str = "1.0.1"
    """Grading changed between versions: another one is refused."""
    retrieval: Literal[
        "alltools-qwen",
        "qwen_embeddings",
        "qwen_embeddings_grep",
        "terminal_use",
        "bm25",
        "bm25_grep",
        "grep_only",
        "full_kb",
        "golden_retrieval",
        "no_knowledge",
    ] = "alltools-qwen"
    """tau2's retrieval configuration; the default is the paper's all-tools setting with Qwen embeddings."""
    tasks: tuple[str, ...] | None = None
    """Only these task ids, for a trial; null is the full split of 97, which the paper's figures are over."""
    trials: int = Field(3, ge=1)
    """Episodes per task: n of pass^k."""
    max_turns: int = Field(100, ge=1)
    """Agent turns; tau2 counts two steps a turn."""
    seed: int = Field(300, ge=0, lt=2**32)
    """Of tau2's episodes."""
    concurrency: int = Field(8, ge=1)
    """Episodes at one time."""
    episode_retries: int = Field(3, ge=0)
    """Times tau2 runs an episode again that ended in an exception."""
    episode_timeout_seconds: float | None = Field(None, gt=0)
    """Wall clock of one episode, which then failed."""
    stall_timeout_seconds: float = Field(3600.0, gt=0)
    """Time without a finished episode after which tau2's process is ended and started again."""
    restarts: int = Field(3, ge=0)
    """Times tau2's process is started again after it died or stalled; finished episodes are kept."""
    embeddings_cache: Path = Field(Path(".cache/tau2_embeddings"), json_schema_extra=CONFIRMED)
    """Folder of the documents' embeddings."""
    agent: TauModelConfig = TauModelConfig()
    """The policy when it is an API model; of a policy that is served here only the temperature is used."""
    user: TauModelConfig = TauModelConfig()
    """The user simulator."""
    judge: TauModelConfig = TauModelConfig()
    """Of natural-language assertions, which decide one task."""
    embedder: TauEmbedderConfig = TauEmbedderConfig()
    server: TauServerConfig = TauServerConfig()


StoreUrl = Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://")]
"""A place in an object store."""


class RunConfig(Tree):
    """The run directory."""

    root: Annotated[StoreUrl | Path, Field(union_mode="left_to_right")] = Field(
        Path("runs"), json_schema_extra={"confirmed": "://"}
    )
    """Folder in which a run gets its directory, or an object store for its copy: s3://BUCKET/PREFIX, gs://, abfss://."""
    local: Path | None = Field(None, json_schema_extra=CONFIRMED)
    """Where run.root is an object store: folder in which runs work. null: a private one in this user's cache."""
    name: FileName | None = None
    """null: <setting>-<date>-<time>-<random>."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Where each step's scalars go besides metrics.jsonl; wandb and mlflow are extras of the package."""

    @field_validator("root")
    @classmethod
    def _root(cls, root: str | Path) -> str | Path:
        # As a path it would be a folder of that name, here.
        if isinstance(root, Path) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(root)):
            raise ValueError(
                f"{root}: neither a folder nor a URL; expected one such as s3://BUCKET/PREFIX, in this case"
            )
        return root


class RayConfig(Tree):
    """How to find Ray."""

    address: str | None = Field(None, json_schema_extra=CONFIRMED)
    """null: the cluster this process runs in (RAY_ADDRESS), else a new one on this machine."""
    object_store_mib: int | None = Field(None, ge=80)
    """Object store of a Ray started here."""
    dashboard: bool = True
    """Start the dashboard of a Ray started here."""


class DracoConfig(Tree):
    """Everything a run needs to know."""

    setting: FileName = "draco"
    """Name of the setting, for tables; the preset of that name sets the keys that make it so."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Of task order, sampling and the adapter's initial weights."""
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
    tau_bench: TauBenchConfig = TauBenchConfig()
    run: RunConfig = RunConfig()
    ray: RayConfig = RayConfig()

    def updated(self, **sections: Mapping[str, Any]) -> Self:
        """Copy it with other values in some sections, e.g. ``updated(judge={"cache": folder})``; nothing is checked."""
        changed = {name: getattr(self, name).model_copy(update=dict(values)) for name, values in sections.items()}
        return self.model_copy(update=changed)

    @model_validator(mode="after")
    def _deterministic(self) -> Self:
        learner = self.learner
        if self.engine.deterministic and (
            self.engine.gpus_per_engine or learner.gpus_per_worker or learner.workers > 1
        ):
            raise ValueError(
                "engine.deterministic: needs CPUs and one learner worker; expected engine.gpus_per_engine=0, "
                "learner.gpus_per_worker=0 and learner.workers=1"
            )
        return self

    @model_validator(mode="after")
    def _colocated(self) -> Self:
        """Ray fills each GPU by shares: those that are accepted here put one engine and one worker on each."""
        engine, learner = self.engine, self.learner
        if not engine.colocate:
            return self
        where = "engine.colocate: "
        if engine.gpus_per_engine == 0 or learner.gpus_per_worker == 0:
            raise ValueError(f"{where}vLLM cannot sleep on the CPU, and needs no turns there; set it to false")
        parallel = engine.tensor_parallel
        if engine.engines * parallel != learner.workers:
            raise ValueError(
                f"{where}{engine.engines} engines of {parallel} GPUs and {learner.workers} learner workers; expected "
                "engine.engines times engine.tensor_parallel to be learner.workers"
            )
        share, rest = engine.gpus_per_engine / parallel, learner.gpus_per_worker
        if not (0.5 < share < 1 and (1 - share) / 2 < rest <= 1 - share + 1e-9):
            raise ValueError(
                f"{where}shares of {share:g} GPU an engine and {rest:g} a learner worker do not put one of each on a "
                f"GPU; expected more than half of one and the rest of it, e.g. engine.gpus_per_engine="
                f"{0.6 * parallel:g} and learner.gpus_per_worker=0.4"
            )
        if self.train.staleness:
            raise ValueError(f"{where}sleeping engines cannot run ahead; expected train.staleness=0")
        return self
