"""How a GPU's memory is divided: the peak of training first, and what that leaves for the KV cache.

The cache is a pool of one size that stays between rollouts, so it must leave room for what appears later: the optimizer's
moments in the first step, gradients and activations in every step, captured graphs and prefills in every rollout.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from areno.engine.plan.memory import available_bytes, default_kv_tokens
from areno.engine.rollout.scheduler import round_up
from areno.engine.train.recompute import KEPT_SHARE
from areno.engine.train.step import MAX_TOKENS_CUDA
from areno.errors import ArenoError

if TYPE_CHECKING:
    from areno.engine.engine_config import EngineConfig
    from areno.engine.role import Role

logger = logging.getLogger(__name__)

# What fragmentation and libraries take of the free memory.
_UNPLANNED = 0.05
_ROW, _LEAST_TOKENS, _GIB = 1024, 1024, 2**30


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes beside what is allocated once the models are loaded."""

    moments: int = 0  # states that the optimizers make in their first step, and keep
    recomputed: int = 0  # gradients, and activations of the largest pass where layers are recomputed in backward
    kept: int = 0  # the same where activations are kept
    decode: int = 0  # prefills, decode steps and captured graphs, without the cache


@dataclass(frozen=True, slots=True)
class Division:
    """What a GPU's memory is used for."""

    recompute: bool
    cache: int  # bytes of the KV cache
    lacking: int = 0  # bytes that training lacks even without a cache; 0 where it fits


def divide(free: int, need: Need, *, keeps_cache: bool, recompute: bool | None = None) -> Division:
    """Divide the bytes that are free once the models are loaded.

    ``keeps_cache``: the cache stays while models train. ``recompute``: layers are recomputed; None keeps activations if
    they fit.
    """
    left = int(free * (1 - _UNPLANNED)) - need.moments
    if recompute is None:
        recompute = need.kept > left * KEPT_SHARE
    training = need.recomputed if recompute else need.kept
    beside = max(need.decode, training) if keeps_cache else need.decode
    return Division(recompute, max(left - beside, 0), max(training - left, 0))


def kv_tokens(config: EngineConfig, path: str, roles: Iterable[Role], bytes_per_token: int) -> int:
    """Tokens of the KV cache of an engine whose models are loaded; all ranks take the same.

    On a GPU this also decides whether roles recompute layers, where the configuration leaves it open.
    """
    peers = config.peers
    if config.device.type != "cuda" or config.shares_device:
        ranks = peers.layout.world_size * config.neighbours if config.device.type == "cpu" else 1
        return peers.smallest(default_kv_tokens(config.device, bytes_per_token * ranks))
    roles = list(roles)
    try:
        need = _need(config, path, roles)
    except (ArenoError, RuntimeError, TypeError, NotImplementedError) as error:
        logger.debug("%s: the memory of training cannot be planned: %s", path, error)
        return peers.smallest(default_kv_tokens(config.device, bytes_per_token))
    torch.cuda.empty_cache()
    recompute = True if config.offload_activations else config.activation_checkpointing
    found = divide(available_bytes(config.device), need, keeps_cache=config.keep_rollout_state, recompute=recompute)
    if found.lacking:
        logger.warning(
            "training is planned to need %.1f GiB more than the GPU has free; use --adam-8bit, --offload-optimizer or a "
            "smaller model",
            found.lacking / _GIB,
        )
    for role in roles:
        role.activation_checkpointing = found.recompute
    room, kept = found.cache // bytes_per_token, config.prefix_cache_tokens
    room = room * 4 // 5 if kept is None else room - kept  # a share for kept contexts, beside it
    tokens = peers.smallest(pool_tokens(room, config.max_running, roles[0].model.context_length))
    how = "recomputes layers in backward" if found.recompute else "keeps all activations"
    logger.info("the KV cache has %d tokens (%.1f GiB); training %s", tokens, tokens * bytes_per_token / _GIB, how)
    return tokens


def pool_tokens(tokens: int, running: int, context: int | None) -> int:
    """Tokens of a cache that has room for so many: no more than all running sequences can fill."""
    most = running * round_up(context, _ROW) if context else tokens
    return max(min(tokens, most), _LEAST_TOKENS)


def _need(config: EngineConfig, path: str, roles: list[Role]) -> Need:
    """Traced on shapes for the actor; a further model that trains is taken for one like it."""
    from areno.engine.plan.trace import ShapeOf

    actor = roles[0]
    options = replace(config.load_options(), device=torch.device("cpu"), dummy=True, peers=type(config.peers)())
    shape = ShapeOf(path, options, actor.kind, config.adapter, config.peers.layout)
    trained = [role.optimizer for role in roles if role.optimizer is not None]
    moments = recomputed = kept = 0
    if trained:
        rows = [_ROW] * (MAX_TOKENS_CUDA // _ROW)
        passes = [
            shape.update(
                *(rows, rows, config.optimizer),
                several=True,
                checkpointing=checkpointing,
                offloading=checkpointing and config.offload_activations,
                device=config.device,
            )
            for checkpointing in (True, False)
        ]
        recomputed, kept = (max(update.forward, update.backward) for update in passes)
        if not config.optimizer.offload:
            made = [optimizer.held_bytes() - optimizer.held_bytes(moments=False) for optimizer in trained]
            moments = 0 if any(optimizer.steps for optimizer in trained) else sum(made)
    generated = shape.rollout(config.max_running, 1, _ROW, _ROW + 1, None) if actor.kind == "policy" else None
    # Once for a prefill or an eager step, and once for what graphs hold, which share the memory of the largest.
    return Need(moments, recomputed, kept, 0 if generated is None else 2 * generated.beside)
