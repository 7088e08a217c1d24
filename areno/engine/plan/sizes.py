"""The sizes of a run that decide its memory, worked out from its options: roles, row lengths, microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from areno.config.algorithms import AlgorithmSpec, get_algorithm
from areno.config.paths import adapter_config
from areno.config.train_options import TrainOptions
from areno.config.validate import PAIR_ALGORITHMS
from areno.engine.model.adapter import AdapterOptions
from areno.engine.model.loading import LoadOptions
from areno.engine.parallel.peers import Layout, Peers
from areno.engine.scoring import MAX_TOKENS as MAX_SCORED_TOKENS
from areno.engine.train.optimizer import OptimizerConfig
from areno.engine.train.outputs import ModelKind
from areno.engine.train.step import most_tokens
from areno.loss_fns.pack import declares_reduction, reads_entropy
from areno.types import tightest

# One for all plans: options with peers of their own are unlike all others, and no shape would be known again.
_PEERS = Peers()


@dataclass(frozen=True, slots=True)
class HeldRole:
    """A model that a run holds beside its actor.

    Attributes:
        name: as the run calls it.
        path: checkpoint folder or hub id.
        kind: what it predicts.
        trained: it has an optimizer.
        only_scores: it is in memory only while it scores, before the first step.
    """

    name: str
    path: str
    kind: ModelKind
    trained: bool = False
    only_scores: bool = False


class RunSizes:
    """See the module's text.

    Args:
        options: of the run.
        device: where it will run.
    """

    def __init__(self, options: TrainOptions, device: torch.device) -> None:
        self.options, self.device = options, device
        self.spec: AlgorithmSpec = get_algorithm(options.algo)
        half = options.dtype == "bfloat16" or (options.dtype == "auto" and device.type == "cuda")
        self.dtype = torch.bfloat16 if half else torch.float32
        self.kind: ModelKind = "reward" if self.spec.trains == "reward" else "policy"
        loss: Any = self.spec.make_loss_fn(options)
        self.layout = Layout(max(options.world_size // max(options.tp_size, 1), 1), max(options.tp_size, 1))
        self.splits_rows = loss is None or declares_reduction(loss)
        self.entropy = loss is not None and reads_entropy(loss)

    def load_options(self, option: str) -> LoadOptions:
        """How a checkpoint that ``option`` names becomes a shape."""
        run = self.options
        return LoadOptions(
            dtype=self.dtype,
            trust_remote_code=run.trust_remote_code,
            dummy=True,
            attn_backend=run.attn_backend,
            option=option,
            peers=_PEERS,
        )

    @property
    def offloads(self) -> bool:
        """Whether optimizer states and gradients are beside the device."""
        return self.options.offload_optimizer and self.device.type == "cuda"

    @property
    def offloads_activations(self) -> bool:
        """Whether inputs of recomputed layers are beside the device."""
        run = self.options
        return run.offload_activations and run.activation_checkpointing and self.device.type == "cuda"

    @property
    def sharing(self) -> int:
        """Ranks that share one memory: all of them on a CPU, where a GPU has one."""
        return self.layout.world_size if self.device.type == "cpu" else 1

    @property
    def running(self) -> int:
        """Most sequences at once on one replica."""
        return max(-(-self.options.running_sequences // self.layout.dp_size), 1)

    def optimizer(self) -> OptimizerConfig:
        """As far as it matters for memory."""
        return OptimizerConfig(adam_8bit=self.options.adam_8bit, offload=self.offloads)

    def adapter(self) -> AdapterOptions | None:
        """What is trained in place of the weights."""
        run = self.options
        if not run.uses_lora:
            return None
        rank = run.lora_rank or int(adapter_config(str(run.lora_adapter_path)).get("r", 8))
        return AdapterOptions(rank=rank, target_modules=run.lora_target_modules, load_in_4bit=run.load_in_4bit)

    def roles(self) -> list[HeldRole]:
        """Models beside the actor."""
        run = self.options
        ckpt, ref = str(run.ckpt), str(run.ref_ckpt or run.ckpt)
        held = []
        if self.spec.name == "dpo" and ref != ckpt:
            held.append(HeldRole("ref", ref, "policy", only_scores=True))
        if self.spec.name == "ppo":
            held.append(HeldRole("critic", str(run.critic_ckpt or ckpt), "value", trained=True))
        ppo = self.spec.name == "ppo"
        takes_reference = self.spec.requires_rollout and run.takes_reference(ppo)
        if takes_reference and not (
            run.uses_lora and ref == ckpt
        ):  # with its adapter off, the actor is its own reference
            held.append(HeldRole("ref", ref, "policy"))
        if run.reward_ckpt is not None:
            held.append(HeldRole("reward", run.reward_ckpt, "reward"))
        return held

    def longest_row(self, context: int | None) -> int:
        """Tokens of the longest row; ``context`` is the model's limit."""
        run = self.options
        limit, longest = tightest(run.max_context_len, context), run.max_prompt_tokens + run.max_new_tokens
        if limit is None:
            return longest
        return limit if run.agent_fn is not None else min(limit, longest)

    def rows_of_step(self) -> int:
        """Rows of one optimizer step, over all replicas."""
        run = self.options
        if run.gradient_accumulation_steps is not None:
            return run.mini_bs * run.gradient_accumulation_steps
        if self.spec.requires_rollout:
            return max(run.batch_size * run.n_samples // run.update_minibatches, 1)
        return run.batch_size * (2 if self.spec.name in PAIR_ALGORITHMS else 1)

    def microbatch(self, longest: int) -> tuple[list[int], int]:
        """Tokens of each row of a replica's largest microbatch, and how many a step of longest rows has."""
        together = 2 if self.spec.name in PAIR_ALGORITHMS else 1
        rows = -(-self.rows_of_step() // (together * self.layout.dp_size)) * together
        most = most_tokens(self.device.type) if self.splits_rows else longest * rows
        lengths = _fill(longest, min(self.options.mini_bs, rows), max(most, together * longest))
        full = max(sum(length == longest for length in lengths) // together * together, together)
        return lengths, -(-rows // full)

    def scored(self, lengths: list[int]) -> list[int]:
        """Tokens of rows that are trained on: all but a prompt of at least one token."""
        if self.options.agent_fn is not None:
            return [length - 1 for length in lengths]
        return [min(length - 1, self.options.max_new_tokens) for length in lengths]

    def scoring_batch(self, longest: int) -> list[int]:
        """Tokens of each row of the largest scoring pass."""
        return _fill(longest, self.options.score_micro_bs, max(MAX_SCORED_TOKENS, longest))


def _fill(longest: int, rows: int, tokens: int) -> list[int]:
    """As many longest rows as fit, and a shorter one for what is left."""
    full = min(rows, tokens // longest)
    rest = min(tokens - full * longest, longest)
    return [longest] * full + ([rest] if full < rows and rest > 1 else [])
