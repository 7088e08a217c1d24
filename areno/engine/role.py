"""Load, train, run and save the model of a role: actor, reference, critic or reward model.

Every role computes log-probs, values or rewards for rows of tokens. A role with an optimizer can also be trained. The actor
can also generate responses. If a run trains a reward model, this model has the role of the actor, but cannot generate.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from areno.config.paths import is_adapter
from areno.engine.limits import unknown_id
from areno.engine.model.adapter import AdapterOptions
from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.loading import LoadOptions, add_adapter, load_causal_lm, load_value_model
from areno.engine.model.packed_model import PackedModel
from areno.engine.parallel.pipeline import Pipeline
from areno.engine.parallel.rank_context import RankContext
from areno.engine.scoring import Scored, TokenRows, score, temperature_per_row
from areno.engine.train.optimizer import MasterAdamW, Optimizer, OptimizerOptions
from areno.engine.train.outputs import ModelKind
from areno.engine.train.state_files import SavedState, save_state
from areno.engine.train.step import TrainStep
from areno.errors import CheckpointError, EngineError, UsageError
from areno.types.routing import RoutingRecord

_PREDICTION = {"policy": "log-probs", "value": "values", "reward": "rewards"}


@dataclass
class Role:
    """A loaded model with a name, and the model's optimizer if the model is trainable."""

    name: str
    path: str
    kind: ModelKind
    model: PackedModel  # shared by frozen roles of the same checkpoint and kind
    optimizer: Optimizer | None = None  # None for a frozen role
    activation_checkpointing: bool | None = True
    peers: RankContext = field(default_factory=RankContext)
    adapter_off: bool = False  # whether the role is ``model`` with its adapter disabled
    tree: bool = False
    offload_activations: bool = False

    @property
    def trainable(self) -> bool:
        """Whether the role has an optimizer."""
        return self.optimizer is not None

    def trained_by(self) -> Optimizer:
        """Return the role's optimizer. Raises EngineError: the role has no optimizer."""
        if self.optimizer is None:
            raise EngineError(
                f"role {self.name!r} is frozen; to train the role, load it with ModelRole(trainable=True)"
            )
        return self.optimizer

    @functools.cached_property
    def training(self) -> TrainStep:
        """The training step of this role."""
        return TrainStep(
            self.model,
            self.trained_by(),
            self.activation_checkpointing,
            kind=self.kind,
            peers=self.peers,
            tree=self.tree,
            offload_activations=self.offload_activations,
            pipeline=self.pipeline,
        )

    def set_recomputation(self, recompute: bool | None) -> None:
        """Set whether training recomputes activations. If ``recompute`` is None, the available memory decides."""
        self.activation_checkpointing = recompute
        if "training" in vars(self):
            self.training.activation_checkpointing = recompute

    @functools.cached_property
    def pipeline(self) -> Pipeline | None:
        """The pipeline over all pipeline stages; None if the model is not split into stages."""
        return Pipeline(self.model, self.peers) if self.model.stage is not None else None

    def check(self, rows: Iterable[Sequence[int]]) -> None:
        """Check rows. Raises UsageError: a row exceeds the context length, or contains a token id outside the vocabulary."""
        context, vocabulary = self.model.context_length, self.model.vocab_size
        for index, row in enumerate(rows):
            if context is not None and len(row) > context:
                raise UsageError(
                    f"row {index} has {len(row)} tokens, but the context length of role {self.name!r} is {context}; "
                    f"drop longer rows, or limit rollouts to this length with --max-context-len {context} "
                    f"(SamplingParams(max_context_len={context}))"
                )
            if len(row) and (min(row) < 0 or max(row) >= vocabulary):
                raise UsageError(
                    f"row {index} contains token id {unknown_id(row, vocabulary)}, but the ids of role {self.name!r} are 0 to "
                    f"{vocabulary - 1}"
                )

    def score(
        self,
        what: Scored,
        rows: TokenRows,
        micro_bs: int,
        temperatures: float | Sequence[float] = 1.0,
        routed: Sequence[RoutingRecord | None] | None = None,
    ) -> list[Any]:
        """Score rows; see :func:`areno.engine.scoring.score`.

        Raises EngineError: values or rewards are requested from a policy, or log-probs from a critic or a reward model. Raises
        UsageError: :meth:`check` rejects a row. Raises ValueError: ``temperatures`` is a list, but does not have one entry per
        row.
        """
        if isinstance(self.model, CausalLM) != (what == "logprobs"):
            requested = "log-probs" if what == "logprobs" else what
            raise EngineError(
                f"role {self.name!r} predicts {_PREDICTION[self.kind]}, not {requested}; load a role whose "
                "ModelRole.kind is policy (for log-probs), value (for values) or reward (for rewards)"
            )
        per_row = temperature_per_row(rows, temperatures)
        self.check(rows)
        plain = self.model.adapter.off() if self.adapter_off and self.model.adapter else nullcontext()
        with plain, self.model.gathered():
            return score(self.model, what, rows, micro_bs, per_row, self.pipeline, routed)

    def stage_model(self, tokenizer: Any) -> Callable[[Path], None] | None:
        """Copy the weights to host memory, and return a function that saves the copy while training continues.

        The returned function writes the same files as :meth:`save_model`. With several ranks, or if the model has an adapter,
        nothing is copied, and the method returns None.
        """
        if self.model.adapter is not None or not self.peers.alone:
            return None
        copies: dict[tuple[int, torch.Size], torch.Tensor] = {}  # keeps tied weights tied, so they are written once
        weights = {}
        for name, tensor in self.model.module.state_dict().items():
            key = (tensor.data_ptr(), tensor.shape)
            if key not in copies:
                copies[key] = tensor.to("cpu", copy=True)
            weights[name] = copies[key]
        return lambda folder: self.save_model(folder, tokenizer, weights)

    def save_model(self, folder: str | Path, tokenizer: Any, weights: dict[str, torch.Tensor] | None = None) -> None:
        """Write weights, configuration and tokenizer in Hugging Face format.

        If the model has an adapter, only the adapter's weights and configuration are written. If ``weights`` is given, these
        weights are written instead of the model's current weights; see :meth:`stage_model`.
        """
        if self.model.adapter is not None:
            if self.peers.replica == 0 or self.peers.layout.fsdp:
                self.model.adapter.save(folder, writes=self.peers.first)
            if self.peers.first:
                tokenizer.save_pretrained(folder)
            return
        module: Any = self.model.module
        if self.kind != "policy":
            # transformers pools at the last non-padding token. If padding is the EOS token, that would be the wrong token;
            # without a padding id transformers takes the last token, which needs batch size 1.
            pad = tokenizer.pad_token_id
            module.config.pad_token_id = None if pad == tokenizer.eos_token_id else pad
        disable_progress_bar()  # the progress bar of save_pretrained would corrupt the live display
        layout = self.peers.layout
        if layout.fsdp or layout.pp_size > 1 or (layout.tp_size > 1 and self.peers.replica == 0):
            from areno.engine.parallel.sharding import save_unsharded

            save_unsharded(self.model, folder, self.peers)
        elif self.peers.replica == 0:
            module.save_pretrained(folder, state_dict=weights)
        if self.peers.first:
            tokenizer.save_pretrained(folder)

    def save_optimizer(self, folder: Path) -> None:
        """Write the optimizer state to a folder. Each rank writes its own shard, so all ranks must call this method."""
        optimizer = self.trained_by()
        save_state(folder, optimizer.state_head(), optimizer.state_parts(), self.peers)

    def load_optimizer(self, folder: Path) -> None:
        """Restore the optimizer state from a folder. The model's weights must be those of the same checkpoint.

        Raises CheckpointError: the state is missing or corrupt, or its parameters differ from those of the model.
        """
        optimizer = self.trained_by()
        try:
            optimizer.load_state(SavedState(folder))
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"the optimizer state in {folder} cannot be used: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the optimizer state in {folder} is damaged or incomplete: {type(error).__name__}: {error}"
            ) from error

    def checkpoint_bytes(self) -> int:
        """Return the total size in bytes of the weights and the optimizer state in the role's checkpoint."""
        weights = self.model.weight_bytes
        if self.model.adapter is not None:  # only the adapter is saved
            weights = sum(p.numel() * p.element_size() for _, p in self.model.parameters())
        return weights + (self.optimizer.state_bytes() if self.optimizer is not None else 0)


