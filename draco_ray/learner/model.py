"""The policy as the learner holds it: a frozen base model, a LoRA adapter in float32, log-probs of chosen tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.engine.adapter_files import engine_tensor_name
from draco_ray.engine.model_shape import check_experts, check_heads, lora_target
from draco_ray.errors import ConfigError, LearnerError
from draco_ray.learner.context import Context
from draco_ray.learner.delta import use_kernels
from draco_ray.learner.frozen import round_base
from draco_ray.learner.logprobs import token_logprobs
from draco_ray.learner.lora import FusedLora
from draco_ray.learner.packing import Packable, Row, lay_out, part_of
from draco_ray.learner.pointwise import fuse, kernels
from draco_ray.learner.segments import NotPlainError, install
from draco_ray.learner.sharding import gathered, shard_base
from draco_ray.records import Adapter, FloatArray
from draco_ray.temp_dirs import PrivateTempDir

PACKING_TOLERANCE = 0.1
"""Largest mean relative difference between the decoder's outputs in a row of sequences and alone: bfloat16 rounds, and
what sees another sequence, or not all of its own, is far from it."""
HEAD_TOLERANCE = 1e-3
"""Largest relative difference between the model's logits and its head applied to the decoder's output."""


class AdaptedModel:
    """Base model plus adapter. `adapter_off()` turns it into the reference policy.

    A pass is one row of sequences without padding (`draco_ray.learner.packing`).
    """

    def __init__(
        self,
        model: ModelConfig,
        config: LearnerConfig,
        *,
        seed: int,
        device: torch.device,
        mesh: DeviceMesh | None = None,
        context: Context | None = None,
    ) -> None:
        """Load the base model and put a fresh adapter on it: lora_A drawn from `seed`, lora_B zero.

        Args:
            mesh: the workers that each keep a part of the base; None: it is whole here. With a mesh every pass through
                the model, `__init__` included, is a collective of all of them.
            context: the workers that share a row with this one, of which the same is true; None: it has its own.
        Raises: ConfigError if the model cannot be loaded, its head is not a plain frozen linear layer, or it is not of
                a kind whose rows can be shared, or whose experts can be left as they are.
        """
        base = _load_base(model)
        check_experts(base.config.to_dict(), config, model.path)
        if context is not None:
            check_heads(base.config.to_dict(), context.size, model.path)
        base.requires_grad_(False)
        if config.gradient_checkpointing is not False:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lora = LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            lora_dropout=0.0,
            target_modules=lora_target(base.config.to_dict(), config.lora_target, model.path),
            task_type="CAUSAL_LM",
        )
        lora._register_custom_module({torch.nn.Linear: FusedLora})
        # On the CPU, whatever computes later: there are no other initial values on a GPU.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.peft: PeftModel = get_peft_model(base, lora, autocast_adapter_dtype=True)
        self.peft.train()  # transformers checkpoints activations in training mode only; every dropout is 0
        self.device = device
        self._chunk_tokens = config.logprob_chunk_tokens
        self._entropy_gradient = config.entropy_coefficient > 0
        self._offload = config.offload_activations
        self._decoder = base.get_decoder()
        self._head = base.get_output_embeddings()
        fuse(self._decoder, kernels(compiled=config.compile))
        use_kernels(self._decoder, device)
        round_base(self._decoder, config.base_precision)
        if mesh is None:
            base.to(device)
        else:
            shard_base(base, mesh, device)
        self._check_head(model.path)
        self._context: Context | None = None
        self.packs = self._takes_segments(base, context)
        """Whether several sequences may be in a row; otherwise each is a pass of its own."""
        if context is not None and not self.packs:
            raise ConfigError(
                f"learner.context_parallel={context.size}: model {model.path} has other layers than plain causal "
                "attention and gated delta nets, which workers cannot share; set it to 1"
            )
        self.progress = 0
        """Layers that have begun, those that are computed again for their gradients included."""
        for layer in getattr(self._decoder, "layers", ()):
            # Before it: PyTorch breaks off a layer that it computes again once it has what it wants.
            layer.register_forward_pre_hook(self._count)
        self._architectures = _architectures(model.path)
        self.adapter_config = _as_saved(self.peft.peft_config["default"])

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The adapter's tensors, in a fixed order: all that is trained."""
        return [parameter for name, parameter in sorted(self.peft.named_parameters()) if "lora_" in name]

    def logprobs(self, row: Row) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of a row's V wanted tokens, each given all before it in its sequence.

        Returns: logprob_V and entropy_V, nats, in float32 (float64 for a base in float64); of all of them where
                workers share the row, each of which has the gradient of its own part.
        """
        logprob_V, entropy_V = self._of_all(row, self._logprobs)
        return logprob_V, entropy_V

    def _count(self, *ignored: object) -> None:
        self.progress += 1

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """Make the policy the base model inside the block: the reference of the KL term."""
        with self.peft.disable_adapter():
            yield

    def adapter(self, version: int) -> Adapter:
        """The adapter under the names and with the config that PEFT's `save_pretrained` writes, in float32."""
        tensors: dict[str, FloatArray] = {
            name: tensor.detach().to("cpu", torch.float32).numpy().copy()
            for name, tensor in get_peft_model_state_dict(self.peft).items()
        }
        return Adapter(version=version, config=self.adapter_config, tensors=tensors)

    def saved_tensors(self) -> dict[str, Tensor]:
        """The adapter for a file that anybody may load: where the checkpoint wraps the text model, under the names of
        both, since PEFT and vLLM pass over names that they do not look for."""
        tensors = self.adapter(0).tensors
        engines = {engine_tensor_name(name, self._architectures): values for name, values in tensors.items()}
        # Copies, since safetensors refuses two names for the same memory.
        return {name: torch.from_numpy(values.copy()) for name, values in (tensors | engines).items()}

    def load_adapter(self, tensors: dict[str, Tensor], source: str) -> None:
        """Replace the adapter's values; `saved_tensors` will do as well.

        Raises: LearnerError if names or shapes are not those of this model and rank.
        """
        expected = {name: tuple(tensor.shape) for name, tensor in get_peft_model_state_dict(self.peft).items()}
        engines = {engine_tensor_name(name, self._architectures) for name in expected} - expected.keys()
        if expected.keys() <= tensors.keys():
            tensors = {name: tensor for name, tensor in tensors.items() if name not in engines}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != expected:
            wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
            raise LearnerError(
                f"adapter {source}: {len(wrong)} tensors do not fit this model, first {wrong[0]}: "
                f"shape {found.get(wrong[0])}, expected {expected.get(wrong[0])}; is it of this base model and rank?"
            )
        set_peft_model_state_dict(self.peft, tensors)

    def _keeping(self) -> AbstractContextManager[object]:
        """Where what is computed inside the block is kept for its backward: on the device, or in the host's memory."""
        if not self._offload:
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")

    def _of_all(self, row: Row, compute: Callable[[Row], Sequence[Tensor]]) -> Sequence[Tensor]:
        """What is computed for a row's wanted tokens, where workers share it by each for its part."""
        if self._context is None:
            return compute(row)
        part, mine_V = part_of(row, self._context.rank, self._context.size)
        return [self._context.join(array_V, mine_V, len(row.target_V)) for array_V in compute(part)]

    def _logprobs(self, row: Row) -> tuple[Tensor, Tensor]:
        with self._keeping():
            hidden_VH = self._predicting(row)
            # The backward of the log-probs needs no weight: the head is whole for the forward only.
            with gathered(self._head):
                return token_logprobs(
                    hidden_VH,
                    self._head,
                    torch.from_numpy(row.target_V).to(self.device),
                    chunk_tokens=self._chunk_tokens,
                    entropy_gradient=self._entropy_gradient,
                )

    def _predicting(self, row: Row) -> Tensor:
        """The decoder's output for the token before each wanted one."""
        token_ids_1T, position_1T = (
            torch.from_numpy(array).to(self.device)[None] for array in (row.token_ids_T, row.position_T)
        )
        how = {"segments": row.segments, "context": self._context} if self.packs else {}
        hidden_1TH: Tensor = self._decoder(
            input_ids=token_ids_1T, position_ids=position_1T, use_cache=False, **how
        ).last_hidden_state
        return hidden_1TH[0, torch.from_numpy(row.predictor_V).to(self.device)]

    @torch.no_grad()
    def _takes_segments(self, base: Any, context: Context | None) -> bool:
        """Put our attention into the model, and find out whether a row of sequences is what each is alone."""
        ids_T = np.arange(8)
        sequences = [Packable(ids_T % step, ids_T >= 3, prompt) for step, prompt in ((5, 3), (4, 2), (3, 3), (6, 3))]
        usual = base.config._attn_implementation
        self.packs = False
        alone_VH = torch.cat([self._predicting(lay_out([sequence])) for sequence in sequences]).float()
        try:
            self.packs = install(base, shared=context is not None)
            # From here on a row is shared; what it is compared with was not.
            self._context = context
            # The prompt 0 1 2 is that of the first, third and fourth: computed once, and each goes on behind it.
            found_VH = torch.zeros_like(alone_VH)
            if self.packs:
                found_VH = self._of_all(lay_out(sequences), lambda row: [self._predicting(row)])[0].float()
            self.packs = bool((found_VH - alone_VH).abs().mean() <= PACKING_TOLERANCE * alone_VH.abs().mean())
        except NotPlainError:
            self.packs = False
        if not self.packs:
            base.set_attn_implementation(usual)
        return self.packs

    def _check_head(self, path: str) -> None:
        """Refuse architectures that scale or cap the logits after the head: our log-probs would be wrong there."""
        if not isinstance(self._head, torch.nn.Linear) or self._head.weight.requires_grad:
            raise ConfigError(
                f"model {path}: its LM head is {type(self._head).__name__}, expected a frozen linear layer; "
                "keep the head out of learner.lora_target"
            )
        token_ids = torch.arange(4, device=self.device)[None]
        with torch.no_grad():
            logits = self.peft(input_ids=token_ids, use_cache=False).logits.float()
            ours = self._head(self._decoder(input_ids=token_ids, use_cache=False).last_hidden_state).float()
        if (logits - ours).abs().max() > HEAD_TOLERANCE * logits.abs().max():
            raise ConfigError(
                f"model {path}: its logits are not its head applied to the decoder's output; not supported"
            )


def _load_base(model: ModelConfig) -> Any:
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(model.path)
        text = config.get_text_config()
        for noise in ("attention_dropout", "router_jitter_noise"):
            if getattr(text, noise, 0.0):
                setattr(text, noise, 0.0)
        return AutoModelForCausalLM.from_pretrained(model.path, config=config, dtype=getattr(torch, model.dtype))
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model {model.path}: cannot be loaded ({reason}); expected a model directory or a hub name"
        ) from error


def _architectures(path: str) -> tuple[str, ...]:
    """Classes that the checkpoint says it is of, which need not be the one that is loaded here."""
    return tuple(AutoConfig.from_pretrained(path).architectures or ())


def _as_saved(config: Any) -> dict[str, object]:
    """`adapter_config.json` as PEFT writes it for inference."""
    with PrivateTempDir() as folder:
        config.save_pretrained(folder)
        saved: dict[str, object] = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    # PEFT writes the target modules, a set, in hash order.
    targets = saved.get("target_modules")
    return saved | {"inference_mode": True} | ({"target_modules": sorted(targets)} if isinstance(targets, list) else {})
