"""The policy in the learner: a frozen base model, a LoRA adapter in float32, log-probs of chosen tokens.

Sharding (``learner.sharding``): FSDP2 splits the base over the workers. Each decoder layer, the token embedding and the
LM head are a group; every worker keeps a part of each, and the whole group only while it computes with it. The adapter,
the last norm and a tied embedding, which FSDP2 cannot share between two groups, stay whole on every worker. Every pass
is then a collective: all workers must take part in it, in the same order.

Gated delta nets (Qwen3.5 and 3.6): on a GPU flash-linear-attention computes their rule and their convolution, elsewhere
transformers' own code does.

Frozen weights in 8 bits (``learner.base_precision``): a weight is a code times the scale of its output row, and is
decoded for each product. Adapter, embedding, LM head, norms and convolutions are not rounded.

LoRA: PEFT computes an adapted layer as a chain of operations on float32 copies, which it keeps for the backward pass.
`FusedLora` adds the adapter's product into the layer's own output and keeps only the layer's input and the adapter's
inner activations. Autograd sees the adapter's product, with the backward pass of the whole layer; the frozen layer's
product is added afterwards, so that a checkpointed decoder layer that is recomputed can skip its last product.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module, util
from types import ModuleType
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners import lora
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from draco_ray.config.schema import LearnerConfig, ModelConfig
from draco_ray.engine.adapter_files import engine_tensor_name
from draco_ray.engine.model_shape import check_experts, check_heads, lora_target
from draco_ray.errors import ConfigError, LearnerError
from draco_ray.learner.context import Context
from draco_ray.learner.loss import token_logprobs
from draco_ray.learner.packing import Packable, Row, lay_out, part_of
from draco_ray.learner.pointwise import fuse, kernels
from draco_ray.learner.segments import NotPlainError, install
from draco_ray.records import Adapter, FloatArray
from draco_ray.temp_dirs import PrivateTempDir


def shard_base(model: Any, mesh: DeviceMesh, device: torch.device) -> None:
    """Spread the base of a causal language model with an adapter over the mesh, group by group, onto `device`.

    Args:
        model: transformers' model, on the CPU, its PEFT layers in place; only the adapter requires gradients.
        mesh: one dimension, the workers.
        device: this worker's; a group is whole there only while it is cut.
    Raises: ConfigError if the decoder's layers are not found.
    """
    decoder, head, embedding = model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ConfigError(
            f"learner.sharding=full: {type(decoder).__name__} has no list of layers to shard; set learner.sharding=none"
        )
    groups = [*layers] if head.weight is embedding.weight else [embedding, *layers, head]
    sharded = {parameter for group in groups for parameter in group.parameters() if not parameter.requires_grad}
    whole = {parameter for parameter in model.parameters() if parameter not in sharded}
    for parameter in whole:
        parameter.data = parameter.data.to(device)
    for group in groups:
        fully_shard(group, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    if isinstance(embedding, FSDPModule):
        # Frozen, and nothing below it: its backward needs no weight.
        embedding.set_unshard_in_backward(False)
    # The root, without parameters of its own, makes one pass of all groups: each fetches the next while it computes.
    fully_shard(decoder, mesh=mesh, ignored_params=whole)


@contextmanager
def gathered(module: torch.nn.Module) -> Iterator[None]:
    """Make the parameters of a sharded module whole on every worker inside the block; others are whole already."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


log = logging.getLogger(__name__)

KERNEL_DEVICES: tuple[str, ...] = ("cuda",)
"""Where the kernels run."""
RULE, CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
"""Transformers' names, in the module of a model."""


def use_kernels(decoder: torch.nn.Module, device: torch.device) -> None:
    """Let a decoder's delta nets be computed by flash-linear-attention where it is installed.

    It is put into transformers' module, for every model of its kind in this process.

    Args:
        decoder: anything; one without delta nets is left alone.
        device: where it will compute; a GPU without the kernels is worth a warning.
    """
    mixers = [mixer for module in decoder.modules() if (mixer := getattr(module, "linear_attn", None)) is not None]
    modules = {sys.modules[type(mixer).__module__] for mixer in mixers}
    if util.find_spec("fla") is not None:
        for module in modules:
            _put_kernels(module)
    elif modules and device.type in KERNEL_DEVICES:
        log.warning(
            "flash-linear-attention is not installed: gated delta nets are computed by transformers' own code, many "
            "times as slow and with twice the memory that `draco plan` counts for a layer; install the 'gpu' extra"
        )


def _put_kernels(module: ModuleType) -> None:
    rule, convolution = getattr(module, RULE), getattr(module, CONVOLUTION)
    if not hasattr(rule, "elsewhere"):
        # Transformers' own code is what its wrapper, whichever kernel it calls, is named after.
        setattr(module, RULE, _on_device(rule, inspect.unwrap(rule)))
        kernel = convolution if util.find_spec("causal_conv1d") is not None else _convolution
        setattr(module, CONVOLUTION, _on_device(kernel, inspect.unwrap(convolution)))


