"""Load a checkpoint as a policy, a critic or a reward model.

Loading validates that areno runs the model correctly; see :mod:`areno.engine.model.load_check`. If the model has
attention windows that are shorter than its context, the validation is repeated with windows of 4 tokens, because the test
sequences may be shorter than the original windows.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging
from transformers.utils.logging import disable_progress_bar

from areno.config.paths import base_of, is_adapter
from areno.engine.limits import UNREADABLE, read_config
from areno.engine.model.adapter import AdapterOptions
from areno.engine.model.attach_adapter import attach, brings_head, merge_for_good
from areno.engine.model.attention import IMPLEMENTATIONS
from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.linear import use_fast_products
from areno.engine.model.load_check import (
    PROBE_LENGTHS,
    broken_weights,
    first_lines,
    probe_inputs,
    run_individually,
    validate,
)
from areno.engine.model.packed_model import PackedModel
from areno.engine.model.packing import PackedPlan
from areno.engine.model.recurrent import wrap_recurrent_layers
from areno.engine.model.stages import StageLayers, model_body, refuse_changed_input, stage_class
from areno.engine.model.value_model import HEAD_NAMES, ValueModel, classifier_class, install_head, read_head
from areno.engine.model.windows import limiting_window, narrow_windows
from areno.engine.parallel.rank_context import RankContext
from areno.errors import ArenoError, UnsupportedModelError, UsageError

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=PackedModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options for loading a checkpoint."""

    dtype: torch.dtype
    device: torch.device | str = "cpu"
    trust_remote_code: bool = False
    dummy: bool = False  # random weights; only the configuration is read
    seed: int = 0  # seed of the random weights
    attn_backend: str = "flash"
    four_bit: bool = False  # quantize the linear layers to 4 bits, which freezes them
    use_kernels: bool = False  # replace supported layers with kernels from the Hugging Face hub
    option: str = "--ckpt"  # the option that named the checkpoint, for error messages
    peers: RankContext = field(default_factory=RankContext)


def load_causal_lm(path: str, options: LoadOptions) -> CausalLM:
    """Load a causal LM from a folder or hub id, and prepare the model for packed sequences.

    If the checkpoint is an adapter, the adapter is merged into its base model. Raises UsageError: the checkpoint cannot be
    read. Raises UnsupportedModelError: the model cannot process packed sequences correctly.
    """
    with _naming_full_memory(path, options):
        with _reading(path, options, "causal language model"):
            config = _config_of(path, options)
            stage = _stage_of(config, path, options)
            module = _build(AutoModelForCausalLM, base_of(path), options, config, stage)
        module = _complete(module, path, options)
        return prepare_as(CausalLM, module, path, options.attn_backend, stage, validates=options.peers.reads)


def load_value_model(path: str, options: LoadOptions, *, needs_head: bool = False) -> ValueModel:
    """Load a critic or a reward model from a sequence classifier or a causal LM.

    If the checkpoint has no scalar head, the model gets a head of zeros.

    Args:
        needs_head: whether to reject a checkpoint without a scalar head.

    Raises:
        UsageError: the checkpoint cannot be read, or has no scalar head although ``needs_head`` is set.
    """
    with _naming_full_memory(path, options):
        with _reading(path, options, "sequence classifier"):
            base = base_of(path)
            config = _config_of(base, options)
            stage = _stage_of(config, path, options)
            head = None if options.dummy else read_head(base)
            if head is None and needs_head and not (is_adapter(path) and brings_head(path)):
                raise UsageError(
                    f"{options.option} {path} has no scalar head with one of the names {', '.join(HEAD_NAMES)}; "
                    "train a reward model with `areno train --algo rm`, or use a sequence classifier"
                )
            config.num_labels = 1 if head is None else len(head[0])
            with _quiet():
                module = _build(classifier_class(config), base, options, config, stage)
        if stage is None or stage.last:
            install_head(module, head)
        module = _complete(module, path, options)
        return prepare_as(ValueModel, module, path, options.attn_backend, stage, validates=options.peers.reads)


def add_adapter(model: M, kind: str, adapter: AdapterOptions, path: str) -> M:
    """Attach an adapter to a model, and return the new model. Training changes the adapter instead of the model's weights."""
    may_merge = kind == "policy" and model.device.type == "cpu" and model.dtype == torch.float32
    attached = attach(model.module, kind, adapter, path, may_merge=may_merge)
    adapted = type(model)(model.module)  # rewrap: body and head refer to the module's current layers
    adapted.adapter = attached
    trained = sum(p.numel() for _, p in adapted.parameters())
    counts = (attached.rank, attached.layers, trained / 1e6)
    logger.info("the adapter has rank %d and adapts %d layers; it has %.2f million trained parameters", *counts)
    return adapted


def _complete(module: nn.Module, path: str, options: LoadOptions) -> nn.Module:
    if options.four_bit:  # already on its device
        child: Any
        for child in module.modules():
            # On some CPUs, bitsandbytes would use a bf16 kernel, but only without gradients, so rollout would differ
            # from training.
            if hasattr(child, "support_avx512bf16_for_cpu"):
                child.support_avx512bf16_for_cpu = False
    else:
        module = module.to(options.device)
    return merge_for_good(module, path) if is_adapter(path) else module


