"""The policy in the learner: a frozen base model, a LoRA adapter in float32, and log-probs of target tokens.

Sharding (``learner.sharding``): FSDP2 shards the base over the workers. Each decoder layer, the token embedding and the
LM head are sharding groups. The adapter, the last norm and a tied embedding, which FSDP2 cannot share between two
groups, are replicated. Every forward pass is then a collective: all workers must run it, in the same order.

Gated delta nets (Qwen3.5 and 3.6): on a GPU flash-linear-attention computes their rule and their convolution, elsewhere
transformers' own code does.

8-bit base (``learner.base_precision``): a weight is a code times the scale of its output row, and is dequantized for
each matrix product. Adapter, embedding, LM head, norms and convolutions are not quantized.

LoRA: PEFT computes an adapted layer as a chain of operations on float32 copies, which it keeps for the backward pass.
`FusedLora` adds the layer's output to the adapter's product in place and keeps only the layer's input and the adapter's
inner activations. Autograd sees the adapter's product, with the backward pass of the whole layer; the frozen layer's
output is added afterwards, so that recomputing a checkpointed decoder layer can skip its last product. Both are rounded
to the model's dtype before they are added, as in vLLM's kernels: rounding only their sum would give a policy other than
the one that sampled.

Log-probs: the full logits of one 28,672-token trajectory and a vocabulary of 248,320 would take 28.5 GB in float32, so
the LM head and the log-softmax run over chunks of tokens. The head is frozen, so the gradient of a token's log-prob
with respect to its hidden state does not depend on the loss:

    d log p(y) / d h = W[y] - sum_v p(v) W[v].

It is computed from the chunk's logits in the forward pass and saved instead of the hidden state; the backward pass
multiplies it by the incoming gradient and recomputes nothing.
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
from draco_ray.engine.model_config import check_experts, check_heads, lora_target
from draco_ray.errors import ConfigError, LearnerError, first_line
from draco_ray.learner.context_parallel import ContextParallelGroup
from draco_ray.learner.packing import InputSequence, MicroBatch, concatenate, token_shard
from draco_ray.learner.pointwise import fuse
from draco_ray.learner.segments import UnsupportedLayer, install_attention
from draco_ray.records import Adapter, FloatArray
from draco_ray.temp_dirs import PrivateTempDir


def shard_base(model: Any, mesh: DeviceMesh, device: torch.device) -> None:
    """Shard the base of a causal language model with an adapter over the mesh, one group after the other.

    Args:
        model: transformers' model with PEFT layers, on the CPU; only the adapter requires gradients.
        mesh: a one-dimensional mesh of the workers.
        device: this worker's device; it holds one whole group at a time.
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
        # The embedding is frozen and the first layer, so its backward needs no weight.
        embedding.set_unshard_in_backward(False)
    # Wrap the decoder as well: as FSDP's root module, without parameters, it lets each group prefetch the next.
    fully_shard(decoder, mesh=mesh, ignored_params=whole)


@contextmanager
def unsharded(module: torch.nn.Module) -> Iterator[None]:
    """Unshard a module's parameters inside the block; does nothing for a module that is not sharded."""
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
"""Device types that flash-linear-attention's kernels support."""
RULE, CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
"""Names of the functions in transformers' model modules that the kernels replace."""


def use_kernels(decoder: torch.nn.Module, device: torch.device) -> None:
    """Use flash-linear-attention's kernels for a decoder's delta nets, where it is installed.

    The functions are replaced in transformers' module, which affects all models of that kind in this process.

    Args:
        decoder: with or without delta nets.
        device: the device it will run on; a GPU without the kernels causes a warning.
    """
    mixers = [mixer for module in decoder.modules() if (mixer := getattr(module, "linear_attn", None)) is not None]
    modules = {sys.modules[type(mixer).__module__] for mixer in mixers}
    if util.find_spec("fla") is not None:
        for module in modules:
            _put_kernels(module)
    elif modules and device.type in KERNEL_DEVICES:
        log.warning(
            "flash-linear-attention is not installed: transformers' own code computes gated delta nets, which is many "
            "times slower and needs twice the memory per layer that `draco plan` assumes; install the 'gpu' extra"
        )