def _on_device(kernel: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    def computed(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (kernel if first.device.type in KERNEL_DEVICES else elsewhere)(first, *args, **kwargs)

    computed.elsewhere = elsewhere  # type: ignore[attr-defined]
    return computed


def _convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """As transformers calls it: arrays are 1 x channels x tokens, the weight channels x width."""
    kernel = import_module("fla.modules.causal_conv1d").causal_conv1d
    output: Tensor = kernel(hidden_states.transpose(1, 2), weight, bias, activation=activation)[0]
    return output.transpose(1, 2)


FORMATS: dict[str, tuple[torch.dtype, float]] = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Type of the codes, and the largest of them, which is that of the row's largest weight."""


class RoundedLinear(torch.nn.Linear):
    """A frozen linear layer: codes O x I in `weight`, scales O x 1, in the layer's type, in `weight_scale`."""

    def __init__(self, layer: torch.nn.Linear, precision: str) -> None:
        """Round the layer's weights to the nearest of `precision`, a name in `FORMATS`."""
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        codes, scale = rounded(layer.weight, precision)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """The product with the rounded weights, in the type of the input."""
        product: Tensor = _RoundedProduct.apply(input, self.weight, self.weight_scale, self.bias)
        return product


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes_OI: Tensor, scale_O1: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes_OI, scale_O1)
        return torch.nn.functional.linear(x, whole_weight(codes_OI, scale_O1, x.dtype), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        codes_OI, scale_O1 = ctx.saved_tensors
        return gradients[0] @ whole_weight(codes_OI, scale_O1, gradients[0].dtype), None, None, None


@torch.no_grad()
def rounded(weight_OI: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Codes O x I and the scale of each row, O x 1 in the weight's type, whose product is nearest to the weight."""
    dtype, largest = FORMATS[precision]
    rows_O1 = weight_OI.to(torch.float32).abs().amax(dim=1, keepdim=True)
    # A row of zeros has a scale, too; and a scale that was rounded down must not push a code over the largest.
    scale_O1 = (rows_O1 / largest).clamp_min(torch.finfo(weight_OI.dtype).tiny).to(weight_OI.dtype)
    codes_OI = (weight_OI.to(torch.float32) / scale_O1.to(torch.float32)).clamp_(-largest, largest)
    return (codes_OI if dtype.is_floating_point else codes_OI.round_()).to(dtype), scale_O1


def whole_weight(weight_OI: Tensor, scale_O1: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight that codes and scales stand for; without scales it is itself."""
    return weight_OI if scale_O1 is None else weight_OI.to(dtype, copy=True).mul_(scale_O1)


def round_base(model: torch.nn.Module, precision: str) -> None:
    """Put rounded layers into the place of a decoder's frozen linear layers, under their names.

    Args:
        model: its adapter, if any, is in place; only that requires gradients.
        precision: `learner.base_precision`; "model" leaves all as it is.
    """
    if precision == "model":
        return
    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if isinstance(layer, torch.nn.Linear) and not layer.weight.requires_grad:
                setattr(parent, name, RoundedLinear(layer, precision))


class FusedLora(lora.Linear):
    """PEFT's LoRA layer around a frozen linear layer, for one adapter without dropout."""

    def forward(self, x: Tensor) -> Tensor:
        """The base layer's output plus ``scaling * B A x``; the base layer's alone where adapters are disabled."""
        base = self.base_layer
        if self.disable_adapters:
            output: Tensor = base(x)
            return output
        (name,) = self.active_adapters
        weight_a, weight_b = self.lora_A[name].weight, self.lora_B[name].weight
        scale = getattr(base, "weight_scale", None)
        adapted: Tensor = _Adapter.apply(x, base.weight, scale, base.bias, weight_a, weight_b, self.scaling[name])
        with torch.no_grad():
            weight_IO = whole_weight(base.weight, scale, x.dtype).T
            adapted.detach().view(-1, adapted.shape[-1]).addmm_(x.flatten(0, -2), weight_IO)
        return adapted


class _Adapter(torch.autograd.Function):
    """N tokens, I inputs, O outputs, rank R: forwards bias and share of the adapter, backwards the whole layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        scale_O1: Tensor | None,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scaling: float,
    ) -> Tensor:
        inner_NR = x.flatten(0, -2) @ a_RI.to(x.dtype).T
        # No view is returned: it is added to behind autograd's back.
        share = x.new_empty(*x.shape[:-1], len(b_OR))
        bias, bias_counts = (x.new_zeros(()), 0) if bias_O is None else (bias_O, 1)
        out_NO = share.view(-1, len(b_OR))
        torch.addmm(bias, inner_NR, b_OR.to(x.dtype).T, beta=bias_counts, alpha=scaling, out=out_NO)
        ctx.save_for_backward(x, weight_OI, scale_O1, a_RI, b_OR, inner_NR)
        ctx.scaling = scaling
        return share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI, scale_O1, a_RI, b_OR, inner_NR = ctx.saved_tensors
        slope_NO = gradients[0].flatten(0, -2)
        inner_slope_NR = (slope_NO @ b_OR.to(x.dtype)).mul_(ctx.scaling)
        x_slope = None
        if ctx.needs_input_grad[0]:
            x_slope_NI = slope_NO @ whole_weight(weight_OI, scale_O1, x.dtype)
            x_slope = x_slope_NI.addmm_(inner_slope_NR, a_RI.to(x.dtype)).view_as(x)
        a_slope_RI = (inner_slope_NR.T @ x.flatten(0, -2)).to(a_RI.dtype)
        b_slope_OR = (slope_NO.T @ inner_NR).to(b_OR.dtype).mul_(ctx.scaling)
        return x_slope, None, None, None, a_slope_RI, b_slope_OR, None


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
