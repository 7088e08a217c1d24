"""How a backend is chosen and configured. Importing this module loads no engine."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from areno.engine.backend import Backend


@dataclass(slots=True)
class ArenoConfig:
    """Configuration of the local engine.

    Args:
        model_path: checkpoint to load instead of the trainer's.
        tp_size: tensor-parallel size.
        dp_size: data-parallel size; None is ``world_size // tp_size``.
        devices: device ids of the ranks.
        dummy_load: random weights instead of the checkpoint's.
        optimizer: fields of :class:`areno.engine.train.optimizer.OptimizerConfig`.
        runtime: ``attn_backend``, ``activation_checkpointing``, ``tree_training``, ``offload_activations``,
            ``keep_rollout_state``, ``eager_decode``, ``speculate``, ``kv_cache_tokens``, ``prefix_cache_tokens``,
            ``return_routed_experts`` (see :mod:`areno.engine.model.routing`), ``device``, ``dtype``, ``trust_remote_code``,
            ``trains`` (``policy``, ``reward`` to train a sequence classifier, ``nothing`` to generate only), and
            ``stall_timeout_s`` (seconds without progress after which a rank of several has failed; 600).
        max_running_prompts: most sequences decoded at once.
        decode_progress_interval_s: seconds between decode progress lines; 0 writes none.
        lora: train an adapter in place of the weights: fields of :class:`areno.engine.model.adapter.AdapterOptions`, which
            are ``rank`` (or ``adapter_path``), ``alpha``, ``dropout``, ``target_modules``, ``load_in_4bit`` and ``seed``.
            With dropout, the log-probs of a rollout are not those of a training pass: leave it at 0 where importance
            ratios are taken. ``save_checkpoint`` then writes a PEFT adapter. A frozen policy role of the trainer's own
            checkpoint, such as a reference, is the model with the adapter off, and takes no memory.
        fsdp: spread weights and gradients over the replicas (FSDP2), not the optimizer's state alone.
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
        name: for messages.
        config_type: class of its configuration.
        factory: ``module:attribute`` of a callable ``(model_path, world_size, config)``, imported on use. It checks the
            configuration, and returns what loads the model and gives the :class:`areno.engine.backend.Backend`.
    """

    name: str
    config_type: type
    factory: str

    def create(self, model_path: str, world_size: int, config: Any) -> Callable[[], Backend]:
        """Check the configuration, TypeError for another class; nothing is loaded before what is returned is called."""
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
    """Make a backend selectable by name; ValueError if the name is taken by another."""
    known = _REGISTRY.setdefault(backend.name.lower(), backend)
    if known != backend:
        raise ValueError(f"a backend named {backend.name!r} is registered already: {known.factory}")
    return backend


def get_backend(name: str) -> BackendType:
    """Look a backend up; the ValueError for an unknown one lists what there is."""
    if name.lower() not in _REGISTRY:
        raise ValueError(f"unknown backend {name!r}; registered: {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name.lower()]
