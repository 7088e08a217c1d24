"""One model on one device: it generates, it trains, it saves.

Rollout and training share the module, so a weight never has to be copied from one to the other. ``version`` counts
optimizer steps; every generated token carries the version that made it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from areno.engine.checkpoint.folder import STATE_FOLDER
from areno.engine.inference import DecodeProgress
from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.loading import load_causal_lm
from areno.engine.model.packing import PackedPlan
from areno.engine.plan.memory import default_kv_tokens
from areno.engine.rollout.loop import RolloutLoop
from areno.engine.rollout.probe import prove_decoding
from areno.engine.train.optimizer import MasterAdamW, OptimizerConfig
from areno.engine.train.step import TrainStep
from areno.errors import CheckpointError
from areno.loss_fns.pack import LossFn
from areno.text.chat import eos_token_ids, load_tokenizer
from areno.text.stop import StopChecker
from areno.types import Request, RolloutResult, TrainSequence

logger = logging.getLogger(__name__)

_OPTIMIZER_FILE = "optimizer.pt"
# Most tokens of one scoring forward pass.
_SCORE_TOKENS = 16384


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """How an engine loads, generates and trains.

    Attributes:
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: type of the weights in memory and of the computation.
        optimizer: rates and decay of the policy.
        attn_backend: ``flash`` or ``native``, see :mod:`areno.engine.model.attention`.
        activation_checkpointing: recompute layers in backward.
        keep_rollout_state: keep the KV cache between rollout phases.
        eager_decode: never capture or compile the decode step; this engine always decodes eagerly so far.
        kv_cache_tokens: KV budget; None takes a share of the free memory.
        max_running: most sequences decoded at once.
        trust_remote_code: allow code that a checkpoint ships.
        dummy_load: random weights instead of the checkpoint's.
        decode_progress_interval_s: seconds between decode progress lines.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    attn_backend: str = "flash"
    activation_checkpointing: bool = True
    keep_rollout_state: bool = True
    eager_decode: bool = False
    kv_cache_tokens: int | None = None
    max_running: int = 64
    trust_remote_code: bool = False
    dummy_load: bool = False
    decode_progress_interval_s: float = 10.0


class Engine:
    """See the module's text.

    Args:
        path: checkpoint folder or hub id.
        config: device, types, budgets.
        tokenizer: where it differs from the checkpoint's own.
    """

    def __init__(self, path: str, config: EngineConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.path, self.config = path, config
        self.tokenizer = tokenizer or load_tokenizer(path, trust_remote_code=config.trust_remote_code)
        self.model: CausalLM = load_causal_lm(
            path,
            dtype=config.dtype,
            device=config.device,
            trust_remote_code=config.trust_remote_code,
            dummy=config.dummy_load,
            attn_backend=config.attn_backend,
        )
        self.eos_ids = eos_token_ids(self.tokenizer, path)
        bytes_per_token = prove_decoding(self.model, path)
        self.kv_tokens = config.kv_cache_tokens or default_kv_tokens(config.device, bytes_per_token)
        self.loop = RolloutLoop(
            self.model,
            eos_ids=self.eos_ids,
            make_stop_text=lambda stop, skip: StopChecker(self.tokenizer, stop, skip),
            budget_tokens=self.kv_tokens,
            max_running=config.max_running,
            progress=DecodeProgress(config.decode_progress_interval_s),
        )
        self.optimizer = MasterAdamW(self.model.parameters(), config.optimizer)
        self._step = TrainStep(self.model, self.optimizer, config.activation_checkpointing)
        logger.debug("loaded %s: kv budget %d tokens of %d bytes", path, self.kv_tokens, bytes_per_token)

    @property
    def version(self) -> int:
        """Optimizer steps that the weights have seen."""
        return self.optimizer.steps

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """Queue requests; see :meth:`RolloutLoop.submit`."""
        return self.loop.submit(requests)

    def end_rollout(self) -> None:
        """Abort what is still pending, and drop the cache unless it is to be kept."""
        self.loop.cancel_all()
        if not self.config.keep_rollout_state:
            self.loop.cache.release()

    def train(
        self, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int, accumulation: int | None = None
    ) -> dict[str, float]:
        """Train on rows; see :meth:`TrainStep.run`. Waits for running generation first."""
        self.loop.wait_idle()
        stats = self._step.run(rows, loss_fn, mini_bs, accumulation)
        self.loop.version = self.version
        return stats

    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-prob of each token of each row given the tokens before it; entry 0 is 0.0."""
        self.loop.wait_idle()
        scores: list[list[float]] = []
        batch: list[Sequence[int]] = []
        for row in rows:
            if batch and sum(map(len, batch)) + len(row) > _SCORE_TOKENS:
                scores += self._score_batch(batch, temperature)
                batch = []
            batch.append(row)
        return scores + (self._score_batch(batch, temperature) if batch else [])

    def _score_batch(self, rows: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        plan = PackedPlan([len(row) for row in rows], self.model.device)
        tokens = torch.tensor([token for row in rows for token in row], device=self.model.device)
        hidden = self.model.body(tokens, plan.position_ids, plan)
        shifted = torch.roll(tokens, -1)
        logprobs = self.model.logprobs(hidden, shifted, torch.full(tokens.shape, temperature, device=tokens.device))
        values = logprobs.tolist()
        return [[0.0, *values[start : end - 1]] for start, end in zip(plan.starts, plan.starts[1:], strict=False)]

    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint: weights, both moments, and master weights where the model is not fp32."""
        count = sum(p.numel() for _, p in self.model.parameters())
        weights = sum(p.numel() * p.element_size() for p in self.model.module.parameters())
        return weights + count * (8 if self.config.dtype == torch.float32 else 12)

    def save_model(self, folder: str | Path) -> None:
        """Write weights, configuration and tokenizer in Hugging Face format."""
        module: Any = self.model.module
        disable_progress_bar()  # a bar for every checkpoint would tear the live display
        module.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def save_optimizer(self, checkpoint: Path) -> None:
        """Write the optimizer's state into a checkpoint's trainer state."""
        target = checkpoint / STATE_FOLDER
        target.mkdir(exist_ok=True)
        torch.save(self.optimizer.state_dict(), target / _OPTIMIZER_FILE)

    def load_optimizer(self, checkpoint: Path) -> None:
        """Continue with the optimizer of a checkpoint whose weights this engine has loaded.

        Raises:
            CheckpointError: the state is missing, damaged, or made for other parameters.
        """
        path = checkpoint / STATE_FOLDER / _OPTIMIZER_FILE
        try:
            self.optimizer.load_state_dict(torch.load(path, map_location=self.config.device, weights_only=True))
        except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
            raise CheckpointError(f"{path} cannot be used: {error}") from error
        self.loop.version = self.version

    def close(self) -> None:
        """Stop the rollout thread and free the cache."""
        self.loop.close()
