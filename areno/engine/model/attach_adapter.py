"""Attach new or saved LoRA adapters to a model's linear layers, or merge saved adapters into its weights permanently."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from areno.config.packages import require_packages
from areno.config.paths import adapter_config
from areno.engine.limits import UNREADABLE
from areno.engine.model.adapter import NAME, Adapter, AdapterOptions, adapted_layers
from areno.engine.model.stages import Absent
from areno.errors import ArenoError, UsageError

_TASKS = {"policy": "CAUSAL_LM", "value": "SEQ_CLS", "reward": "SEQ_CLS"}
_HEAD = "score"


def attach(module: nn.Module, kind: str, options: AdapterOptions, base: str, *, may_merge: bool) -> Adapter:
    """Attach an adapter to a module in place, and freeze the module's weights.

    The scalar head of a classifier stays trainable and is saved with the adapter. ``base`` is the name of the base model in the
    adapter's configuration. Raises UsageError: the adapter does not fit the model, or the model lacks a target module.
    """
    require_packages("lora", "LoRA needs")
    with warnings.catch_warnings(), _unsharded_layers(module):
        warnings.simplefilter("ignore")  # peft uses deprecated names of transformers
        if options.adapter_path is not None:
            wrapped = _load(module, options.adapter_path, trainable=True, dropout=options.dropout)
        else:
            wrapped = _create(module, kind, options)
    folder = Path(base).expanduser()
    wrapped.peft_config[NAME].base_model_name_or_path = str(folder.absolute()) if folder.exists() else base
    _refuse_tied(module, adapted_layers(wrapped))
    module.eval()  # new layers start in training mode, with dropout
    if not _is_sharded(module):
        return Adapter(wrapped, may_merge=may_merge)
    from areno.engine.model.sharded_adapter import ShardedAdapter  # slow import (1 s), rarely needed

    return ShardedAdapter(wrapped, may_merge=may_merge)


def merge_for_good(module: nn.Module, path: str) -> nn.Module:
    """Merge the saved adapter ``path`` into a model's weights permanently, and return the model."""
    require_packages("lora", "LoRA needs")
    with _unsharded_layers(module):
        wrapped = _load(module, path, trainable=False)
    layers = adapted_layers(wrapped)
    _refuse_biases(module, layers, path)
    if _is_sharded(module):
        from areno.engine.model.sharded_adapter import merge_sharded

        return merge_sharded(wrapped, layers).requires_grad_(True)
    merged: nn.Module = wrapped.merge_and_unload()
    return merged.requires_grad_(True)


def _is_sharded(module: nn.Module) -> bool:
    """Whether ``transformers`` has sharded a module across ranks."""
    return getattr(module, "_tp_size", None) not in (None, 1)


