"""Optimizer steps: accumulate gradients over microbatches, clip the gradient, and apply or skip the update.

The gradient of an optimizer step is the gradient of the loss over all rows of the step. The mean loss of each
microbatch is weighted by the microbatch's share of the step's units (tokens, sequences or pairs). Apart from rounding,
the result therefore depends neither on the microbatch size nor on the packing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from areno.engine.cpu_threads import CPU_THREADS
from areno.engine.device import read_all
from areno.engine.heartbeat import HEARTBEAT
from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.packed_model import PackedModel
from areno.engine.model.routing import RoutingCount, recompute_contexts
from areno.engine.model.tree import TokenTree
from areno.engine.parallel.balance import shares_of_rows
from areno.engine.parallel.pipeline import Pipeline
from areno.engine.parallel.rank_context import RankContext
from areno.engine.plan.memory_probe import avoid_shortage, usable_bytes
from areno.engine.train.batch import PackedBatch, count_units, pack_rows, refuse_mixed
from areno.engine.train.microbatch import MicroBatching
from areno.engine.train.optimizer import Optimizer, clip_factor
from areno.engine.train.outputs import ModelKind, Part, predict
from areno.engine.train.recompute import KEPT_SHARE, InHostMemory, KeptBytes, kept_bytes, recompute_layers
from areno.engine.train.token_records import TokenRecords
from areno.errors import EngineError
from areno.loss_fns.loss_interface import (
    LossFn,
    Reduction,
    declares_reduction,
    reads_bounds,
    reads_entropy,
    reduction_of,
)
from areno.loss_fns.stats import (
    Count,
    Mean,
    Parts,
    Statistic,
    TokenFlags,
    checked_output,
    merge_parts,
    parts_of,
    scalars_of,
)
from areno.types import TrainSequence

# Maximum tokens per forward pass for losses that declare their reduction: larger passes need more memory and are not faster.
MAX_TOKENS, MAX_TOKENS_CUDA = 3072, 8192


def most_tokens(device_type: str) -> int:
    """Return the maximum number of tokens of a forward pass on a device type.

    The maximum applies only if the loss declares the unit that it averages over (token, sequence or pair). For other
    losses, a division into smaller passes may change the result.
    """
    return MAX_TOKENS_CUDA if device_type == "cuda" else MAX_TOKENS


Sums = dict[str, tuple[str, Parts]]
"""Statistics merged over microbatches: name -> (kind of statistic, numbers)."""


@dataclass(slots=True)
class _Measured:
    """Losses and statistics of forward passes. The tensors stay on the device until :meth:`totals` reads them all at once."""

    counts_passes: bool  # count the passes that are backpropagated
    values: list[Tensor | float] = field(default_factory=list)
    passes: list[tuple[float, list[tuple[str, str, int]]]] = field(default_factory=list)

    def add(self, loss: Tensor, metrics: dict[str, Any], weight: float) -> None:
        if self.counts_passes and weight and loss.requires_grad:
            metrics = metrics | {"num_micro_batches": Count(torch.tensor(1))}
        entries, numbers = [], [loss]
        for name, value in metrics.items():
            kind, parts = parts_of(value) if isinstance(value, Statistic) else ("", [value])
            entries.append((name, kind, len(parts)))
            numbers += parts
        self.values += [number.detach() if isinstance(number, Tensor) else number for number in numbers]
        self.passes.append((weight, entries))

    def totals(self) -> tuple[float, Sums]:
        numbers = iter(read_all(self.values))
        loss_sum, sums = 0.0, Sums()
        for weight, entries in self.passes:
            loss_sum += next(numbers) * weight
            for name, kind, count in entries:
                parts = [next(numbers) for _ in range(count)]
                _merge(sums, {name: (kind, parts) if kind else ("mean", [parts[0] * weight, weight])})
        return loss_sum, sums


def _merge(sums: Sums, more: Sums) -> None:
    for name, (kind, parts) in more.items():
        sums[name] = (kind, merge_parts(kind, sums[name][1], parts) if name in sums else parts)


@dataclass(slots=True)
class TrainStep:
    """Trains one model with one optimizer."""

    model: PackedModel
    optimizer: Optimizer
    # Recompute each decoder layer in backward instead of storing its activations; None: do so unless a CPU has enough memory.
    activation_checkpointing: bool | None = True
    max_skipped: int = 5  # stop after this many consecutive non-finite gradients, once the loss scale cannot fall
    kind: ModelKind = "policy"  # decides the inputs of the loss, see :mod:`areno.engine.train.outputs`
    peers: RankContext = field(default_factory=RankContext)
    tree: bool = False  # compute common prefixes of a pass once, see :mod:`areno.engine.model.tree`
    offload_activations: bool = False  # keep inputs of recomputed layers in host memory
    pipeline: Pipeline | None = None  # set with pipeline parallelism
    records: TokenRecords = field(default_factory=TokenRecords)  # values of a policy's observed rows
    _skipped: int = 0
    _kept: KeptBytes | None = None
    _routing: RoutingCount = field(default_factory=RoutingCount)  # counter of the current passes

    def run(
        self,
        rows: Sequence[TrainSequence],
        loss_fn: LossFn,
        mini_bs: int | MicroBatching,
        accumulation: int | None = None,
    ) -> dict[str, float]:
        """Train on rows in their order, in one optimizer step or several.

        Args:
            rows: rows to train on, at least one. For a pair loss, chosen and rejected rows alternate.
            mini_bs: maximum number of rows per forward pass, or a :class:`MicroBatching` that divides each replica's
                rows into microbatches.
            accumulation: for an integer ``mini_bs``, each optimizer step uses ``mini_bs * accumulation`` rows. If None,
                a single optimizer step uses all rows.

        Returns:
            Scalar statistics by name, averaged over the optimizer steps of this call. Exceptions: statistics whose
            names begin with ``logp_`` are from the first step, and the learning rate ``lr`` is from the last step.

        Raises:
            ValueError: there are no rows, some rows lack a per-token list that other rows have, the rows cannot be
                divided as requested, ``accumulation`` is combined with a :class:`MicroBatching`, or ``mini_bs.tree`` is
                set for a reward model.
            EngineError: the gradient was not finite in ``max_skipped`` consecutive updates. With loss scaling, updates
                are counted only while the loss scale is at its minimum: a larger scale can make gradients overflow.
        """
        unit = reduction_of(loss_fn)
        if not rows:
            raise ValueError("train() needs at least one row, got none")
        refuse_mixed(rows)
        per_step = _rows_per_step(len(rows), unit, mini_bs, accumulation)
        self.set_training(True, self._recomputes(rows, loss_fn, mini_bs, self.tree))
        try:
            results = []
            for start in range(0, len(rows), per_step):
                self.optimizer.zero_grad()
                results.append(self.accumulate(rows[start : start + per_step], loss_fn, mini_bs) | self.apply())
        finally:
            self.set_training(False)
            self.model.weights.release()
        means = _means(results)
        # Later steps train an updated policy, so only the first step measures the gap to the rollout.
        gap = {name: value for name, value in results[0].items() if name.startswith("logp_")}
        return means | gap | {"lr": results[-1]["lr"]}

    def rehearse(self, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int | MicroBatching) -> None:
        """Compute gradients over this replica's rows, and discard the gradients, to check whether memory suffices.

        This method never uses tree training, which computes a common prefix of several rows only once: the rows are
        synthetic and share unrealistically long prefixes, so tree training would underestimate the memory. Without FSDP,
        this method does not communicate with other replicas, and therefore also works if another replica has failed.
        """
        self.set_training(True, self._recomputes(rows, loss_fn, mini_bs, tree=False))
        try:
            self._accumulate(rows, loss_fn, mini_bs, rows, tree=False)
        finally:
            self.set_training(False)
            self.optimizer.zero_grad()

    def measure(self, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int | MicroBatching) -> dict[str, float]:
        """Compute the loss and the statistics over all rows, in evaluation mode and without gradients.

        Raises:
            ValueError: there are no rows, some rows lack a per-token list that other rows have, or a loss over pairs gets
                an odd number of rows.
        """
        if not rows:
            raise ValueError("measure() needs at least one row, got none")
        refuse_mixed(rows)
        with torch.no_grad(), self.model.gathered():
            return self.accumulate(rows, loss_fn, mini_bs)

    def accumulate(
        self, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int | MicroBatching
    ) -> dict[str, float]:
        """Accumulate the gradient of the loss over all rows without an update, and return statistics over all rows.

        Each rank receives all rows, and selects the rows that it processes. Raises ValueError if a loss over pairs gets an
        odd number of rows.
        """
        together = 2 if reduction_of(loss_fn) == "pair" else 1
        if len(rows) % together:
            raise ValueError(f"a loss over pairs needs an even number of rows, got {len(rows)}")
        if not isinstance(mini_bs, int):
            together = mini_bs.granularity
        mine = self._share(rows, together)
        tree = self.tree or (isinstance(mini_bs, MicroBatching) and mini_bs.tree)
        results = [self._accumulate(mine, loss_fn, mini_bs, rows, tree)]
        self.records.complete(rows)
        if self.peers.data.size > 1:
            results = self.peers.data.all_gather(results[0])
        sums = Sums()
        for _, more in results:
            _merge(sums, more)
        stats = {"loss": sum(loss for loss, _ in results)}
        for name, (kind, parts) in sums.items():
            stats |= scalars_of(name, kind, parts)
        return stats

    def _accumulate(
        self,
        mine: Sequence[TrainSequence],
        loss_fn: LossFn,
        mini_bs: int | MicroBatching,
        rows: Sequence[TrainSequence],
        tree: bool,
    ) -> tuple[float, Sums]:
        """Accumulate the gradient over this replica's rows ``mine``, and return the loss and the statistics.

        ``rows`` are the rows of all replicas.
        """
        if tree and self.kind == "reward":
            raise ValueError("reward models do not support tree training; set enable_tree_training=false")
        unit = reduction_of(loss_fn)
        total = count_units(rows, unit)
        measured, self._routing = _Measured(counts_passes=isinstance(mini_bs, MicroBatching)), RoutingCount()
        passes = list(self._passes(mine, loss_fn, mini_bs, tree))
        alike = not self.model.weights.whole  # all ranks must make the same number of passes
        missing = -self.peers.data.all_reduce_min(-len(passes)) - len(passes) if alike else 0
        spare = [[min(rows, key=lambda row: len(row.tokens))]] * missing
        if self.pipeline is not None:
            self._through_stages([*passes, *spare], len(passes), loss_fn, total, tree, measured)
            loss, sums = self.peers.pipeline.all_gather(measured.totals())[-1]
            return loss, sums | self._routing_sums()
        for chunk in passes:
            HEARTBEAT.tick()
            CPU_THREADS.apply()
            avoid_shortage(self.model.device, self.peers.layout.world_size)
            weight = count_units(chunk, unit) / max(total, 1)
            loss, metrics, predicted = self._loss(chunk, loss_fn, tree)
            if weight and loss.requires_grad:
                (loss * (weight * self._scale)).backward()
            elif alike and total:
                _backward_of_nothing(predicted)
            measured.add(loss, metrics, weight)
        self._keep_up(spare, loss_fn, backward=total > 0)
        loss_sum, sums = measured.totals()
        return loss_sum, sums | self._routing_sums()

    def _packed(self, rows: Sequence[TrainSequence], tree: bool) -> PackedBatch:
        return pack_rows(rows, self.model.device, tree, self.model.routers, self._routing)

    def _routing_sums(self) -> Sums:
        """For this data-parallel replica, return the fraction of replayed expert choices that differ from the router's own."""
        if self.model.routers is None:
            return {}
        counts = read_all([self._routing.changed, self._routing.replayed])
        for channel in (self.peers.context, self.peers.pipeline):
            counts = [sum(numbers) for numbers in zip(*channel.all_gather(counts), strict=True)]
        return {"routed_experts_changed": ("mean", counts)} if counts[1] else {}

    def _through_stages(
        self,
        passes: Sequence[Sequence[TrainSequence]],
        counted: int,
        loss_fn: LossFn,
        total: int,
        tree: bool,
        measured: _Measured,
    ) -> None:
        """Run the forward and backward pass of each microbatch in ``passes`` on all pipeline stages.

        Only the first ``counted`` microbatches contribute to the loss. All other microbatches have a gradient of 0.
        """
        assert self.pipeline is not None
        avoid_shortage(self.model.device, self.peers.layout.world_size)
        parts = [Part.of(self._packed(chunk, tree), self.peers.context) for chunk in passes]
        entropy, bounds, unit = reads_entropy(loss_fn), reads_bounds(loss_fn), reduction_of(loss_fn)

        def finish(index: int, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
            predicted = parts[index].predicted(self.model, self.kind, hidden, entropy, bounds)
            if index < counted:
                weight = count_units(passes[index], unit) / max(total, 1)
                loss, metrics = self._loss_of(parts[index].batch, passes[index], loss_fn, predicted)
                measured.add(loss, metrics, weight)
                if weight and loss.requires_grad:
                    return loss * (weight * self._scale), None
            return predicted, torch.zeros_like(predicted)

        self.pipeline.run(parts, finish, backward=total > 0 and torch.is_grad_enabled())

    def _share(self, rows: Sequence[TrainSequence], together: int) -> Sequence[TrainSequence]:
        if self.peers.data.size == 1:
            return rows
        lengths = [len(row.tokens) for row in rows]
        return [rows[i] for i in shares_of_rows(lengths, self.peers.data.size, together)[self.peers.data.rank]]

    def _keep_up(self, passes: Sequence[Sequence[TrainSequence]], loss_fn: LossFn, backward: bool) -> None:
        """Run additional passes without effect on the gradient, so that all ranks run the same number of passes.

        FSDP requires equal numbers, because each pass gathers every layer from all ranks. For each microbatch in ``passes``,
        run a forward pass. With ``backward``, also run a backward pass with a gradient of 0.
        """
        for rows in passes:
            HEARTBEAT.tick()
            predicted = self._predict(pack_rows(rows, self.model.device), loss_fn)
            if backward:
                _backward_of_nothing(predicted)

    def _predict(self, batch: PackedBatch, loss_fn: LossFn) -> Tensor:

        def work() -> Tensor:
            entropy, bounds = reads_entropy(loss_fn), reads_bounds(loss_fn)
            return predict(self.model, self.kind, batch, entropy, bounds, self.peers.context)

        return self.model.weights.run(work)

    def _loss(
        self, rows: Sequence[TrainSequence], loss_fn: LossFn, tree: bool
    ) -> tuple[Tensor, dict[str, Any], Tensor]:
        batch = self._packed(rows, tree)
        predicted = self._predict(batch, loss_fn)
        return *self._loss_of(batch, rows, loss_fn, predicted), predicted

    def _loss_of(
        self, batch: PackedBatch, rows: Sequence[TrainSequence], loss_fn: LossFn, predicted: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        loss, metrics = checked_output(loss_fn(batch.data, predicted), loss_fn)
        flags = {name: value for name, value in metrics.items() if isinstance(value, TokenFlags)}
        if self.kind == "policy":
            self.records.note(rows, predicted, flags.get("clipped"))
        metrics = {name: value for name, value in metrics.items() if name not in flags}
        tokens = torch.tensor(sum(len(row.tokens) for row in rows))
        if len(batch.tokens) < tokens:
            metrics = metrics | {"tree_token_ratio": Mean(torch.tensor(len(batch.tokens)), tokens)}
        return loss, metrics

    def apply(self) -> dict[str, float]:
        """Clip and apply the accumulated gradient, and return statistics.

        The update is skipped if there is no gradient, or if the gradient is not finite.
        """
        avoid_shortage(self.model.device, self.peers.layout.world_size)
        gradient, scale = self.optimizer.collect(), self.optimizer.loss_scale
        gradient = replace(gradient, norm=gradient.norm / self._scale)
        usable = math.isfinite(gradient.norm) and gradient.total > 0
        stats = gradient.metrics() | {"grad_norm_clipped": 0.0, "lr": 0.0, "update_skipped": float(not usable)}
        if usable:
            factor = clip_factor(gradient.norm, self.optimizer.config.grad_clip_norm)
            if factor < 1.0 or self._scale != 1.0:
                self.optimizer.scale(factor / self._scale)
            stats["grad_norm_clipped"] = gradient.norm * factor
            stats["lr"] = self.optimizer.step()
        self.optimizer.zero_grad()
        finite = math.isfinite(gradient.norm)
        self._skipped = 0 if finite or (scale is not None and scale.may_fall) else self._skipped + 1
        if scale is not None:
            stats["loss_scale"] = scale.value
            scale.update(finite)
        if self._skipped >= self.max_skipped:
            raise EngineError(
                f"the gradient was not finite in {self._skipped} updates in a row, so these updates did not change the "
                "weights. Lower --lr, lower --grad-clip-norm, or use --dtype float32"
            )
        return stats

    @property
    def _scale(self) -> float:
        return 1.0 if self.optimizer.loss_scale is None else self.optimizer.loss_scale.value

    def set_training(self, training: bool, recompute: bool = True) -> None:
        """Turn training mode on or off. Layers are recomputed only in training mode.

        ``recompute`` is whether to recompute layers, and has no effect if ``activation_checkpointing`` is False.
        """
        recompute = recompute and self.activation_checkpointing is not False
        if isinstance(self.model, CausalLM):
            self.model.keeps_logits = training and not recompute
        if recompute or (not training and self.activation_checkpointing is not False):
            contexts = None if self.model.routers is None else recompute_contexts
            recompute_layers(self.model.module, training, InHostMemory if self.offload_activations else None, contexts)
        self.model.module.train(training)

    def _recomputes(
        self, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int | MicroBatching, tree: bool
    ) -> bool:
        """Return whether to recompute layers.

        If ``activation_checkpointing`` is not None, its value is returned. Otherwise layers are recomputed, with one
        exception. A model on a CPU keeps its activations if enough memory is free, and if there is neither tensor
        parallelism nor FSDP nor pipeline parallelism.
        """
        chosen, layout = self.activation_checkpointing, self.peers.layout
        measurable = not (layout.tp_size > 1 or layout.fsdp or layout.pp_size > 1)
        if chosen is not None or self.model.device.type != "cpu" or not measurable:
            return chosen is not False
        if self._kept is None:
            self._kept = kept_bytes(self.model)
        per_logit = 4 * self.model.vocab_size if self.kind == "policy" else 0
        passes = ([len(row.tokens) for row in chunk] for chunk in self._passes(rows, loss_fn, mini_bs, tree))
        most = max(self._kept.of(lengths) + per_logit * sum(lengths) for lengths in passes)
        gradients = sum(4 * parameter.numel() for _, parameter in self.model.parameters())
        return most + gradients > KEPT_SHARE * usable_bytes(self.model.device) / layout.world_size

    def _passes(
        self, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int | MicroBatching, tree: bool
    ) -> Iterator[Sequence[TrainSequence]]:
        """Divide rows into microbatches, one for each forward pass.

        An integer ``mini_bs`` limits the rows of a microbatch. If the loss declares the unit that it averages over (token,
        sequence or pair), the microbatch size does not affect the result. Then :func:`most_tokens` also limits the tokens.
        """
        if not isinstance(mini_bs, int):
            return ([rows[index] for index in bin_] for bin_ in mini_bs.bins([row.tokens for row in rows]))
        most = (
            most_tokens(self.model.device.type) * self.peers.layout.cp_size if declares_reduction(loss_fn) else math.inf
        )
        tree = tree and sum(len(row.tokens) for row in rows) > most  # pointless if all rows fit into one pass
        return _chunks(rows, mini_bs, most, 2 if reduction_of(loss_fn) == "pair" else 1, tree)


def _backward_of_nothing(predicted: Tensor) -> None:
    """Run a backward pass with a gradient of 0, because other ranks wait for the communication of this pass."""
    if predicted.requires_grad:
        predicted.backward(torch.zeros_like(predicted))


def _means(results: Sequence[dict[str, float]]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for name, value in ((name, value) for result in results for name, value in result.items()):
        by_name.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in by_name.items()}


def _rows_per_step(rows: int, unit: Reduction, mini_bs: int | MicroBatching, accumulation: int | None) -> int:
    """Return the number of rows per optimizer step. Raises ValueError if ``rows``, ``mini_bs`` or
    ``mini_bs.granularity`` is odd for a loss over pairs, or if ``accumulation`` is set and ``mini_bs`` is not an integer."""
    block = mini_bs if isinstance(mini_bs, int) else mini_bs.granularity
    if unit == "pair" and (rows % 2 or block % 2):
        what = "mini_bs" if isinstance(mini_bs, int) else "mb_spec.granularity"
        raise ValueError(
            f"a loss over pairs needs an even number of rows and an even {what}, got {rows} rows and {what}={block}"
        )
    if isinstance(mini_bs, int):
        return mini_bs * accumulation if accumulation else rows
    if accumulation:
        raise ValueError(
            "if mini_bs is a MicroBatching, one optimizer step uses all rows, so accumulation is not supported; omit "
            "accumulation, or pass an integer mini_bs"
        )
    return rows


def _chunks(
    rows: Sequence[TrainSequence], size: int, most_tokens: float, together: int = 1, tree: bool = False
) -> Iterator[Sequence[TrainSequence]]:
    """Divide rows, in order, into chunks of at most ``size`` rows and ``most_tokens`` tokens.

    The rows consist of blocks of size ``together``. A block is never split, even if it exceeds ``most_tokens``. With ``tree``,
    the tokens of a prefix that several rows of a chunk share are counted only once.
    """
    start, tokens, prefixes = 0, 0, TokenTree()

    def added(neighbors: Sequence[TrainSequence]) -> int:
        if not tree:
            return sum(len(row.tokens) for row in neighbors)
        before = len(prefixes.tokens)
        for row in neighbors:
            prefixes.add(row.tokens)
        return len(prefixes.tokens) - before

    for index in range(0, len(rows), together):
        neighbors = rows[index : index + together]
        more = added(neighbors)
        if index > start and (index + together - start > size or tokens + more > most_tokens):
            yield rows[start:index]
            start, tokens, prefixes = index, 0, TokenTree()
            more = added(neighbors)
        tokens += more
    if rows:
        yield rows[start:]
