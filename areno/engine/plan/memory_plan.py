"""Plan the memory that each rank of a run needs, by phase and purpose, before models are loaded.

The plan assumes the largest microbatch and the longest sequences that the options allow. The plan describes a step after the
first step, so optimizer states are already allocated. The total of a phase is the peak memory of the phase.
"""

import dataclasses
import functools
from dataclasses import dataclass, field

import torch

from areno.config.all_train_options import TrainOptions
from areno.config.paths import base_of
from areno.engine.model.adapter import AdapterOptions
from areno.engine.model.causal_lm import CHUNK_ELEMENTS, KEPT_CHUNK_ELEMENTS
from areno.engine.model.chunked_head import rows_of_chunk
from areno.engine.parallel.layout import Layout
from areno.engine.plan.gpu_memory import Need, divide, pool_tokens
from areno.engine.plan.memory_probe import KV_SHARE, available_bytes
from areno.engine.plan.sizes import RunSizes, Sizes
from areno.engine.plan.trace import RolloutBytes, ShapeOf, UpdateBytes
from areno.engine.train.optimizer import OptimizerOptions
from areno.engine.train.outputs import ModelKind
from areno.errors import UsageError

PARTS = ("process", "weights", "roles", "optimizer", "gradients", "kv_cache", "activations")
"""Purposes of memory, in the order of the printed table. ``activations`` includes all temporary tensors."""

# Measured: code, tables and threads of the model and the tokenizer, in addition to importing areno.
_PROCESS = 64 * 2**20
# Measured: private pages of PyTorch and transformers in a rank's process.
RANK = 320 * 2**20


@dataclass(frozen=True, slots=True)
class Phase:
    """Planned memory of one phase of a run."""

    name: str  # ``load``, ``rollout``, ``score``, ``forward``, ``backward`` or ``optimizer``
    parts: dict[str, int]  # bytes by purpose, see `PARTS`

    @property
    def total(self) -> int:
        """Peak memory of the phase in bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Planned memory of a run."""

    parameters: int
    trained: int
    dtype: str
    device: str
    phases: tuple[Phase, ...]
    logits: int  # size in bytes of logits alive at once in training; included in the activations
    host: int  # size in bytes of offloaded data in host memory, over all ranks
    cache_tokens: int  # maximum size of the KV cache in tokens
    cache_wanted: int  # tokens of all running sequences at maximum length
    available: int = field(compare=False)  # free memory in bytes, of one GPU or of the host
    layout: Layout = field(default_factory=Layout)
    sharing: int = 1  # ranks that share the available memory
    common: int = 0  # size in bytes of memory that these ranks share
    longest: int = 0

    @property
    def peak(self) -> Phase:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def needed(self) -> int:
        """Peak memory in bytes, summed over all ranks on the same device; see :meth:`of_all`."""
        return self.of_all(self.peak)

    def of_all(self, phase: Phase) -> int:
        """Return the memory of a phase in bytes, summed over all ranks on the same device.

        On GPUs, each rank has its own device, so the result is the memory of one rank. On a CPU, all ranks use the host memory.
        """
        return phase.total * self.sharing - self.common * (self.sharing - 1)

    @property
    def fits(self) -> bool:
        """Whether all phases fit into the available memory."""
        return self.needed <= self.available

    def phase(self, name: str) -> Phase | None:
        """Return a phase by name; None if the run has no such phase."""
        return next((phase for phase in self.phases if phase.name == name), None)


def plan_device(options: TrainOptions) -> torch.device:
    """Return the device that a run would use. An explicitly configured GPU need not exist on this machine."""
    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(options.device)


def make_plan(options: TrainOptions, available: int | None = None) -> MemoryPlan:
    """Plan the memory of a run of ``areno train``; see :func:`plan_sizes`.

    Raises UsageError: ``fsdp`` is set, or :class:`ShapeOf` raises UsageError for one of the run's models.
    """
    if options.fsdp:
        raise UsageError(
            "--fsdp: the memory of sharded weights cannot be planned; use --no-fsdp to plan with full weights on each replica"
        )
    return plan_sizes(RunSizes(options, plan_device(options)), available)


def plan_sizes(sizes: Sizes, available: int | None = None) -> MemoryPlan:
    """Plan the memory of a run from the configurations of its models, without reading weights.

    ``available`` is the available memory in bytes. None means the memory that is free on this machine now.
    """
    return _Planner(sizes, available_bytes(sizes.device) if available is None else available).plan()