def load_shape(path: str, options: LoadOptions, *, classifier: bool) -> PackedModel:
    """Build a model with a checkpoint's architecture, but without reading its weights. ``options.dummy`` must be set.

    areno uses the model to estimate memory. Under PyTorch's ``FakeTensorMode``, the model takes no memory.
    """
    with _reading(path, options, "sequence classifier" if classifier else "causal language model"):
        config = _config_of(path, options)
        if classifier:
            config.num_labels = 1
        module = _build(classifier_class(config) if classifier else AutoModelForCausalLM, path, options, config)
    _disable_dropout(module)
    module.eval()
    wrap_recurrent_layers(module)
    _use_areno_attention(module, path, options.attn_backend)
    return ValueModel(module) if classifier else CausalLM(module)


def prepare(module: nn.Module, name: str = "model", attn_backend: str = "flash") -> CausalLM:
    """Prepare a loaded causal LM for packed sequences; see :func:`prepare_as`."""
    return prepare_as(CausalLM, module, name, attn_backend)


def prepare_as(
    kind: type[M],
    module: nn.Module,
    name: str = "model",
    attn_backend: str = "flash",
    stage: StageLayers | None = None,
    *,
    validates: bool = True,
) -> M:
    """Install areno's attention function in a loaded model or pipeline stage, and validate the model.

    Dropout is disabled. The validation compares areno's results with those of ``transformers``. For a policy, the compared
    results are the logits. For a critic, a reward model or a stage without the output layer, the compared results are the
    hidden states. ``validates`` is False if another rank reads and validates the weights.
    """
    _repair_generation_config(module)
    _disable_dropout(module)
    module.eval()
    if not validates:
        return _wrapped(kind, module, name, attn_backend, stage)
    body: Any = model_body(module)
    compares_logits = kind is CausalLM and (stage is None or stage.last)

    def stock(inputs: dict[str, Tensor]) -> Tensor:
        if compares_logits:
            return module(**inputs, use_cache=False).logits  # type: ignore[no-any-return]
        return body(**inputs, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def ours(model: PackedModel, hidden: Tensor) -> Tensor:
        return model.own_logits(hidden) if isinstance(model, CausalLM) and compares_logits else hidden

    probe, window = probe_inputs(module, stage), limiting_window(module.config)
    expected, choices = run_individually(stock, probe)
    if not expected.isfinite().all():
        raise UsageError(broken_weights(module, name))
    if window is not None:
        with narrow_windows(module):
            in_window = run_individually(stock, probe)
    model = _wrapped(kind, module, name, attn_backend, stage)
    if stage is not None:
        refuse_changed_input(module, stage, name, PackedPlan([PROBE_LENGTHS[0]], model.device))
    unsupported = "one of its layers lets packed sequences affect each other; this architecture is not supported"
    validate(model, ours, probe, expected, choices, name, unsupported)
    if window is not None:
        unsupported = (
            f"a layer ignores its attention window of {window} tokens (transformers applies this window only in its attention "
            "masks, which areno does not use); use another model, or set max_position_embeddings in the model's config.json "
            f"to {window}"
        )
        with narrow_windows(module):
            validate(model, ours, probe, *in_window, name, unsupported)
    return model


def _wrapped(kind: type[M], module: nn.Module, name: str, attn_backend: str, stage: StageLayers | None) -> M:
    wrap_recurrent_layers(module)
    use_fast_products(module)
    _use_areno_attention(module, name, attn_backend)
    model = kind(module)
    model.stage = stage
    return model


def _disable_dropout(module: nn.Module) -> None:
    """Disable dropout, even in training, because dropout would add noise to the importance ratios."""
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0


def _config_of(path: str, options: LoadOptions) -> Any:
    return read_config(path, option=options.option, trust_remote_code=options.trust_remote_code)


def _stage_of(config: Any, path: str, options: LoadOptions) -> StageLayers | None:
    layout = options.peers.layout
    if layout.pp_size == 1:
        return None
    if options.dummy:
        raise UsageError(
            f"{options.option} {path}: random weights (dummy_load) cannot be split into pipeline stages; use a layout "
            "without pipeline parallelism (such as d2 instead of p2)"
        )
    layers = int(config.get_text_config().num_hidden_layers)
    try:
        return StageLayers(layout, options.peers.place.stage, layers)
    except ValueError as error:
        raise UsageError(
            f"{options.option} {path}: {error}; use fewer pipeline stages, or pp_schedule=1F1B, which needs only one model "
            "chunk per stage"
        ) from error


def _build(
    kind: Any, path: str, options: LoadOptions, config: PretrainedConfig, stage: StageLayers | None = None
) -> nn.Module:
    arguments: dict[str, Any] = {"dtype": options.dtype, "attn_implementation": "eager"}
    auto = kind.__name__.startswith("AutoModel")
    if stage is not None:
        kind, auto = stage_class(_known_class(kind, config), stage), False
    if auto:
        arguments["trust_remote_code"] = options.trust_remote_code
    if options.four_bit:
        # 4-bit normal floats with double quantization (Dettmers et al. 2023, arXiv:2305.14314).
        nf4 = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=options.dtype,
        )
        arguments |= {"quantization_config": nf4, "device_map": {"": options.device}}
    if not sys.stderr.isatty():
        disable_progress_bar()
    tp_size = options.peers.layout.tp_size
    if options.dummy:
        if tp_size > 1:
            raise UsageError(f"--tp-size {tp_size}: random weights (dummy_load) cannot be sharded; use --tp-size 1")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            return kind.from_config(config, **arguments) if auto else kind._from_config(config, **arguments)
    if tp_size > 1:
        arguments |= _sharding_arguments(kind, path, options, config)
    if options.use_kernels:
        arguments["use_kernels"] = True
    if not options.peers.reads:
        return _without_weights(kind, config, auto, arguments)
    with nullcontext() if stage is None else _quiet():  # weights of other stages are expected to be missing
        module, report = kind.from_pretrained(
            path, config=config, ignore_mismatched_sizes=True, output_loading_info=True, **arguments
        )
    _refuse_random_weights(report, options.option, path)
    # transformers leaves shards as views, which would keep the full tensors in memory.
    for parameter in module.parameters() if tp_size > 1 else ():
        part = getattr(parameter, "_local_tensor", parameter)  # DTensor gives no other access to the tensor itself
        part.data = part.detach().clone()
    return module  # type: ignore[no-any-return]


