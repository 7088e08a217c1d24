"""Trace the memory that the engine allocates, by running the engine on fake tensors, which have shapes but no memory.

Because the engine's own code runs, no formulas for its memory are needed. Such formulas would have to be adapted after each
change of the engine. Temporary memory inside a PyTorch operation is not counted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from areno.engine.model.adapter import AdapterOptions, adapted_layers
from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.loading import LoadOptions, add_adapter, load_shape
from areno.engine.model.packed_model import PackedModel
from areno.engine.model.packing import PackedPlan
from areno.engine.model.value_model import ValueModel
from areno.engine.parallel.channels import Channel
from areno.engine.parallel.layout import Layout
from areno.engine.parallel.rank_context import RankContext
from areno.engine.parallel.sharding import distributed_config
from areno.engine.plan.live_bytes import LiveBytes
from areno.engine.plan.local_shape import all_logits, keep_one_part
from areno.engine.rollout.loop import IDLE_PREFILL
from areno.engine.rollout.sampler import SamplingTable
from areno.engine.rollout.scheduler import COLUMN_STEP, round_up
from areno.engine.rollout.slot_cache import DecodePlan, PrefillPlan, PrefillSpan, SlotCache
from areno.engine.train.optimizer import MasterAdamW, Optimizer, OptimizerOptions
from areno.engine.train.outputs import ModelKind
from areno.engine.train.recompute import recompute_layers
from areno.engine.train.sharded import ZeroAdamW
from areno.engine.train.step import TrainStep
from areno.errors import UsageError, first_line
from areno.types import SamplingParams

T = TypeVar("T")
P = ParamSpec("P")

# Size in bytes of a 4-bit weight, including its share of the scales.
_NF4_BYTES = 0.52


@dataclass(frozen=True, slots=True)
class UpdateBytes:
    """Memory of a role's optimizer step in bytes.

    ``forward`` and ``backward`` include neither the role's weights nor the optimizer state.
    """

    forward: int  # peak of a forward pass, including gradients of earlier microbatches
    carried: int  # gradients of earlier microbatches; 0 with a single microbatch
    backward: int  # peak of a backward pass, including gradients
    gradients: int  # all gradients
    state: int  # moments and master weights, even if not allocated yet
    masters: int  # the part of the optimizer state allocated before the first step
    step: int  # temporary memory of the optimizer step
    elsewhere: int = 0  # layer inputs offloaded to the host
    host: int = 0  # states and gradients offloaded to the host; included in no other number
    kept: int = 0  # gradients that stay allocated between steps
    common: int = 0  # weights in memory shared by all replicas


@dataclass(frozen=True, slots=True)
class RolloutBytes:
    """Memory of a rollout in bytes, without the weights."""

    peak: int
    cache: int  # final size of the KV cache
    per_token: int  # per cached token
    beside: int  # peak of a prefill or a decode step, without the cache


def _once(trace: Callable[Concatenate[ShapeOf, P], T]) -> Callable[Concatenate[ShapeOf, P], T]:
    """Cache the results of a method of :class:`ShapeOf`, because a search for options repeats the same calls."""

    @functools.wraps(trace)
    def cached(shape: ShapeOf, *arguments: P.args, **options: P.kwargs) -> T:
        key = (trace.__name__, repr(arguments), repr(options))
        if key not in shape.traced:
            shape.traced[key] = trace(shape, *arguments, **options)
        result: T = shape.traced[key]
        return result

    return cached


class ShapeOf:
    """The model of a checkpoint, without memory for the weights. With tensor parallelism, the model is one rank's shard.

    Raises:
        UsageError: the model's configuration cannot be read, or the model does not support the parallel layout. Methods also
            raise UsageError if the model's code depends on tensor values, which fake tensors do not have.
    """

    def __init__(
        self,
        path: str,
        options: LoadOptions,
        kind: ModelKind = "policy",
        adapter: AdapterOptions | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.kind: ModelKind = kind
        self.layout = layout or Layout()
        self._path = path
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        # peft moves adapters to their layer's device, which fails on fake tensors: add them on the meta device.
        with self._mode if adapter is None else torch.device("meta"):
            self.model: PackedModel = load_shape(path, options, classifier=kind != "policy")
            self.parameters = sum(p.numel() for p in self.model.module.parameters())
            if adapter is not None:
                self.model = add_adapter(self.model, kind, adapter, path)
        with self._mode:
            if adapter is not None:
                _put_on_cpu(self.model.module)
            self.trained = sum(p.numel() for _, p in self.model.parameters())
            self.whole = sum(p.numel() * p.element_size() for p in self.model.module.parameters())
            if self.layout.tp_size > 1:
                head_plan = getattr(self.model.module, "_tp_plan", None) or {}
                distributed_config(
                    self.model.config, head_plan, self.layout, options.option, path
                )  # raises for an unsupported layout
                if adapter is not None:
                    from areno.engine.model.sharded_adapter import refuse_other_layers  # slow import

                    refuse_other_layers(self.model.module, adapted_layers(self.model.module))
                keep_one_part(self.model.module, self.layout.tp_size)
        tensors = list(self.model.module.parameters())
        own, four_bit = self.model.adapter, adapter is not None and adapter.load_in_4bit
        self.merged = own.merged_bytes if own is not None and not four_bit else 0
        self.traced: dict[tuple[str, ...], Any] = {}
        self._fixed: list[Tensor] = [*tensors, *self.model.module.buffers()]
        self.weights = sum(t.untyped_storage().nbytes() for t in self._fixed)
        if four_bit:
            self.weights -= self._saved_by_four_bits()

    def _saved_by_four_bits(self) -> int:
        """Return the number of bytes saved by storing frozen linear weights in 4 bits. The output layer is not quantized."""
        frozen = [
            layer.weight
            for name, layer in self.model.module.named_modules()
            if isinstance(layer, torch.nn.Linear) and "lm_head" not in name and not layer.weight.requires_grad
        ]
        return int(sum(weight.numel() * (weight.element_size() - _NF4_BYTES) for weight in frozen))

    @property
    def file_bytes(self) -> int:
        """Total size in bytes of the checkpoint's safetensors files; 0 if the checkpoint is not a local folder."""
        return sum(file.stat().st_size for file in Path(self._path).expanduser().glob("*.safetensors"))

    @contextmanager
    def _counting(self) -> Iterator[LiveBytes]:
        try:
            with self._mode, LiveBytes() as live:
                live.ignore(self._fixed)
                yield live
        except RuntimeError as error:
            kind = type(self.model.module).__name__
            raise UsageError(
                f"{self._path}: the code of {kind} depends on tensor values ({first_line(error)[:200]}), so the memory of this "
                "model cannot be planned; the run itself may still work"
            ) from error

    @_once
    def update(
        self,
        lengths: Sequence[int],
        scored: Sequence[int],
        config: OptimizerOptions,
        *,
        several: bool,
        checkpointing: bool,
        device: torch.device,
        entropy: bool = False,
        offloading: bool = False,
    ) -> UpdateBytes:
        """Trace an optimizer step whose microbatches all have the same size.

        Args:
            lengths: number of tokens of each row in a microbatch.
            scored: number of tokens to train on, for each row.
            config: optimizer options.
            several: whether the step has several microbatches, whose gradients are accumulated.
            checkpointing: whether the backward pass recomputes activations.
            device: device of the run.
            entropy: whether the loss reads the policy's entropy.
            offloading: whether the inputs of recomputed layers are kept in host memory.
        """
        parameters = self.model.parameters()
        with self._mode:
            step = TrainStep(self.model, self._optimizer(config), checkpointing, kind=self.kind)
        if isinstance(self.model, CausalLM):
            self.model.computes_on = device.type
        step.set_training(True)
        elsewhere: list[int] = []
        if offloading:
            recompute_layers(self.model.module, True, functools.partial(_OffloadedTensors, elsewhere))
        forward = backward = 0
        with self._counting() as live:
            for _ in range(2 if several else 1):
                elsewhere.clear()
                live.restart()
                loss = self._predict(lengths, scored, entropy).sum()
                forward = max(forward, live.peak)
                loss.backward()
                del loss
                backward = max(backward, live.peak)
            optimizer = step.optimizer
            gradients = sum(g.numel() * g.element_size() for g in optimizer.gradients())
            optimizer.zero_grad()
        step.set_training(False)
        if isinstance(self.model, CausalLM):
            self.model.computes_on = None
        for _, p in parameters:
            p._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # the master weights were deleted
        masters = optimizer.held_bytes(moments=False)
        shared = device.type == "cpu" and self.layout.dp_size > 1  # see areno.engine.parallel.channels
        common = shared and self.layout.tp_size == 1
        in_place = masters if common and self.model.dtype == torch.float32 else 0
        carried, state, host = gradients if several else 0, optimizer.held_bytes() - in_place, 0
        if config.offload:
            forward, backward, host = forward - carried, backward - gradients, state + gradients
            carried = gradients = state = masters = in_place = 0
        return UpdateBytes(
            *(forward, carried, backward, gradients),
            state=state,
            masters=masters - in_place,
            step=optimizer.step_bytes(device),
            host=host,
            elsewhere=sum(elsewhere),
            kept=gradients if shared else 0,
            common=sum(p.numel() * p.element_size() for _, p in parameters) if common else 0,
        )

    def _optimizer(self, config: OptimizerOptions) -> Optimizer:
        """Return the run's optimizer. If the run has several ranks, a stub replaces the connection to the other ranks.

        With one rank, ``config.offload`` has no effect on the optimizer. Instead, :meth:`update` counts the states and
        gradients as host memory if ``config.offload`` is set.
        """
        parameters = self.model.parameters()
        if self.layout.world_size == 1:
            return MasterAdamW(parameters, dataclasses.replace(config, offload=False))
        return ZeroAdamW(parameters, config, RankContext(self.layout, data=_StubChannel(self.layout.dp_size)))

    def _predict(self, lengths: Sequence[int], scored: Sequence[int], entropy: bool) -> Tensor:
        """Run the forward pass of a training step. Return the predictions that the loss needs: log-probs, values or rewards.

        ``scored`` is the number of tokens to train on, for each row.
        """
        plan = PackedPlan(lengths)
        hidden = self.model.body(torch.zeros(plan.tokens, dtype=torch.long), plan.position_ids, plan)
        if self.kind == "reward":
            assert isinstance(self.model, ValueModel)
            return self.model.values(hidden[: len(lengths)])
        rows = hidden.index_select(0, torch.zeros(sum(scored), dtype=torch.long))
        if isinstance(self.model, ValueModel):
            return self.model.values(rows)
        assert isinstance(self.model, CausalLM)
        targets, temperatures = torch.zeros(sum(scored), dtype=torch.long), torch.ones(sum(scored))
        return self.model.logprobs_and_entropy(rows, targets, temperatures, entropy)[0]

    @_once
    def score(self, lengths: Sequence[int]) -> int:
        """Return the peak memory of a scoring pass in bytes."""
        with self._counting() as live, torch.no_grad():
            self._predict(lengths, lengths, entropy=False)
        return live.peak

    def rollout(self, running: int, n_samples: int, prompt: int, longest: int, budget: int | None) -> RolloutBytes:
        """Estimate the memory of generating ``running`` sequences at once. All prompts have ``prompt`` tokens.

        Sequences grow to ``longest`` tokens. ``budget`` is the maximum number of tokens in the cache; None means no limit.
        """
        first = round_up(prompt + 1, COLUMN_STEP)
        widths = range(first, max(first, round_up(longest, COLUMN_STEP)) + 1, COLUMN_STEP)
        # The budget always allows at least one sequence.
        grown = tuple(
            (columns, running if budget is None else min(running, max(budget // columns, 1))) for columns in widths
        )
        return self._rollout(n_samples, prompt, longest, grown)

    @_once
    def _rollout(self, n_samples: int, prompt: int, longest: int, grown: Sequence[tuple[int, int]]) -> RolloutBytes:
        """Trace a rollout, in which the cache grows in steps.

        ``grown`` has one pair per step: the capacity of the cache in tokens per sequence, and the number of running sequences.
        """
        with self._counting() as live, torch.inference_mode(False), torch.no_grad():
            cache, beside = SlotCache(), 0
            rows = grown[0][1]
            at_once = min(max(IDLE_PREFILL // prompt, 1) * n_samples, rows)
            for held in sorted({at_once, rows}):  # the first and the last prefill
                beside = max(beside, self._prefill(live, cache, held, at_once, n_samples, prompt))
            for columns, rows in grown[1:]:
                cache.reserve(rows, columns)
            held_bytes, per_token, peak = cache.nbytes(), _per_token(cache), live.peak
            live.restart()
            self._decode(cache, rows, longest)
            beside = max(beside, live.peak - held_bytes)
            return RolloutBytes(max(peak, live.peak), held_bytes, per_token, beside)

    @_once
    def bytes_per_token(self, prompt: int) -> int:
        """Return the cache size in bytes per token, for a sequence whose prompt has ``prompt`` tokens.

        The result depends on ``prompt``, because recurrent states, which have a fixed size, are divided among the tokens.
        """
        with self._counting(), torch.inference_mode(False), torch.no_grad():
            cache = SlotCache()
            cache.reserve(1, round_up(prompt + 1, COLUMN_STEP))
            plan = PrefillPlan(cache, [PrefillSpan([0], prompt)])
            self.model.body(torch.zeros(plan.tokens, dtype=torch.long), plan.position_ids, plan)
            return _per_token(cache)

    def _prefill(self, live: LiveBytes, cache: SlotCache, held: int, rows: int, n_samples: int, prompt: int) -> int:
        """Trace a prefill of ``rows`` sequences, after which the cache holds ``held`` sequences.

        Return the peak memory in bytes, without the size of the cache.
        """
        cache.reserve(held, round_up(prompt + 1, COLUMN_STEP))
        before = live.peak
        live.restart()
        slots = [list(range(i, min(i + n_samples, held))) for i in range(held - rows, held, n_samples)]
        plan = PrefillPlan(cache, [PrefillSpan(own, prompt) for own in slots])
        tokens = torch.zeros(plan.tokens, dtype=torch.long)
        hidden = self.model.body(tokens, plan.position_ids, plan)
        plan.finish()
        logits = self.model.logits(hidden[: len(slots)])  # type: ignore[attr-defined]
        chosen = all_logits(logits, self.model.config.get_text_config().vocab_size)
        _sample(chosen.index_select(0, torch.zeros(rows, dtype=torch.long)))
        beside = live.peak - cache.nbytes()
        live.peak = max(live.peak, before)
        return beside

    def _decode(self, cache: SlotCache, rows: int, longest: int) -> None:
        plan = DecodePlan.of(cache, [0] * rows, round_up(longest, COLUMN_STEP))
        hidden = self.model.body(torch.zeros_like(plan.position_ids), plan.position_ids, plan)
        logits = self.model.logits(hidden[:rows])  # type: ignore[attr-defined]
        _sample(all_logits(logits, self.model.config.get_text_config().vocab_size))


class _StubChannel(Channel):
    """A channel that claims to connect ``size`` ranks, but sends nothing."""

    def __init__(self, size: int) -> None:
        self.size = size


class _OffloadedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Discards the tensors that autograd saves in the ``with`` block, and appends each tensor's size in bytes to ``sizes``."""

    def __init__(self, sizes: list[int]) -> None:
        def pack(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor.shape, tensor.dtype

        super().__init__(pack, lambda packed: torch.empty(packed[0], dtype=packed[1]))


def _put_on_cpu(module: torch.nn.Module) -> None:
    """Replace all tensors of a module with fake CPU tensors. Tied weights stay tied."""
    replaced: dict[int, Tensor] = {}
    for child in module.modules():
        tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for name, tensor in [entry for table in tables for entry in table.items()]:
            if tensor is not None and id(tensor) not in replaced:
                blank = torch.empty(tensor.shape, dtype=tensor.dtype)
                trained = isinstance(tensor, torch.nn.Parameter)
                replaced[id(tensor)] = torch.nn.Parameter(blank, tensor.requires_grad) if trained else blank
            for table in tables:
                if tensor is not None and table.get(name) is tensor:
                    table[name] = replaced[id(tensor)]


def _per_token(cache: SlotCache) -> int:
    return -(-cache.nbytes() // (cache.slots * cache.columns))


def _sample(logits: Tensor) -> None:
    rows = len(logits)
    SamplingTable([SamplingParams()] * rows, list(range(rows)), logits.device).draw(logits, [0] * rows)
