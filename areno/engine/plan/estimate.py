"""A rough account of the memory that a run will take, from the model's configuration alone: no weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from areno.config.algorithms import get_algorithm
from areno.config.options import flag_of
from areno.config.paths import adapter_config, base_of
from areno.config.train_options import TrainOptions
from areno.engine.model.adapter import AdapterOptions, attach
from areno.engine.model.causal_lm import CHUNK_ELEMENTS
from areno.engine.plan.memory import KV_SHARE, available_bytes
from areno.errors import UsageError

# Hidden-sized tensors that one decoder layer keeps for backward: norms, projections, MLP halves. A rule of thumb.
_LAYER_TENSORS = 16
# A weight in 4 bits, with its share of the scales.
_NF4_BYTES = 0.52


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by purpose; every figure is rough, activations most of all."""

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    roles: int
    activations: int
    logits: int
    kv_cache: int
    available: int

    @property
    def total(self) -> int:
        """Everything at once, which is more than any moment needs."""
        fixed = self.weights + self.gradients + self.optimizer + self.roles
        return fixed + self.activations + self.logits + self.kv_cache


def estimate_memory(options: TrainOptions) -> MemoryEstimate:
    """Estimate a run's memory.

    Raises:
        UsageError: the model's configuration cannot be read.
    """
    config, module = _model(options, "ckpt")
    count = _count(module)
    device = torch.device("cuda" if _on_cuda(options) else "cpu")
    half = options.dtype == "bfloat16" or (options.dtype == "auto" and device.type == "cuda")
    size = 2 if half else 4
    trained, weights = _weights(options, module, size)
    optimizer = 12 if half and not options.uses_lora else 8  # an adapter is fp32, and needs no master weights
    text: Any = config.get_text_config()
    return MemoryEstimate(
        parameters=count,
        trained=trained,
        weights=weights,
        gradients=trained * 4,
        optimizer=trained * optimizer,
        roles=sum(_role_bytes(options, name, size, 4 + optimizer) for name in _roles(options)),
        activations=_activation_bytes(options, text, size),
        logits=3 * CHUNK_ELEMENTS * 4,
        kv_cache=_kv_bytes(options, text, size),
        available=available_bytes(device),
    )


def _role_bytes(options: TrainOptions, name: str, size: int, per_trained: int) -> int:
    """A further model; the reference of an adapter is the base that is there already."""
    if name == "ref_ckpt" and options.uses_lora and options.ref_ckpt in (None, options.ckpt):
        return 0
    module = _model(options, name)[1]
    if name != "critic_ckpt":
        return _count(module) * size
    trained, weights = _weights(options, module, size)
    return weights + trained * per_trained


def _weights(options: TrainOptions, module: nn.Module, size: int) -> tuple[int, int]:
    """Trained parameters, and bytes of all weights, of a model that is trained."""
    count = _count(module)
    if not options.uses_lora:
        return count, count * size
    linear = sum(p.numel() for name, p in module.named_parameters() if p.ndim == 2 and _is_body(name))
    rank = options.lora_rank or int(adapter_config(str(options.lora_adapter_path)).get("r", 8))
    adapter = AdapterOptions(rank=rank, target_modules=options.lora_target_modules)
    attach(module, "policy", adapter, "", may_merge=False)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    if options.load_in_4bit:
        return trained, int(linear * _NF4_BYTES) + (count - linear) * size + trained * 4
    # While a policy in fp32 generates, the weights with their adapter added stand beside the weights.
    again = linear * size if size == 4 and get_algorithm(options.algo).requires_rollout else 0
    return trained, count * size + again + trained * 4


def _is_body(name: str) -> bool:
    return "embed" not in name and "lm_head" not in name


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _model(options: TrainOptions, name: str) -> tuple[Any, nn.Module]:
    """Configuration of a model that an option names, and the model without memory; --ckpt where it names none."""
    path = base_of(str(getattr(options, name) or options.ckpt))
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=options.trust_remote_code)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{flag_of(name)} {path}: its configuration cannot be read: {error}") from error
    return config, module


def _roles(options: TrainOptions) -> list[str]:
    """Options that name the models that a run holds beside its actor."""
    ppo = options.algo == "ppo"
    held = {
        "ref_ckpt": options.use_kl_loss if ppo else options.algo in ("gspo", "grpo") and options.kl_coef > 0,
        "critic_ckpt": ppo,
        "reward_ckpt": options.reward_ckpt is not None,
    }
    return [name for name, is_held in held.items() if is_held]


def _on_cuda(options: TrainOptions) -> bool:
    return options.device.startswith("cuda") or (options.device == "auto" and torch.cuda.is_available())


def _row_tokens(options: TrainOptions) -> int:
    return options.max_prompt_tokens + options.max_new_tokens


def _activation_bytes(options: TrainOptions, text: Any, size: int) -> int:
    """Kept layer inputs, and the inside of one layer; or the inside of all layers without recomputation."""
    tokens = options.mini_bs * _row_tokens(options)
    per_tensor = tokens * text.hidden_size * size
    layers = text.num_hidden_layers
    inside = _LAYER_TENSORS * per_tensor
    return layers * per_tensor + inside if options.activation_checkpointing else layers * inside


def _kv_bytes(options: TrainOptions, text: Any, size: int) -> int:
    """Cache at full length for all running sequences, or the budget where that is smaller; 0 without rollouts."""
    if not get_algorithm(options.algo).requires_rollout:
        return 0
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    tokens = options.running_sequences * _row_tokens(options)
    if options.kv_cache_tokens is not None:
        tokens = min(tokens, options.kv_cache_tokens)
    return tokens * 2 * text.num_hidden_layers * heads * head * size


def estimate_memory_text(options: TrainOptions) -> str:
    """The estimate as a small table, with a verdict."""
    estimate = estimate_memory(options)
    rows = [
        ("weights", estimate.weights),
        ("gradients (fp32)", estimate.gradients),
        ("optimizer", estimate.optimizer),
        ("reference, critic, reward", estimate.roles),
        ("activations", estimate.activations),
        ("logits chunks", estimate.logits),
        ("KV cache, at most", estimate.kv_cache),
        ("sum", estimate.total),
        ("free now", estimate.available),
    ]
    trained = "" if estimate.trained == estimate.parameters else f", {estimate.trained / 1e6:.2f} M of them trained"
    lines = [f"Memory, a rough estimate ({estimate.parameters / 1e6:.2f} M parameters{trained})"]
    lines += [f"  {name:<26} {size / 2**20:>12,.1f} MiB" for name, size in rows]
    if estimate.total <= estimate.available:
        return "\n".join([*lines, "  It fits."])
    fixed = estimate.total - estimate.kv_cache
    if fixed + KV_SHARE * estimate.available <= estimate.available:
        return "\n".join([*lines, "  It fits, with a KV cache smaller than the worst case; sequences will take turns."])
    return "\n".join([*lines, "  It may not fit: lower --mini-bs, --max-new-tokens or --max-prompt-tokens."])