def load_role(
    name: str,
    path: str,
    kind: ModelKind,
    options: LoadOptions,
    optimizer: OptimizerOptions | None,
    checkpointing: bool | None,
    adapter: AdapterOptions | None = None,
    offload_activations: bool = False,
) -> Role:
    """Load the model of a role. The checkpoint of a frozen critic or reward model must have a scalar head.

    Raises UsageError: the checkpoint cannot be used for this role, or options conflict.
    """
    _check_choices(name, path, options, optimizer, checkpointing, adapter, offload_activations)
    if adapter is not None:
        options = replace(options, four_bit=adapter.load_in_4bit)
    if kind == "policy":
        model: PackedModel = load_causal_lm(path, options)
    else:
        model = load_value_model(path, options, needs_head=optimizer is None)
    if adapter is not None:
        model = add_adapter(model, kind, adapter, path)
    if optimizer is None:
        model.module.requires_grad_(False)
    if options.peers.layout.fsdp:
        from areno.engine.parallel.fsdp import shard_over_replicas

        reduces = torch.bfloat16 if optimizer is not None and optimizer.reduce_bf16 else torch.float32
        shard_over_replicas(model, options.peers, trained=optimizer is not None, reduces=reduces)
    if optimizer is None:
        return Role(name, path, kind, model, peers=options.peers)
    role_optimizer = _optimizer(model, optimizer, options.peers)
    return Role(
        name, path, kind, model, role_optimizer, checkpointing, options.peers, offload_activations=offload_activations
    )


