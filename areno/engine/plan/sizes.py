"""Compute what determines the memory of a run: its models, the length of its longest row, and the sizes of its microbatches."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from areno.config.algorithms import AlgorithmSpec, get_algorithm
from areno.config.all_train_options import TrainOptions
from areno.engine.engine_config import EngineConfig
from areno.engine.model.adapter import AdapterOptions
from areno.engine.model.loading import LoadOptions
from areno.engine.parallel.layout import Layout
from areno.engine.parallel.rank_context import RankContext
from areno.engine.scoring import MAX_TOKENS as MAX_SCORED_TOKENS
from areno.engine.train.optimizer import OptimizerOptions
from areno.engine.train.outputs import ModelKind
from areno.engine.train.step import most_tokens
from areno.loss_fns.loss_interface import declares_reduction, reads_entropy
from areno.types import tightest

# Shared by all plans, so that equal options compare equal and shapes are cached.
_PEERS = RankContext()


@dataclass(frozen=True, slots=True)
class HeldRole:
    """A model that a run loads in addition to the actor."""

    name: str
    path: str
    kind: ModelKind
    option: str
    optimizer: OptimizerOptions | None = None
    only_scores: bool = False  # loaded only while it scores, before the first step


@dataclass(kw_only=True)
class Sizes(ABC):
    """The sizes that determine the memory of a run. Each subclass computes the sizes for one command, from its options."""

    path: str
    option: str
    config: EngineConfig  # configuration of the actor's engine: device, dtypes, optimizer, adapter, cache
    layout: Layout = field(default_factory=Layout)
    entropy: bool = False
    generates: bool = False
    n_samples: int = 1
    prompt: int = 1

    @property
    def device(self) -> torch.device:
        """The device of the run."""
        return self.config.device

    @property
    def kind(self) -> ModelKind:
        """Kind of the actor: ``reward`` if the run trains a reward model, otherwise ``policy``."""
        return "reward" if self.config.trains == "reward" else "policy"

    @property
    def running(self) -> int:
        """Maximum number of sequences that each replica generates at once."""
        return self.config.max_running

    @property
    def trains(self) -> bool:
        """Whether the actor has an optimizer."""
        return self.config.trains != "nothing"

    @property
    def sharing(self) -> int:
        """Number of ranks that share one memory: on a GPU, 1; on a CPU, the number of ranks of all engines on the machine."""
        return self.layout.world_size * self.config.neighbors if self.device.type == "cpu" else 1

    def load_options(self, option: str) -> LoadOptions:
        """Return the options for loading a model without its weights.

        ``option`` is the command-line option that sets the path of the model. Error messages mention this option.
        """
        return replace(self.config.load_options(option), device="cpu", dummy=True, peers=_PEERS)

    @abstractmethod
    def roles(self) -> list[HeldRole]:
        """Return the models that the run loads in addition to the actor."""

    @abstractmethod
    def longest_row(self, context: int | None) -> int:
        """Return the maximum length of a row (prompt and response) in tokens.

        ``context`` is the model's context length; None means no limit.
        """

    @abstractmethod
    def microbatch(self, longest: int, role: str = "") -> tuple[list[int], int]:
        """Return the row lengths of a replica's largest microbatch, and the replica's number of microbatches per step.

        Both results assume rows of ``longest`` tokens. ``role`` is the trained role; an empty string means the actor.
        """

    @abstractmethod
    def scored(self, lengths: list[int]) -> list[int]:
        """Return an upper bound on the number of tokens to train on in each row.

        ``lengths`` has the number of tokens of each row. Prompt tokens are excluded. At least one token of each row is
        assumed to belong to the prompt.
        """

    @abstractmethod
    def scoring_batch(self, longest: int, role: str) -> list[int]:
        """Return the row lengths of the largest batch that the model of ``role`` scores in one pass.

        A row length is a number of tokens. ``longest`` is the number of tokens of the longest row.
        """


class RunSizes(Sizes):
    """The sizes that determine the memory of a run of ``areno train``."""

    def __init__(self, options: TrainOptions, device: torch.device) -> None:
        run = self.options = options
        self.spec: AlgorithmSpec = get_algorithm(run.algo)
        loss: Any = self.spec.make_loss_fn(run)
        self.splits_rows = loss is None or declares_reduction(loss)
        half = run.dtype == "bfloat16" or (run.dtype == "auto" and device.type == "cuda")
        on_gpu = device.type == "cuda"
        tp_size = max(run.tp_size, 1)
        layout = Layout(max(run.world_size // tp_size, 1), tp_size)
        super().__init__(
            path=str(run.ckpt),
            option="--ckpt",
            config=EngineConfig(
                device=device,
                dtype=torch.bfloat16 if half else torch.float32,
                trains="reward" if self.spec.trains == "reward" else "policy",
                optimizer=OptimizerOptions(adam_8bit=run.adam_8bit, offload=run.offload_optimizer and on_gpu),
                adapter=_adapter(run),
                attn_backend=run.attn_backend,
                activation_checkpointing=run.recomputes,
                offload_activations=run.offload_activations and run.activation_checkpointing and on_gpu,
                keep_rollout_state=not run.drop_rollout_state,
                kv_cache_tokens=run.kv_cache_tokens,
                max_running=max(-(-run.running_sequences // layout.dp_size), 1),
                trust_remote_code=run.trust_remote_code,
            ),
            layout=layout,
            entropy=loss is not None and reads_entropy(loss),
            generates=self.spec.requires_rollout,
            n_samples=run.n_samples,
            prompt=run.max_prompt_tokens,
        )

    def roles(self) -> list[HeldRole]:
        """Return the models that the run loads in addition to the actor."""
        run = self.options
        ckpt, ref = str(run.ckpt), str(run.ref_ckpt or run.ckpt)
        held = []
        if self.spec.name == "dpo" and ref != ckpt:
            held.append(HeldRole("ref", ref, "policy", "--ref-ckpt", only_scores=True))
        if self.spec.name == "ppo":
            critic = str(run.critic_ckpt or ckpt)
            held.append(HeldRole("critic", critic, "value", "--critic-ckpt", self.config.optimizer))
        own = run.uses_lora and ref == ckpt  # with its adapter disabled, the actor is its own reference
        if self.spec.requires_rollout and run.takes_reference(self.spec.name == "ppo") and not own:
            held.append(HeldRole("ref", ref, "policy", "--ref-ckpt"))
        if run.reward_ckpt is not None:
            held.append(HeldRole("reward", run.reward_ckpt, "reward", "--reward-ckpt"))
        return held

    def longest_row(self, context: int | None) -> int:
        """See :meth:`Sizes.longest_row`."""
        run = self.options
        limit, longest = tightest(run.max_context_len, context), run.max_prompt_tokens + run.max_new_tokens
        if limit is None:
            return longest
        return limit if run.agent_fn is not None else min(limit, longest)

    def rows_of_step(self) -> int:
        """Return the number of rows of one optimizer step, over all replicas."""
        run = self.options
        if run.gradient_accumulation_steps is not None:
            return run.mini_bs * run.gradient_accumulation_steps
        if self.spec.requires_rollout:
            return max(run.batch_size * run.n_samples // run.update_minibatches, 1)
        return run.batch_size * (2 if self.spec.learns_from_pairs else 1)

    def microbatch(self, longest: int, role: str = "") -> tuple[list[int], int]:
        """See :meth:`Sizes.microbatch`. ``role`` has no effect, because all roles use the same microbatches."""
        together = 2 if self.spec.learns_from_pairs else 1
        rows = -(-self.rows_of_step() // (together * self.layout.dp_size)) * together
        most = most_tokens(self.device.type) if self.splits_rows else longest * rows
        most, at_once = max(most, together * longest), min(self.options.mini_bs, rows)
        group = self.n_samples if self.generates else together
        shared = max(min(self.prompt, longest - 2), 0) if self.options.tree_training and group > 1 else 0
        # If tokens bound a pass, shared prompts allow more responses in it; if rows bound it, prompts may all differ.
        lengths = max(fill(longest, at_once, most, shared, group), fill(longest, at_once, most), key=sum)
        full = sum(length in (longest, longest - shared) for length in lengths) // together * together
        return lengths, -(-rows // max(full, together))

    def scored(self, lengths: list[int]) -> list[int]:
        """See :meth:`Sizes.scored`."""
        if self.options.agent_fn is not None:
            return [length - 1 for length in lengths]
        return [min(length - 1, self.options.max_new_tokens) for length in lengths]

    def scoring_batch(self, longest: int, role: str) -> list[int]:
        """See :meth:`Sizes.scoring_batch`."""
        return fill(longest, self.options.score_micro_bs, max(MAX_SCORED_TOKENS, longest))


def _adapter(run: TrainOptions) -> AdapterOptions | None:
    if (rank := run.adapter_rank) is None:
        return None
    return AdapterOptions(rank=rank, target_modules=run.lora_target_modules, load_in_4bit=run.load_in_4bit)


def fill(longest: int, rows: int, tokens: int, shared: int = 0, group: int = 1) -> list[int]:
    """Return the row lengths of a full batch, which has at most ``rows`` rows and at most ``tokens`` tokens in total.

    All rows have ``longest`` tokens, but the last row may be shorter. Each group of ``group`` rows has a common prefix of
    ``shared`` tokens. The batch contains the prefix only once, so the prefix counts only in the returned length of the group's
    first row.
    """
    lengths: list[int] = []
    while len(lengths) < rows and tokens > 1:
        lengths.append(min(longest - (shared if len(lengths) % group else 0), tokens))
        tokens -= lengths[-1]
    return lengths