def _without_weights(kind: Any, config: PretrainedConfig, auto: bool, arguments: dict[str, Any]) -> nn.Module:
    """Build the model with uninitialized weights. The rank that reads the checkpoint sends the weights later."""
    with no_init_weights():
        module: Any = kind.from_config(config, **arguments) if auto else kind._from_config(config, **arguments)
    module.tie_weights()  # skipped by no_init_weights
    return module  # type: ignore[no-any-return]


def _known_class(kind: Any, config: PretrainedConfig) -> Any:
    """Return the model class that an auto class of ``transformers`` selects for a configuration."""
    resolved = getattr(kind, "_model_mapping", {type(config): kind}).get(type(config), None)
    if resolved is None or isinstance(resolved, tuple):
        raise UnsupportedModelError(
            f"{type(config).__name__}: only model classes of transformers can be split into pipeline stages; use a "
            "layout without pipeline parallelism (such as d2 instead of p2)"
        )
    return resolved


def _sharding_arguments(kind: Any, path: str, options: LoadOptions, config: PretrainedConfig) -> dict[str, Any]:
    from areno.engine.parallel.sharding import distributed_config  # slow import (1 s), rarely needed

    module = getattr(kind, "_model_mapping", {}).get(type(config), kind)
    tp_plan = getattr(module, "_tp_plan", None) or {}
    layout = options.peers.layout
    return {"distributed_config": distributed_config(config, tp_plan, layout, options.option, path)}


def _refuse_random_weights(report: dict[str, Any], option: str, path: str) -> None:
    """Raise UsageError if a weight is missing or has a wrong shape, unless the weight belongs to a scalar head.

    ``transformers`` would initialize such a weight randomly.
    """
    problems = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    problems += [
        f"{name} has the shape {tuple(stored)} instead of {tuple(expected)}"
        for name, stored, expected in sorted(report["mismatched_keys"])
    ]
    problems = [text for text in problems if not text.startswith("score.")]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UsageError(
            f"{option} {path}: the weights do not match the configuration: {', '.join(problems[:3])}{more}; "
            "if the model is a classifier but is used as a policy, use a causal language model; otherwise, download the "
            "checkpoint again"
        )


@contextmanager
def _naming_full_memory(path: str, options: LoadOptions) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"{options.option} {path}: the GPU has too little free memory for this model; stop other programs that use the "
            f"GPU, use a smaller model, or use more GPUs ({first_lines(error)})"
        ) from error


@contextmanager
def _reading(path: str, options: LoadOptions, what: str) -> Iterator[None]:
    try:
        yield
    except (ArenoError, torch.OutOfMemoryError):
        raise
    except UNREADABLE as error:
        where = "this folder" if Path(path).expanduser().exists() else "the model with this hub id"
        raise UsageError(
            f"{options.option} {path}: {where} could not be loaded as a {what}: {first_lines(error)}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the reports of ``transformers`` about missing weights."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _use_areno_attention(module: nn.Module, name: str, attn_backend: str) -> None:
    try:
        module.set_attn_implementation(IMPLEMENTATIONS[attn_backend])  # type: ignore[operator]
    except (ValueError, AttributeError, TypeError) as error:
        raise UnsupportedModelError(
            f"{name}: {type(module).__name__} does not support registered attention functions ({first_lines(error)}); "
            "use another model"
        ) from error


def _repair_generation_config(module: Any) -> None:
    """Enable sampling in the generation config if ``transformers`` rejects the config.

    For example, ``transformers`` rejects a config that sets a temperature without sampling.
    """
    config = getattr(module, "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True