class _Planner:
    """Traces the phases of a run, and adds up the memory of each phase by purpose."""

    def __init__(self, sizes: Sizes, available: int) -> None:
        self.sizes, self.available, self.config = sizes, available, sizes.config
        self.actor = _shape(sizes.path, sizes.option, sizes, sizes.kind, self.config.adapter)
        self.longest = sizes.longest_row(self.actor.model.context_length)
        self.roles = [
            (role, _shape(role.path, role.option, sizes, role.kind, self.config.adapter if role.optimizer else None))
            for role in sizes.roles()
        ]
        open_ = self.config.activation_checkpointing is None and not self.config.offload_activations
        self.recompute = self.config.activation_checkpointing is not False
        self.updates = self._updates(self.recompute)
        on_cpu = sizes.device.type == "cpu"
        if open_ and self.updates and not (on_cpu and sizes.layout.tp_size > 1):
            # Skip recomputation if the engine would.
            kept, free = self._updates(False), self._free()
            if on_cpu and sizes.generates and self.config.keep_rollout_state:
                free -= self._rollout().cache
            if not divide(free, self._need(self.updates, kept), keeps_cache=False).recompute:
                self.recompute, self.updates = False, kept

    def _updates(self, recompute: bool) -> list[UpdateBytes]:
        trained = [("", self.actor, self.config.optimizer)] if self.sizes.trains else []
        trained += [(role.name, shape, role.optimizer) for role, shape in self.roles if role.optimizer]
        return [self._update(role, shape, optimizer, recompute) for role, shape, optimizer in trained]

    def _free(self) -> int:
        """Return the free memory per rank in bytes after the models have been loaded."""
        loaded = self._phase("load")
        return self.available // self.sizes.sharing - loaded.total

    def _need(self, recomputed: list[UpdateBytes], kept: list[UpdateBytes], decode: int = 0) -> Need:
        moments = sum(update.state - update.masters for update in recomputed)
        first, second = (
            max((max(u.forward, u.backward) for u in updates), default=0) for updates in (recomputed, kept)
        )
        return Need(moments, first, second, decode)

    def plan(self) -> MemoryPlan:
        generated = self._rollout() if self.sizes.generates else None
        cache = 0 if generated is None else generated.cache
        between = cache if self.config.keep_rollout_state else 0
        kept = sum(update.kept for update in self.updates)
        phases = [self._loading()]
        if generated is not None:
            held = generated.peak - generated.cache
            phases.append(self._phase("rollout", gradients=kept, kv_cache=cache, activations=held + self.actor.merged))
        scoring = [shape.score(self.sizes.scoring_batch(self.longest, role.name)) for role, shape in self.roles]
        if scoring:
            phases.append(
                self._phase("score", gradients=kept, kv_cache=between, activations=max(scoring), scoring=True)
            )
        phases += self._training(between)
        # Offloaded layer inputs exist for one role at a time.
        inputs = max((update.elsewhere for update in self.updates), default=0)
        return MemoryPlan(
            parameters=self.actor.parameters,
            trained=self.actor.trained,
            dtype=str(self.config.dtype).removeprefix("torch."),
            device=str(self.sizes.device),
            phases=tuple(phases),
            logits=self._logits(),
            host=(sum(update.host for update in self.updates) + inputs) * self.sizes.layout.world_size,
            cache_tokens=0 if generated is None else generated.cache // generated.per_token,
            cache_wanted=0 if generated is None else self.sizes.running * self.longest,
            available=self.available,
            layout=self.sizes.layout,
            sharing=self.sizes.sharing,
            common=sum(update.common for update in self.updates),
            longest=self.longest,
        )

    def _loading(self) -> Phase:
        """Plan the loading phase. During a dtype conversion, both the original and the converted weights are in memory."""
        shapes = [self.actor, *(shape for role, shape in self.roles if not role.only_scores)]
        # File headers and untied copies are negligible: only another dtype makes the sizes differ this much.
        converted = [size for s in shapes if (size := s.file_bytes) and not 0.7 < size / s.whole < 1.4]
        # A rank writes its share of the common weights to shared memory from its private copy.
        moved = sum(update.common for update in self.updates) // self.sizes.layout.dp_size
        return self._phase("load", activations=max([moved, *(size // self.sizes.layout.tp_size for size in converted)]))

    def _phase(
        self, name: str, *, gradients: int = 0, kv_cache: int = 0, activations: int = 0, scoring: bool = False
    ) -> Phase:
        """Return a phase that needs the given sizes in bytes, in addition to the memory that every phase needs."""
        roles = [shape.weights for role, shape in self.roles if scoring or not role.only_scores]
        states = sum(update.masters if name == "load" else update.state for update in self.updates)
        process = _PROCESS if self.sizes.device.type == "cpu" else 0
        if process and (self.sizes.layout.world_size > 1 or not self.sizes.trains):
            process += RANK
        figures = (process, self.actor.weights, sum(roles), states, gradients, kv_cache, activations)
        return Phase(name, dict(zip(PARTS, figures, strict=True)))

    def _training(self, kv_cache: int) -> list[Phase]:
        """Return the planned memory of the forward pass, the backward pass and the optimizer step.

        If a run trains several models, each phase describes the model that needs the most memory in this phase.
        """
        phases: list[list[Phase]] = []
        for update in self.updates:
            gradients = update.gradients
            others = sum(other.kept for other in self.updates if other is not update)
            carried = max(update.carried, update.kept)
            passes = (
                ("forward", carried, update.forward - update.carried),
                ("backward", gradients, update.backward - update.gradients),
                ("optimizer", gradients, update.step),
            )
            phases.append(
                [self._phase(name, gradients=others + own, kv_cache=kv_cache, activations=a) for name, own, a in passes]
            )
        return [max(same, key=lambda phase: phase.total) for same in zip(*phases, strict=True)]

    def _update(self, role: str, shape: ShapeOf, optimizer: OptimizerOptions, recompute: bool) -> UpdateBytes:
        lengths, microbatches = self.sizes.microbatch(self.longest, role)
        return shape.update(
            lengths,
            self.sizes.scored(lengths),
            optimizer,
            several=microbatches > 1,
            checkpointing=recompute,
            entropy=self.sizes.entropy,
            offloading=self.config.offload_activations,
            device=self.sizes.device,
        )

    def _rollout(self) -> RolloutBytes:
        run = self.config
        # The number of tokens per prefill does not depend on the prompt length. An agent's contexts grow up to the longest row.
        prompt = min(self.sizes.prompt, self.longest - 1)
        budget = run.kv_cache_tokens
        if budget is None:
            free = self.available // self.sizes.sharing - self.actor.weights
            budget = max(int(free * KV_SHARE) // self.actor.bytes_per_token(prompt), 1024)
        rollout = self.actor.rollout(self.sizes.running, self.sizes.n_samples, prompt, self.longest, budget)
        if self.sizes.device.type != "cuda":
            return rollout
        if run.kv_cache_tokens is None:
            need = self._need(self.updates, self.updates, 2 * rollout.beside)
            room = divide(self._free(), need, keeps_cache=run.keep_rollout_state, recompute=self.recompute).cache
            budget = pool_tokens(
                room // self.actor.bytes_per_token(prompt), self.sizes.running, self.actor.model.context_length
            )
        pool = budget * rollout.per_token  # all pages are allocated at once
        return dataclasses.replace(rollout, peak=pool + rollout.beside, cache=pool)

    def _logits(self) -> int:
        """Return the size in bytes of the fp32 logits in training, plus the gradients of one chunk of logits.

        If the logits are kept for the backward pass, the size covers the logits of all trained tokens. Otherwise, the size
        covers the logits of only one chunk.
        """
        if self.sizes.kind != "policy" or not self.sizes.trains:
            return 0
        lengths, _ = self.sizes.microbatch(self.longest)
        vocab = self.actor.model.config.get_text_config().vocab_size
        columns = -(-vocab // self.sizes.layout.tp_size)
        scored, keeps = sum(self.sizes.scored(lengths)), self.sizes.device.type == "cpu" and not self.recompute
        rows = rows_of_chunk(columns, KEPT_CHUNK_ELEMENTS if keeps else CHUNK_ELEMENTS, self.sizes.device.type)
        return 4 * columns * ((scored if keeps else min(rows, scored)) + min(rows, scored))


def _shape(path: str, option: str, sizes: Sizes, kind: ModelKind, adapter: AdapterOptions | None = None) -> ShapeOf:
    """The result is cached, because ``advise`` plans the same run many times."""
    return _shape_of(base_of(path), sizes.load_options(option), kind, adapter, sizes.layout)


_shape_of = functools.lru_cache(maxsize=8)(ShapeOf)
