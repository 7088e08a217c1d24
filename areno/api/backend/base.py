"""Selection and configuration of backends. This module does not import torch."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from areno.engine.backend import Backend


@dataclass(slots=True)
class ArenoConfig:
    """Configuration of the local engine.

    Args:
        model_path: checkpoint to load instead of the trainer's checkpoint.
        tp_size: tensor-parallel size.
        dp_size: data-parallel size; None means ``world_size // tp_size``.
        devices: device number of each rank.
        dummy_load: whether to initialize random weights instead of loading the weights of the checkpoint. A reference
            model with the same checkpoint gets the same random weights. Frozen critics, frozen reward models, and models
            with another checkpoint are loaded as usual.
        optimizer: fields of :class:`areno.engine.train.optimizer.OptimizerOptions`.
        runtime: a dict with the keys ``attn_backend``, ``activation_checkpointing``, ``tree_training``,
            ``offload_activations``, ``keep_rollout_state``, ``eager_decode``, ``speculate``, ``kv_cache_tokens``,
            ``prefix_cache_tokens``, ``return_routed_experts`` (see :mod:`areno.engine.model.routing`), ``device``,
            ``dtype``, ``trust_remote_code``, ``trains`` and ``stall_timeout_s``. ``trains`` is ``policy``, ``reward``
            (to train a sequence classifier) or ``nothing`` (inference only). With several ranks, a rank that makes no
            progress for ``stall_timeout_s`` seconds (by default 600) counts as failed.
        max_running_prompts: maximum number of sequences (not prompts) decoded concurrently.
        decode_progress_interval_s: seconds between log lines about the progress of decoding; 0 disables these lines.
        lora: settings of a LoRA adapter, which is trained instead of the weights. Keys are fields of
            :class:`areno.engine.model.adapter.AdapterOptions`: ``rank`` (or ``adapter_path``), ``alpha``, ``dropout``,
            ``target_modules``, ``load_in_4bit`` and ``seed``. Set ``dropout`` to 0 for losses with importance ratios,
            because rollouts do not apply dropout. ``save_checkpoint`` writes a PEFT adapter. A reference
            model with the trainer's own checkpoint takes no extra memory, because it is the trained model without the adapter.
        fsdp: whether to shard weights and gradients across the data-parallel ranks (FSDP2). By default, only optimizer
            states are sharded.
    """

    model_path: str | None = None
    tp_size: int = 1
    dp_size: int | None = None
    devices: list[int] | None = None
    dummy_load: bool = False
    optimizer: dict[str, Any] | None = field(default=None)
    runtime: dict[str, Any] | None = field(default=None)
    max_running_prompts: int = 64
    decode_progress_interval_s: float = 10.0
    lora: dict[str, Any] | None = field(default=None)
    fsdp: bool = False


@dataclass(frozen=True, slots=True)
class BackendType:
    """A backend that a trainer can use.

    Args:
        name: name of the backend, for :func:`get_backend` and for messages.
        config_type: class of the backend's configuration.
        factory: import path ``module:attribute`` of a callable ``(model_path, world_size, config)``. The callable
            checks the configuration, and returns a function that loads the model as an
            :class:`areno.engine.backend.Backend`.
    """

    name: str
    config_type: type
    factory: str

    def create(self, model_path: str, world_size: int, config: Any) -> Callable[[], Backend]:
        """Check a configuration, and return a function that loads the backend.

        Raises TypeError if ``config`` is not an instance of ``config_type``.
        """
        if not isinstance(config, self.config_type):
            raise TypeError(
                f"backend {self.name} requires its typed configuration {self.config_type.__name__}, "
                f"got {type(config).__name__}"
            )
        module, _, attribute = self.factory.partition(":")
        make: Callable[..., Callable[[], Backend]] = getattr(importlib.import_module(module), attribute)
        return make(model_path, world_size, config)


Areno = BackendType("areno", ArenoConfig, "areno.api.backend.local:prepare")
_REGISTRY: dict[str, BackendType] = {Areno.name: Areno}


def register_backend(backend: BackendType) -> BackendType:
    """Register a backend, so that it can be selected by name. Raises ValueError if another backend has this name."""
    registered = _REGISTRY.setdefault(backend.name.lower(), backend)
    if registered != backend:
        raise ValueError(
            f"a backend named {backend.name!r} is already registered ({registered.factory}); choose another name"
        )
    return backend


def get_backend(name: str) -> BackendType:
    """Return the registered backend ``name``. Raises ValueError if no backend has this name."""
    if name.lower() not in _REGISTRY:
        raise ValueError(f"there is no backend {name!r}; use one of {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name.lower()]
