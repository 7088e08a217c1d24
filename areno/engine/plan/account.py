"""The memory of a run by phase and purpose, before anything is loaded; with several ranks, that of each of them.

The figures are for the largest microbatch and the longest sequences that the options allow, in a step that is not the
first: optimizer states are there. A phase's sum is its peak.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field

import torch

from areno.config.options import flag_of
from areno.config.paths import base_of
from areno.config.train_options import TrainOptions
from areno.engine.model.adapter import AdapterOptions
from areno.engine.model.causal_lm import CHUNK_ELEMENTS
from areno.engine.model.chunked_head import rows_of_chunk
from areno.engine.parallel.peers import Layout
from areno.engine.plan.gpu_memory import Need, divide, pool_tokens
from areno.engine.plan.memory import KV_SHARE, available_bytes
from areno.engine.plan.sizes import RunSizes
from areno.engine.plan.trace import RolloutBytes, ShapeOf, UpdateBytes
from areno.engine.train.outputs import ModelKind
from areno.errors import UsageError

PARTS = ("process", "weights", "roles", "optimizer", "gradients", "kv_cache", "activations")
"""What memory is used for, in the order of the table; ``activations`` are all that lives during a pass."""

# The model's and the tokenizer's code and tables, and threads, over what importing areno takes; measured.
_PROCESS = 64 * 2**20
# What a rank's process takes before that: pages of PyTorch and transformers that it shares with no other; measured.
RANK = 320 * 2**20


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a run.

    Attributes:
        name: ``load``, ``rollout``, ``score``, ``forward``, ``backward`` or ``optimizer``.
        parts: bytes by purpose, see `PARTS`.
    """

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes at the peak of the phase."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All phases of a run.

    Attributes:
        parameters: of the model that is trained.
        dtype: what it computes in.
        device: where.
        phases: in the order of a step.
        logits: bytes of the logits that are alive at once in training, part of the activations.
        host: bytes in the computer's memory beside the GPU's, of all ranks.
        cache_tokens: cells that the KV cache grows to.
        cache_wanted: cells that all running sequences would take at their longest.
        available: bytes free now, on one GPU or in this machine's memory.
        layout: of the ranks; the phases are those of one.
        sharing: ranks that share what is available.
        common: bytes of each rank that are the same memory for all who share it.
    """

    parameters: int
    trained: int
    dtype: str
    device: str
    phases: tuple[Phase, ...]
    logits: int
    host: int
    cache_tokens: int
    cache_wanted: int
    available: int = field(compare=False)
    layout: Layout = field(default_factory=Layout)
    sharing: int = 1
    common: int = 0

    @property
    def peak(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def needed(self) -> int:
        """Bytes of all ranks that share one memory, at the peak."""
        return self.of_all(self.peak)

    def of_all(self, phase: Phase) -> int:
        """Bytes that the ranks which share one memory take in a phase."""
        return phase.total * self.sharing - self.common * (self.sharing - 1)

    @property
    def fits(self) -> bool:
        """Whether every phase fits into what is free now."""
        return self.needed <= self.available

    def phase(self, name: str) -> Phase | None:
        """A phase by name; None where the run has none of it."""
        return next((phase for phase in self.phases if phase.name == name), None)


def plan_device(options: TrainOptions) -> torch.device:
    """The device that a run would take here; a named GPU that is not here is planned as such."""
    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(options.device)


def make_plan(options: TrainOptions, available: int | None = None) -> MemoryPlan:
    """Plan the memory of a run.

    Args:
        options: of the run; only the model's configuration is read.
        available: bytes that it may use; None asks the machine.

    Raises:
        UsageError: a model's configuration cannot be read, or weights are to be spread.
    """
    if options.fsdp:
        raise UsageError(
            "--fsdp: the memory of weights that are spread over replicas is not planned yet; plan with --no-fsdp to see what "
            "whole weights would take"
        )
    device = plan_device(options)
    if available is None:
        available = available_bytes(device)
    return _Planner(RunSizes(options, device), available).plan()


class _Planner:
    """Traces what a run needs, and adds it up.

    Args:
        sizes: of the run.
        available: bytes that it may use.
    """

    def __init__(self, sizes: RunSizes, available: int) -> None:
        self.sizes, self.available = sizes, available
        self.actor = _shape(str(sizes.options.ckpt), "ckpt", sizes, sizes.kind, sizes.adapter())
        self.longest = sizes.longest_row(self.actor.model.context_length)
        self.roles = {
            role: _shape(role.path, f"{role.name}_ckpt", sizes, role.kind, sizes.adapter() if role.trained else None)
            for role in sizes.roles()
        }
        self.recompute = sizes.options.activation_checkpointing
        self.updates = self._updates(self.recompute)
        if sizes.device.type == "cuda" and sizes.options.recomputes is None and not sizes.offloads_activations:
            self._keep_activations()

    def _updates(self, recompute: bool) -> list[UpdateBytes]:
        trained = [self.actor, *(shape for role, shape in self.roles.items() if role.trained)]
        return [self._update(shape, recompute) for shape in trained]

    def _keep_activations(self) -> None:
        """Do without recomputation where the engine would."""
        kept = self._updates(False)
        if not divide(self._free(), self._need(self.updates, kept), keeps_cache=False).recompute:
            self.recompute, self.updates = False, kept

    def _free(self) -> int:
        """Bytes that are left once the models are loaded."""
        loaded = self._phase("load")
        return self.available // self.sizes.sharing - loaded.total

    def _need(self, recomputed: list[UpdateBytes], kept: list[UpdateBytes], decode: int = 0) -> Need:
        away = self.sizes.offloads
        moments = 0 if away else sum(update.state - update.masters for update in recomputed)
        first, second = (
            max(max(u.forward, u.backward) - (u.gradients if away else 0) for u in updates)
            for updates in (recomputed, kept)
        )
        return Need(moments, first, second, decode)

    def plan(self) -> MemoryPlan:
        """All phases."""
        run = self.sizes.options
        generated = self._rollout() if self.sizes.spec.requires_rollout else None
        cache = 0 if generated is None else generated.cache
        between = 0 if run.drop_rollout_state else cache
        kept = sum(update.kept for update in self.updates)
        phases = [self._loading()]
        if generated is not None:
            held = generated.peak - generated.cache
            phases.append(self._phase("rollout", gradients=kept, kv_cache=cache, activations=held + self.actor.merged))
        scoring = [shape.score(self.sizes.scoring_batch(self.longest)) for shape in self.roles.values()]
        if scoring:
            phases.append(
                self._phase("score", gradients=kept, kv_cache=between, activations=max(scoring), scoring=True)
            )
        phases += self._training(between)
        wanted = self.sizes.running * self.longest if generated is not None else 0
        return MemoryPlan(
            parameters=self.actor.parameters,
            trained=self.actor.trained,
            dtype=str(self.sizes.dtype).removeprefix("torch."),
            device=str(self.sizes.device),
            phases=tuple(phases),
            logits=self._logits(),
            host=self._host(),
            cache_tokens=0 if generated is None else generated.cache // generated.per_token,
            cache_wanted=wanted,
            available=self.available,
            layout=self.sizes.layout,
            sharing=self.sizes.sharing,
            common=sum(update.common for update in self.updates),
        )

    def _host(self) -> int:
        """What all ranks of this machine keep beside their GPUs; layer inputs of one role at a time."""
        states = sum(u.state + u.gradients for u in self.updates) if self.sizes.offloads else 0
        return (states + max(u.elsewhere for u in self.updates)) * self.sizes.layout.world_size

    def _loading(self) -> Phase:
        """Masters are made with the model; a checkpoint in another type is in memory beside what is made of it."""
        shapes = [self.actor, *(shape for role, shape in self.roles.items() if not role.only_scores)]
        converted = [size for shape in shapes if _differs(size := shape.file_bytes, shape.whole)]
        # A rank writes its share of what replicas have in common from weights that are still its own.
        moved = sum(update.common for update in self.updates) // self.sizes.layout.dp_size
        return self._phase("load", activations=max([moved, *(size // self.sizes.layout.tp_size for size in converted)]))

    def _phase(
        self, name: str, *, gradients: int = 0, kv_cache: int = 0, activations: int = 0, scoring: bool = False
    ) -> Phase:
        """A phase over what is always there."""
        roles = [shape.weights for role, shape in self.roles.items() if scoring or not role.only_scores]
        states = sum(update.state for update in self.updates)
        if name == "load":
            states = sum(update.masters for update in self.updates)
        states = 0 if self.sizes.offloads else states
        figures = (self._process(), self.actor.weights, sum(roles), states, gradients, kv_cache, activations)
        return Phase(name, dict(zip(PARTS, figures, strict=True)))

    def _process(self) -> int:
        if self.sizes.device.type != "cpu":
            return 0
        return _PROCESS if self.sizes.layout.world_size == 1 else _PROCESS + RANK

    def _training(self, kv_cache: int) -> list[Phase]:
        """Forward, backward and the optimizer's step, each of the role that needs most."""
        phases: list[list[Phase]] = []
        for update in self.updates:
            there = 0 if self.sizes.offloads else update.gradients
            others = sum(other.kept for other in self.updates if other is not update)
            carried = max(update.carried if there else 0, update.kept)
            passes = {
                "forward": (others + carried, update.forward - update.carried),
                "backward": (others + there, update.backward - update.gradients),
                "optimizer": (others + there, update.step),
            }
            phases.append(
                [
                    self._phase(name, gradients=gradients, kv_cache=kv_cache, activations=activations)
                    for name, (gradients, activations) in passes.items()
                ]
            )
        return [max(same, key=lambda phase: phase.total) for same in zip(*phases, strict=True)]

    def _update(self, shape: ShapeOf, recompute: bool) -> UpdateBytes:
        lengths, microbatches = self.sizes.microbatch(self.longest)
        return shape.update(
            lengths,
            self.sizes.scored(lengths),
            self.sizes.optimizer(),
            microbatches=microbatches,
            checkpointing=recompute,
            entropy=self.sizes.entropy,
            offloading=self.sizes.offloads_activations,
            device=self.sizes.device,
        )

    def _rollout(self) -> RolloutBytes:
        run, paged = self.sizes.options, self.sizes.device.type == "cuda"
        # A prefill takes as many tokens whatever a prompt is; an agent's contexts grow up to the longest row.
        prompt = min(run.max_prompt_tokens, self.longest - 1)
        budget = run.kv_cache_tokens
        if budget is None:
            free = self.available // self.sizes.sharing - self.actor.weights
            budget = max(int(free * KV_SHARE) // self.actor.bytes_per_token(prompt), 1024)
        found = self.actor.rollout(self.sizes.running, run.n_samples, prompt, self.longest, budget)
        if not paged:
            return found
        if run.kv_cache_tokens is None:
            need = self._need(self.updates, self.updates, 2 * found.beside)
            room = divide(self._free(), need, keeps_cache=not run.drop_rollout_state, recompute=self.recompute).cache
            budget = pool_tokens(
                room // self.actor.bytes_per_token(prompt), self.sizes.running, self.actor.model.context_length
            )
        pool = budget * found.per_token  # pages are allocated as a whole
        return dataclasses.replace(found, peak=pool + found.beside, cache=pool)

    def _logits(self) -> int:
        """A chunk of scaled logits and its gradient, both fp32, where log-probs are trained on."""
        if self.sizes.kind != "policy":
            return 0
        lengths, _ = self.sizes.microbatch(self.longest)
        vocab = self.actor.model.config.get_text_config().vocab_size
        own = -(-vocab // self.sizes.layout.tp_size)
        rows = rows_of_chunk(own, CHUNK_ELEMENTS, self.sizes.device.type)
        return 2 * 4 * own * min(rows, sum(self.sizes.scored(lengths)))


def _differs(file: int, weights: int) -> bool:
    """Whether a file of so many bytes holds the weights in another type; headers and untied copies are no matter."""
    return file > 0 and not 0.7 < file / weights < 1.4


def _shape(path: str, name: str, sizes: RunSizes, kind: ModelKind, adapter: AdapterOptions | None = None) -> ShapeOf:
    """The shape of a checkpoint; advice plans the same run again and again."""
    return _shape_of(base_of(path), sizes.load_options(flag_of(name)), kind, adapter, sizes.layout)


_shape_of = functools.lru_cache(maxsize=8)(ShapeOf)