def _put_kernels(module: ModuleType) -> None:
    rule, convolution = getattr(module, RULE), getattr(module, CONVOLUTION)
    if not hasattr(rule, "elsewhere"):
        # `inspect.unwrap` returns transformers' own implementation, which a kernel wrapper may hide.
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
    """flash-linear-attention's convolution with transformers' signature.

    ``hidden_states``: 1 x channels x tokens; ``weight``: channels x kernel width.
    """
    kernel = import_module("fla.modules.causal_conv1d").causal_conv1d
    output: Tensor = kernel(hidden_states.transpose(1, 2), weight, bias, activation=activation)[0]
    return output.transpose(1, 2)


FORMATS: dict[str, tuple[torch.dtype, float]] = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""`learner.base_precision` -> dtype of the codes, and the largest code, which represents a row's largest weight."""


class QuantizedLinear(torch.nn.Linear):
    """A frozen linear layer: codes O x I in ``weight``, scales O x 1 of the layer's dtype in ``weight_scale``."""

    def __init__(self, layer: torch.nn.Linear, precision: str) -> None:
        """Quantize a layer; ``precision`` is a key of `FORMATS`."""
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        codes, scale = quantized(layer.weight, precision)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """The product with the dequantized weights, in the dtype of the input."""
        product: Tensor = _QuantizedProduct.apply(input, self.weight, self.weight_scale, self.bias)
        return product


