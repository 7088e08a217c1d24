"""Selection and configuration of backends. Does not import torch."""

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
        devices: device ids of the ranks.
        dummy_load: initialize random weights instead of loading the checkpoint's weights. A reference of the same
            checkpoint gets the same weights. Other checkpoints, frozen critics and frozen reward models are loaded.
        optimizer: fields of :class:`areno.engine.train.optimizer.OptimizerOptions`.
        runtime: ``attn_backend``, ``activation_checkpointing``, ``tree_training``, ``offload_activations``,
            ``keep_rollout_state``, ``eager_decode``, ``speculate``, ``kv_cache_tokens``, ``prefix_cache_tokens``,
            ``return_routed_experts`` (see :mod:`areno.engine.model.routing`), ``device``, ``dtype``,
            ``trust_remote_code``, ``trains`` and ``stall_timeout_s``. ``trains`` is ``policy``, ``reward`` (to train a
            sequence classifier) or ``nothing`` (inference only). With several ranks, a rank without progress for
            ``stall_timeout_s`` seconds counts as failed; the default is 600.
        max_running_prompts: maximum number of sequences decoded concurrently.
        decode_progress_interval_s: seconds between decode progress lines; 0 disables them.
        lora: settings for training an adapter instead of the weights. Keys are fields of
            :class:`areno.engine.model.adapter.AdapterOptions`: ``rank`` (or ``adapter_path``), ``alpha``, ``dropout``,
            ``target_modules``, ``load_in_4bit`` and ``seed``. Set ``dropout`` to 0 for losses with importance ratios,
            because rollouts do not apply dropout. ``save_checkpoint`` writes a PEFT adapter. A reference of the
            trainer's own checkpoint takes no extra memory: it is the model with the adapter disabled.
        fsdp: shard weights and gradients across the data-parallel ranks (FSDP2). By default, only optimizer states are
            sharded.
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
    """A selectable backend.

    Args:
        name: name for lookup and messages.
        config_type: class of the backend's configuration.
        factory: ``module:attribute`` of a callable ``(model_path, world_size, config)``, imported lazily. The callable
            checks the configuration. It returns a function that loads the model as an
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
    """Make a backend selectable by name. Raises ValueError if another backend has this name."""
    registered = _REGISTRY.setdefault(backend.name.lower(), backend)
    if registered != backend:
        raise ValueError(f"a backend named {backend.name!r} is already registered: {registered.factory}")
    return backend


def get_backend(name: str) -> BackendType:
    """Look up a backend by name. Raises ValueError if the name is unknown."""
    if name.lower() not in _REGISTRY:
        raise ValueError(f"unknown backend {name!r}; registered: {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name.lower()]