def _check_choices(
    name: str,
    path: str,
    options: LoadOptions,
    optimizer: OptimizerOptions | None,
    checkpointing: bool | None,
    adapter: AdapterOptions | None,
    offload_activations: bool,
) -> None:
    """Check options. Raises UsageError: options conflict, or an option has no effect."""
    on_cpu, layout = torch.device(options.device).type == "cpu", options.peers.layout
    if on_cpu and optimizer is not None and optimizer.offload:
        raise UsageError(f"--offload-optimizer has no effect for role {name!r}, which is on a CPU; remove the option")
    if on_cpu and optimizer is not None and offload_activations:
        raise UsageError(f"--offload-activations has no effect for role {name!r}, which is on a CPU; remove the option")
    if optimizer is not None and offload_activations and checkpointing is False:
        raise UsageError(
            f"--offload-activations offloads only the inputs of checkpointed layers, but role {name!r} has no checkpointed "
            "layers; add --activation-checkpointing"
        )
    if adapter is not None and is_adapter(path):
        raise UsageError(
            f"{options.option} {path} is an adapter, so a new adapter cannot be added; either pass the base model, with this "
            "adapter as --lora-adapter-path, or run `areno export` to merge this adapter into its base model"
        )
    if adapter is not None and adapter.load_in_4bit and layout.tp_size > 1:
        raise UsageError(
            f"--load-in-4bit with --tp-size {layout.tp_size}: 4-bit weights cannot be sharded; remove --load-in-4bit, or "
            "remove --tp-size, so that each device has a full copy of the model"
        )
    if not layout.fsdp:
        return
    conflicts = {
        "--load-in-4bit": ("4-bit weights", adapter is not None and adapter.load_in_4bit),
        "--lora-rank and --tp-size": ("adapters of tensor-parallel layers", adapter is not None and layout.tp_size > 1),
    }
    for flags, (weights, present) in conflicts.items():
        if present:
            raise UsageError(f"--fsdp with {flags}: FSDP cannot shard {weights}; remove one of these options")


def _optimizer(model: PackedModel, config: OptimizerOptions, peers: RankContext) -> Optimizer:
    if peers.alone:
        return MasterAdamW(model.parameters(), config)
    from areno.engine.parallel.sharding import partial_names

    partial = partial_names(model.config, [name for name, _ in model.parameters()]) if peers.tensor.size > 1 else set()
    tied = model.stage.tied_names(model.module) if model.stage is not None else set()
    if peers.layout.fsdp:
        from areno.engine.train.fsdp import FullyShardedAdamW

        # With an adapter, the trained weights are not converted: see FullyShardedWeights.
        rounds = model.adapter is None and model.dtype != torch.float32
        return FullyShardedAdamW(model.parameters(), config, peers, rounds, partial, tied)
    from areno.engine.train.sharded import ZeroAdamW

    if model.adapter is not None:
        partial |= model.adapter.partial_names()
    return ZeroAdamW(model.parameters(), config, peers, partial, tied)