def _unsharded_layers(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which ``peft`` creates and reads unsharded adapters, even if the module is sharded."""
    if not _is_sharded(module):
        return nullcontext()
    from areno.engine.model.sharded_adapter import as_if_unsharded

    return as_if_unsharded(module)


def brings_head(path: str) -> bool:
    """Whether the adapter in a folder includes a scalar head."""
    config = adapter_config(path)
    return config.get("task_type") == "SEQ_CLS" or _HEAD in (config.get("modules_to_save") or ())


def _create(module: nn.Module, kind: str, options: AdapterOptions) -> Any:
    import peft

    targets = options.targets
    if isinstance(targets, list):
        _refuse_unknown(module, targets)
    config = peft.LoraConfig(
        task_type=_TASKS[kind],
        r=options.rank,
        lora_alpha=2 * options.rank if options.alpha is None else options.alpha,  # type: ignore[arg-type]
        lora_dropout=options.dropout,
        target_modules=targets,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        try:
            return peft.get_peft_model(cast(Any, module), config, adapter_name=NAME)
        except ValueError as error:
            raise UsageError(
                f"peft rejects the adapter options rank={options.rank}, alpha={options.alpha}, dropout={options.dropout}, "
                f"target_modules={options.target_modules!r}: {error}; change these --lora options"
            ) from error


def _load(module: nn.Module, path: str, *, trainable: bool, dropout: float = 0.0) -> Any:
    import peft

    path = str(Path(path).expanduser())
    unmatched: list[str] = []

    def compare(_: nn.Module, keys: Any) -> None:
        unmatched.extend(f"the adapter has no {name}" for name in keys.missing_keys if ".lora_" in name)
        if not any(isinstance(child, Absent) for child in module.modules()):  # a stage has only some of the layers
            unmatched.extend(f"the model has no {name}" for name in keys.unexpected_keys if ".lora_" in name)

    hook = module.register_load_state_dict_post_hook(compare)
    try:
        config: Any = peft.PeftConfig.from_pretrained(path)
        _refuse_other_kinds(config, path, _is_sharded(module))
        config.lora_dropout = dropout
        wrapped = peft.PeftModel.from_pretrained(
            cast(Any, module), path, adapter_name=NAME, is_trainable=trainable, config=config
        )
    except ArenoError:
        raise
    except (*UNREADABLE, TypeError) as error:
        text = " ".join(str(error).split())[:400]
        raise UsageError(
            f"the adapter {path} does not fit {type(module).__name__}: {type(error).__name__}: {text}; use an adapter "
            "that was trained on this model"
        ) from error
    finally:
        hook.remove()
    if unmatched:
        more = f" and {len(unmatched) - 2} more" if len(unmatched) > 2 else ""
        raise UsageError(
            f"the adapter {path} does not fit {type(module).__name__}: {', '.join(unmatched[:2])}{more}; use an adapter "
            "that was trained on this model"
        )
    return wrapped


def _refuse_other_kinds(config: Any, path: str, sharded: bool) -> None:
    """Reject adapters that are not LoRA adapters, or that train the biases of the base model.

    If the base model is sharded, also reject adapters whose initialization changes the weights of the base model.
    """
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise UsageError(
            f"the adapter {path} has the type {kind}, but areno supports only the type LORA; use a LoRA adapter"
        )
    if config.bias != "none":
        raise UsageError(
            f"the adapter {path} trains the biases of its base model (bias={config.bias!r}), but areno freezes these biases; "
            "use an adapter with bias='none'"
        )

    if sharded and isinstance(config.init_lora_weights, str) and config.init_lora_weights != "gaussian":
        raise UsageError(
            f"the adapter {path} uses init_lora_weights={config.init_lora_weights!r}, which changes the weights of the base "
            "model. areno cannot change weights that are sharded (--tp-size): use --tp-size 1, or convert the adapter to plain "
            "LoRA with peft (argument path_initial_model_for_weight_conversion of PeftModel.save_pretrained)"
        )


def _refuse_biases(module: nn.Module, layers: Sequence[Any], path: str) -> None:
    """Reject an adapter that has a bias (``lora_bias``) for a layer without a bias, because the bias cannot be merged."""
    names = {layer: name for name, layer in module.named_modules()}
    for layer in layers:
        biased = any(matrix.bias is not None for matrix in layer.lora_B.values())
        if biased and getattr(layer.get_base_layer(), "bias", None) is None:
            raise UsageError(
                f"the adapter {path} has a bias (lora_bias) for the layer {names[layer]}, but this layer has no bias, so the "
                "adapter cannot be merged into the model; use an adapter without lora_bias"
            )


def _refuse_unknown(module: nn.Module, names: Sequence[str]) -> None:
    from transformers.pytorch_utils import Conv1D

    linear = [name for name, child in module.named_modules() if isinstance(child, nn.Linear | Conv1D)]
    unknown = [name for name in names if not any(full == name or full.endswith(f".{name}") for full in linear)]
    if unknown:
        raise UsageError(
            f"--lora-target-modules: {type(module).__name__} has no linear layers named {', '.join(unknown)}; use names of its "
            f"linear layers: {', '.join(sorted({name.rpartition('.')[2] for name in linear}))}"
        )


def _refuse_tied(module: nn.Module, layers: Sequence[Any]) -> None:
    """Reject adapters of layers with tied weights, because merging such an adapter would also change another layer."""
    owners: dict[int, list[str]] = {}
    for name, child in module.named_modules():
        weight = child._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(name.removesuffix(".base_layer"))
    for layer in layers:
        shared = owners.get(id(layer.get_base_layer()._parameters.get("weight")), [])
        if len(shared) > 1:
            raise UsageError(
                f"{' and '.join(shared)} share one weight in this model, so an adapter cannot change "
                "only one of these layers; remove these layers from --lora-target-modules"
            )
