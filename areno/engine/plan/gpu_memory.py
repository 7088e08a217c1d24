"""Divide a GPU's memory: reserve the memory that training needs at its peak, and assign the rest to the KV cache.

The KV cache is a pool of fixed size, which by default stays allocated between rollouts. The pool must therefore leave memory
for later allocations: optimizer moments in the first step, gradients and activations in every step, and CUDA graphs and
prefills in every rollout.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from areno.engine.plan.memory_probe import available_bytes, default_kv_tokens
from areno.engine.rollout.scheduler import round_up
from areno.engine.train.recompute import KEPT_SHARE
from areno.engine.train.step import MAX_TOKENS_CUDA
from areno.errors import ArenoError

if TYPE_CHECKING:
    from areno.engine.engine_config import EngineConfig
    from areno.engine.role import Role

logger = logging.getLogger(__name__)

# Share of the free memory that is left for fragmentation and libraries.
_UNPLANNED = 0.05
_ROW, _MIN_TOKENS, _GIB = 1024, 1024, 2**30


@dataclass(frozen=True, slots=True)
class Need:
    """Memory in bytes that a run needs in addition to the loaded models."""

    moments: int = 0  # optimizer states, created in the first step
    recomputed: int = 0  # gradients and activations of the largest pass, with activation recomputation
    kept: int = 0  # gradients and activations of the largest pass, without recomputation
    decode: int = 0  # prefills, decode steps and CUDA graphs, without the cache


@dataclass(frozen=True, slots=True)
class Division:
    """How the free memory of a GPU is divided between training and the KV cache."""

    recompute: bool
    cache: int  # bytes of the KV cache
    lacking: int = 0  # bytes that training lacks even without a cache; 0 if it fits


def divide(free: int, need: Need, *, keeps_cache: bool, recompute: bool | None = None) -> Division:
    """Divide the free memory between training and the KV cache. ``free`` is the number of free bytes after loading the models.

    ``keeps_cache`` says whether the KV cache stays allocated during training. ``recompute`` says whether training recomputes
    activations. With None, training recomputes activations if ``need.kept`` is larger than the fraction ``KEPT_SHARE`` of the
    memory that is left after ``need.moments`` is allocated.
    """
    left = int(free * (1 - _UNPLANNED)) - need.moments
    if recompute is None:
        recompute = need.kept > left * KEPT_SHARE
    training = need.recomputed if recompute else need.kept
    beside = max(need.decode, training) if keeps_cache else need.decode
    return Division(recompute, max(left - beside, 0), max(training - left, 0))


def kv_tokens(config: EngineConfig, path: str, roles: Iterable[Role], bytes_per_token: int) -> int:
    """Return the size of the KV cache in tokens, which is the same on all ranks. The models must already be loaded.

    On a GPU that no other process shares, the function also sets whether each role recomputes activations. With
    ``offload_activations``, roles always recompute activations. Otherwise, ``activation_checkpointing`` decides. If
    ``activation_checkpointing`` is None, roles recompute activations only if memory is scarce; see :func:`divide`.
    """
    peers = config.peers
    if config.device.type != "cuda" or config.shares_device:
        ranks = peers.layout.world_size * config.neighbors if config.device.type == "cpu" else 1
        return peers.all_reduce_min(default_kv_tokens(config.device, bytes_per_token * ranks))
    roles = list(roles)
    try:
        need = _need(config, path, roles)
    except (ArenoError, RuntimeError, TypeError, NotImplementedError) as error:
        logger.debug("%s: could not plan the memory for training: %s", path, error)
        return peers.all_reduce_min(default_kv_tokens(config.device, bytes_per_token))
    torch.cuda.empty_cache()
    recompute = True if config.offload_activations else config.activation_checkpointing
    division = divide(available_bytes(config.device), need, keeps_cache=config.keep_rollout_state, recompute=recompute)
    if division.lacking:
        logger.warning(
            "training probably needs %.1f GiB more GPU memory than is free; use --adam-8bit, --offload-optimizer, or a "
            "smaller model",
            division.lacking / _GIB,
        )
    for role in roles:
        role.set_recomputation(division.recompute)
    room, kept = division.cache // bytes_per_token, config.prefix_cache_tokens
    room = room * 4 // 5 if kept is None else room - kept  # the rest is for the prefix cache
    tokens = peers.all_reduce_min(pool_tokens(room, config.max_running, roles[0].model.context_length))
    how = "recomputes activations" if division.recompute else "keeps all activations"
    logger.info("the KV cache has %d tokens (%.1f GiB); training %s", tokens, tokens * bytes_per_token / _GIB, how)
    return tokens


def pool_tokens(tokens: int, running: int, context: int | None) -> int:
    """Return the cache size in tokens, limited to what all running sequences together can fill. The size is at least 1024."""
    limit = running * round_up(context, _ROW) if context else tokens
    return max(min(tokens, limit), _MIN_TOKENS)


def _need(config: EngineConfig, path: str, roles: list[Role]) -> Need:
    """Trace the actor's memory use on fake tensors.

    The function assumes that no other trained model needs more memory than the actor.
    """
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
            sizes = [optimizer.held_bytes() - optimizer.held_bytes(moments=False) for optimizer in trained]
            moments = 0 if any(optimizer.steps for optimizer in trained) else sum(sizes)
    generated = shape.rollout(config.max_running, 1, _ROW, _ROW + 1, None) if actor.kind == "policy" else None
    # Once for a prefill or an eager step, and once for the CUDA graphs, which share one memory pool.
    return Need(moments, recomputed, kept, 0 if generated is None else 2 * generated.beside)