class _QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes_OI: Tensor, scale_O1: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes_OI, scale_O1)
        return torch.nn.functional.linear(x, dequantized(codes_OI, scale_O1, x.dtype), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        codes_OI, scale_O1 = ctx.saved_tensors
        return gradients[0] @ dequantized(codes_OI, scale_O1, gradients[0].dtype), None, None, None


@torch.no_grad()
def quantized(weight_OI: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Quantize a weight matrix.

    Returns: codes, O x I, and a scale per row, O x 1 in the weight's dtype. Code times scale is close to the weight.
    """
    dtype, largest = FORMATS[precision]
    rows_O1 = weight_OI.to(torch.float32).abs().amax(dim=1, keepdim=True)
    # A row of zeros gets a tiny scale; codes are clamped, because a scale may have been rounded down.
    scale_O1 = (rows_O1 / largest).clamp_min(torch.finfo(weight_OI.dtype).tiny).to(weight_OI.dtype)
    codes_OI = (weight_OI.to(torch.float32) / scale_O1.to(torch.float32)).clamp_(-largest, largest)
    return (codes_OI if dtype.is_floating_point else codes_OI.round_()).to(dtype), scale_O1


def dequantized(weight_OI: Tensor, scale_O1: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight that codes and scales represent; without scales, the weight itself."""
    return weight_OI if scale_O1 is None else weight_OI.to(dtype, copy=True).mul_(scale_O1)


def quantize_base(model: torch.nn.Module, precision: str) -> None:
    """Replace a decoder's frozen linear layers by quantized ones.

    Args:
        model: with its adapter, if any; only the adapter requires gradients.
        precision: `learner.base_precision`; "model" changes nothing.
    """
    if precision == "model":
        return
    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if isinstance(layer, torch.nn.Linear) and not layer.weight.requires_grad:
                setattr(parent, name, QuantizedLinear(layer, precision))


class FusedLora(lora.Linear):
    """PEFT's LoRA layer on a frozen linear layer, for one adapter without dropout."""

    def forward(self, x: Tensor) -> Tensor:
        """The base layer's output plus ``scaling * B A x``; only the base output while adapters are disabled."""
        base = self.base_layer
        if self.disable_adapters:
            output: Tensor = base(x)
            return output
        (name,) = self.active_adapters
        weight_a, weight_b = self.lora_A[name].weight, self.lora_B[name].weight
        scale = getattr(base, "weight_scale", None)
        adapted: Tensor = _Adapter.apply(x, base.weight, scale, weight_a, weight_b, self.scaling[name])
        with torch.no_grad():
            weight_OI = dequantized(base.weight, scale, x.dtype)
            out_NO = adapted.detach().view(-1, adapted.shape[-1])
            for rows, x_NI in zip(out_NO.split(ROWS_AT_ONCE), x.flatten(0, -2).split(ROWS_AT_ONCE), strict=True):
                rows += torch.nn.functional.linear(x_NI, weight_OI, base.bias)
        return adapted


class _Adapter(torch.autograd.Function):
    """N tokens, I inputs, O outputs, rank R. Forward: the adapter's output; backward: the whole layer's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        scale_O1: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scaling: float,
    ) -> Tensor:
        inner_NR = x.flatten(0, -2) @ a_RI.to(x.dtype).T
        # Allocate the output instead of returning a view, because the caller adds to it in place without autograd.
        output = x.new_empty(*x.shape[:-1], len(b_OR))
        # Multiply and scale in one operation, so that the product is rounded only after the scaling.
        torch.addmm(
            x.new_zeros(()), inner_NR, b_OR.to(x.dtype).T, beta=0, alpha=scaling, out=output.view(-1, len(b_OR))
        )
        ctx.save_for_backward(x, weight_OI, scale_O1, a_RI, b_OR, inner_NR)
        ctx.scaling = scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI, scale_O1, a_RI, b_OR, inner_NR = ctx.saved_tensors
        slope_NO = gradients[0].flatten(0, -2)
        inner_slope_NR = (slope_NO @ b_OR.to(x.dtype)).mul_(ctx.scaling)
        x_slope = None
        if ctx.needs_input_grad[0]:
            x_slope_NI = slope_NO @ dequantized(weight_OI, scale_O1, x.dtype)
            x_slope = x_slope_NI.addmm_(inner_slope_NR, a_RI.to(x.dtype)).view_as(x)
        a_slope_RI = (inner_slope_NR.T @ x.flatten(0, -2)).to(a_RI.dtype)
        b_slope_OR = (slope_NO.T @ inner_NR).to(b_OR.dtype).mul_(ctx.scaling)
        return x_slope, None, None, a_slope_RI, b_slope_OR, None


def token_logprobs(
    hidden_VH: Tensor,
    head: torch.nn.Linear,
    target_V: Tensor,
    *,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target token, and the entropy of the distribution it was drawn from.

    Args:
        hidden_VH: last hidden states at the V positions that predict a target.
        head: the frozen LM head; its weight receives no gradient.
        target_V: token ids.
        chunk_tokens: number of positions whose logits exist at the same time.
        entropy_gradient: whether the entropy needs a gradient.
    Returns: logprob_V and entropy_V, nats, in float32 (float64 for hidden states in float64); once differentiable with
            respect to ``hidden_VH``.
    """
    logprob_V, entropy_V = _ChunkedLogprobs.apply(
        hidden_VH, head.weight, head.bias, target_V, chunk_tokens, entropy_gradient
    )
    return logprob_V, entropy_V


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_VH: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_V: Tensor,
        chunk_tokens: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        tokens = len(target_V)
        precision = torch.promote_types(hidden_VH.dtype, torch.float32)
        logprob_V = torch.empty(tokens, dtype=precision, device=hidden_VH.device)
        entropy_V = torch.empty_like(logprob_V)
        needs_gradient = ctx.needs_input_grad[0]
        logprob_slope_VH = torch.empty_like(hidden_VH) if needs_gradient else None
        entropy_slope_VH = torch.empty_like(hidden_VH) if needs_gradient and entropy_gradient else None
        for start in range(0, tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logprob_V[chunk], entropy_V[chunk], logprob_slope, entropy_slope = _chunk_logprobs(
                hidden_VH[chunk], weight, bias, target_V[chunk], needs_gradient, needs_gradient and entropy_gradient
            )
            if logprob_slope_VH is not None and logprob_slope is not None:
                logprob_slope_VH[chunk] = logprob_slope
            if entropy_slope_VH is not None and entropy_slope is not None:
                entropy_slope_VH[chunk] = entropy_slope
        ctx.save_for_backward(logprob_slope_VH, entropy_slope_VH)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_V)
        return logprob_V, entropy_V

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logprob_gradient_V, entropy_gradient_V = gradients
        logprob_slope_VH, entropy_slope_VH = ctx.saved_tensors
        gradient_VH = logprob_slope_VH * logprob_gradient_V[:, None].to(logprob_slope_VH.dtype)
        if entropy_slope_VH is not None:
            gradient_VH += entropy_slope_VH * entropy_gradient_V[:, None].to(entropy_slope_VH.dtype)
        return gradient_VH, None, None, None, None, None


def _chunk_logprobs(
    hidden_CH: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_C: Tensor,
    needs_logprob_slope: bool,
    needs_entropy_slope: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Log-probs, entropies, and their gradients with respect to the hidden states; None where not needed.

    At most two float32 arrays of the size of the chunk's logits exist at a time: the logits, and their exponentials,
    which become probabilities in place. Both are freed when this function returns.
    """
    logits = torch.nn.functional.linear(hidden_CH, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest_C1 = logits.amax(dim=-1, keepdim=True)
    exponentials = (logits - largest_C1).exp_()
    sum_C1 = exponentials.sum(dim=-1, keepdim=True)
    normaliser_C1 = largest_C1 + sum_C1.log()
    target_C1 = target_C[:, None]
    logprob_C1 = logits.gather(1, target_C1) - normaliser_C1
    # A batched matrix product, because an elementwise one would need another array of the size of the logits.
    mean_logit_C1 = torch.bmm(exponentials[:, None, :], logits[:, :, None])[:, :, 0] / sum_C1
    logprob_slope_CH = entropy_slope_CH = None
    if needs_logprob_slope or needs_entropy_slope:
        probabilities = exponentials.div_(sum_C1)
        if needs_entropy_slope:
            # Gradient of the entropy with respect to the logits: -p (log p + entropy).
            logits.sub_(mean_logit_C1).mul_(probabilities).neg_()
            entropy_slope_CH = logits.to(weight.dtype) @ weight
        del logits
        if needs_logprob_slope:
            slope = probabilities.neg_().scatter_add_(1, target_C1, torch.ones_like(sum_C1))
            logprob_slope_CH = slope.to(weight.dtype) @ weight
    return logprob_C1[:, 0], (normaliser_C1 - mean_logit_C1)[:, 0], logprob_slope_CH, entropy_slope_CH


ROWS_AT_ONCE = 8192
"""Number of tokens whose frozen output is in memory at a time, before it is added to the adapter's output."""
PACKING_TOLERANCE = 0.1
"""Maximum mean relative difference between the decoder's outputs for packed and for separate sequences. It allows for
bfloat16's rounding; attention to a wrong token makes a far larger difference."""
HEAD_TOLERANCE = 1e-3
"""Maximum relative difference between the model's logits and its head applied to the decoder's output."""


class AdaptedModel:
    """Base model plus adapter. `adapter_off()` turns it into the reference policy."""

    def __init__(
        self,
        model: ModelConfig,
        config: LearnerConfig,
        *,
        seed: int,
        device: torch.device,
        mesh: DeviceMesh | None = None,
        context: ContextParallelGroup | None = None,
    ) -> None:
        """Load the base model and add an untrained adapter: lora_A drawn from ``seed``, lora_B zero.

        Args:
            mesh: the workers that the base is sharded over; None: it is not sharded. With a mesh every forward pass,
                those of ``__init__`` included, is a collective of all of them.
            context: the workers that share micro-batches, whose forward passes are collectives too; None: no others.
        Raises: ConfigError if the model cannot be loaded, its head is not a plain frozen linear layer, or context
                parallelism or its mixture of experts is not supported.
        """
        base = _load_base(model)
        check_experts(base.config.to_dict(), config, model.path)
        if context is not None:
            check_heads(base.config.to_dict(), context.size, model.path)
        base.requires_grad_(False)
        if config.gradient_checkpointing:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lora = LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            lora_dropout=0.0,
            target_modules=lora_target(base.config.to_dict(), config.lora_target, model.path),
            task_type="CAUSAL_LM",
        )
        lora._register_custom_module({torch.nn.Linear: FusedLora})
        # Initialise on the CPU, so that the initial values do not depend on the device.
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
        fuse(self._decoder, compiled=config.compile)
        use_kernels(self._decoder, device)
        quantize_base(self._decoder, config.base_precision)
        if mesh is None:
            base.to(device)
        else:
            shard_base(base, mesh, device)
        self._check_head(model.path)
        self._context: ContextParallelGroup | None = None
        """The workers that share micro-batches, which needs packing."""
        self.packs = False
        """Whether a micro-batch may hold several sequences."""
        self._try_packing(base, context)
        if context is not None and not self.packs:
            raise ConfigError(
                f"learner.context_parallel={context.size}: model {model.path} has layers that workers cannot share "
                "(neither causal attention nor gated delta nets); set learner.context_parallel=1"
            )
        self.progress = 0
        """Number of layers that have started, recomputed ones included; the hang watchdog reads it."""
        for layer in getattr(self._decoder, "layers", ()):
            # A pre-hook, because PyTorch stops recomputing a layer as soon as it has all saved tensors.
            layer.register_forward_pre_hook(self._count)
        self._architectures = _architectures(model.path)
        self.adapter_config = _as_saved(self.peft.peft_config["default"])

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained parameters, which are the adapter's tensors, in a fixed order."""
        return [parameter for name, parameter in sorted(self.peft.named_parameters()) if "lora_" in name]

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of the V targets of a micro-batch, each given the tokens before it in its sequence.

        Returns: logprob_V and entropy_V, nats, in float32 (float64 for a base in float64). Workers that share the
                micro-batch all get all values; each has the gradient of its own tokens.
        """
        logprob_V, entropy_V = self._over_workers(batch, self._logprobs)
        return logprob_V, entropy_V

    def _count(self, *ignored: object) -> None:
        self.progress += 1

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """Disable the adapter inside the block, which gives the reference policy of the KL term."""
        with self.peft.disable_adapter():
            yield

    def adapter(self, version: int) -> Adapter:
        """The adapter under the names and with the config that PEFT's `save_pretrained` writes, in float32."""
        tensors: dict[str, FloatArray] = {
            name: tensor.detach().to("cpu", torch.float32).numpy().copy()
            for name, tensor in get_peft_model_state_dict(self.peft).items()
        }
        return Adapter(version=version, config=self.adapter_config, tensors=tensors)

    def saved_arrays(self) -> dict[str, FloatArray]:
        """The adapter for a file that both PEFT and vLLM load.

        Where the base checkpoint wraps the text model, each array is saved under PEFT's and under vLLM's name: both
        ignore names they do not know.
        """
        arrays = self.adapter(0).tensors
        return arrays | {engine_tensor_name(name, self._architectures): array for name, array in arrays.items()}

    def load_adapter(self, tensors: dict[str, Tensor], source: str) -> None:
        """Replace the adapter's values; accepts the names of `saved_arrays`.

        Raises: LearnerError if names or shapes are not those of this model and LoRA rank.
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
                f"shape {found.get(wrong[0])}, expected {expected.get(wrong[0])}; check that the adapter belongs to "
                "this base model and LoRA rank"
            )
        set_peft_model_state_dict(self.peft, tensors)

    def _offloading(self) -> AbstractContextManager[object]:
        """If `learner.offload_activations` is set, keep tensors saved for the backward pass in host memory."""
        if not self._offload:
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")

    def _over_workers(self, batch: MicroBatch, compute: Callable[[MicroBatch], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Compute values of a micro-batch's targets; workers that share it compute a part each and gather them."""
        if self._context is None:
            return compute(batch)
        part, mine_V = token_shard(batch, self._context.rank, self._context.size)
        return [self._context.gather(array_V, mine_V, len(batch.target_V)) for array_V in compute(part)]

    def _logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        with self._offloading():
            hidden_VH = self._hidden_states(batch)
            # Unshard the head for the forward pass only: the backward pass of the log-probs needs no weight.
            with unsharded(self._head):
                return token_logprobs(
                    hidden_VH,
                    self._head,
                    torch.from_numpy(batch.target_V).to(self.device),
                    chunk_tokens=self._chunk_tokens,
                    entropy_gradient=self._entropy_gradient,
                )

    def _hidden_states(self, batch: MicroBatch) -> Tensor:
        """The decoder's output for the token before each target."""
        token_ids_1T, position_1T = (
            torch.from_numpy(array).to(self.device)[None] for array in (batch.token_ids_T, batch.position_T)
        )
        how = {"segments": batch.segments, "context": self._context} if self.packs else {}
        hidden_1TH: Tensor = self._decoder(
            input_ids=token_ids_1T, position_ids=position_1T, use_cache=False, **how
        ).last_hidden_state
        return hidden_1TH[0, torch.from_numpy(batch.predictor_V).to(self.device)]

    @torch.no_grad()
    def _try_packing(self, base: Any, context: ContextParallelGroup | None) -> None:
        """Install segment attention, so that a micro-batch may hold several sequences.

        It is removed again if a layer is not supported, or if a test gives other outputs for packed sequences than for
        separate ones.
        """
        ids_T = np.arange(24)
        # All sequences share 17 tokens; the first, third and fourth share a prompt of 18 tokens.
        sequences = [
            InputSequence(
                np.append(ids_T[:prompt] % 7, ids_T[prompt : prompt + more] % 5),
                ids_T[: prompt + more] >= prompt,
                prompt,
            )
            for prompt, more in ((18, 2), (17, 2), (18, 1), (18, 3))
        ]
        usual = base.config._attn_implementation
        alone_VH = torch.cat([self._hidden_states(concatenate([sequence])) for sequence in sequences]).float()
        try:
            install_attention(base, shared=context is not None)
            self.packs, self._context = True, context
            (packed_VH,) = self._over_workers(concatenate(sequences), lambda batch: [self._hidden_states(batch)])
            gap = (packed_VH.float() - alone_VH).abs().mean()
            self.packs = bool(gap <= PACKING_TOLERANCE * alone_VH.abs().mean())
        except UnsupportedLayer:
            self.packs = False
        if not self.packs:
            base.set_attn_implementation(usual)

    def _check_head(self, path: str) -> None:
        """Refuse architectures that scale or cap the logits after the head. Raises: ConfigError."""
        if not isinstance(self._head, torch.nn.Linear) or self._head.weight.requires_grad:
            raise ConfigError(
                f"model {path}: the LM head is {type(self._head).__name__}, expected a frozen linear layer; exclude "
                "the head from learner.lora_target"
            )
        token_ids = torch.arange(4, device=self.device)[None]
        with torch.no_grad():
            logits = self.peft(input_ids=token_ids, use_cache=False).logits.float()
            ours = self._head(self._decoder(input_ids=token_ids, use_cache=False).last_hidden_state).float()
        if (logits - ours).abs().max() > HEAD_TOLERANCE * logits.abs().max():
            raise ConfigError(
                f"model {path}: its logits are not the LM head applied to the decoder's output, which is not "
                "supported; choose another model"
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
        raise ConfigError(
            f"model {model.path}: cannot be loaded ({first_line(error)}); expected a model directory or a hub name"
        ) from error


def _architectures(path: str) -> tuple[str, ...]:
    """The architectures that the checkpoint's config.json names; the loaded class may be another one."""
    return tuple(AutoConfig.from_pretrained(path).architectures or ())


def _as_saved(config: Any) -> dict[str, object]:
    """`adapter_config.json` as PEFT writes it for inference."""
    with PrivateTempDir() as folder:
        config.save_pretrained(folder)
        saved: dict[str, object] = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    # Sorted, because PEFT writes this set in hash order.
    targets = saved.get("target_modules")
    return saved | {"inference_mode": True} | ({"target_modules": sorted(targets)} if isinstance(targets, list) else {})
