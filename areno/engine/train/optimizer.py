"""The interface of the engine's optimizers, and AdamW on one rank.

Master weights are in fp32. They are a second copy of the weights in two cases: if the model computes in bf16 or fp16, or
if the model is on a GPU and its master weights are offloaded to host memory. Otherwise, the weights of the model are
also the master weights. Gradients of microbatches are summed in fp32. Each step updates the master weights, and copies
their rounded values to the model. Small updates, for example with a learning rate of 1e-6, accumulate in the master
weights. Without master weights, rounding would undo these updates.

Moments are stored in fp32, in bf16 or with 8 bits; see :class:`OptimizerOptions`. Master weights, moments and summed
gradients may be in host memory instead of GPU memory.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from areno.engine.device import read_all
from areno.engine.train import adam_8bit, adam_bf16
from areno.engine.train.loss_scale import LossScale
from areno.engine.train.schedule import DecayStyle, LrSchedule
from areno.engine.train.state_files import Index, SavedState, StatePart, full_index
from areno.errors import UsageError


@dataclass(slots=True, kw_only=True)
class OptimizerOptions:
    """Optimizer options of one trainable role, such as the actor. :class:`LrSchedule` explains the learning-rate fields.

    ``adam_8bit`` stores the moments with 8 bits, and ``adam_bf16`` stores the moments in bf16. ``sgd`` selects SGD,
    which has no moments. For a model on a GPU, ``offload`` keeps master weights, moments and summed gradients in host
    memory, and updates the master weights on the CPU.
    """

    lr: float = 1e-4
    min_lr: float = 0.0
    lr_decay_steps: int = 0
    lr_warmup_steps: int = 0
    lr_decay_style: DecayStyle = "constant"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float | None = None
    adam_8bit: bool = False
    adam_bf16: bool = False
    sgd: bool = False
    offload: bool = False
    reduce_bf16: bool = False  # round gradients to bf16 for communication between ranks
    loss_scale: LossScale | None = None  # initial loss scale, for fp16

    @property
    def moments(self) -> str:
        """Format of the moments: ``8bit``, ``bf16`` or ``fp32``.

        An optimizer can load only states that were saved with the same format.
        """
        return "8bit" if self.adam_8bit else "bf16" if self.adam_bf16 else "fp32"

    def moment_bytes(self, count: int, quantised: bool | None = None) -> int:
        """Return the total size in bytes of both moments of ``count`` weights.

        ``quantised`` matters only with ``adam_8bit``, which stores the moments of small tensors in fp32, and all other
        moments with 8 bits. ``quantised`` is whether these weights have 8-bit moments. If ``quantised`` is None, ``count``
        determines whether the tensor is small, so ``count`` must be the size of the unsharded tensor.
        """
        if self.adam_8bit:
            return adam_8bit.state_bytes(count, quantised)
        return (4 if self.adam_bf16 else 0 if self.sgd else 8) * count

    def working_bytes(self, device: torch.device) -> int:
        """Estimate the memory in bytes that an update needs on ``device`` in addition to optimizer state and gradients."""
        if self.adam_bf16:
            return adam_bf16.WORKING_BYTES
        return adam_8bit.working_bytes(device) if self.adam_8bit else 0

    @classmethod
    def of(cls, fields: Mapping[str, Any], owner: str) -> OptimizerOptions:
        """Create options from a mapping.

        Raises:
            UsageError: a key is unknown, or ``lr_decay_steps`` is missing although the learning rate decays. The
                message begins with ``owner``.
        """
        known = {entry.name for entry in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise UsageError(f"{owner} has no key {', '.join(unknown)}; known keys: {', '.join(sorted(known))}")
        options = cls(**fields)
        if options.lr_decay_style != "constant" and not options.lr_decay_steps:
            raise UsageError(
                f"{owner} lr_decay_style={options.lr_decay_style!r} needs lr_decay_steps, the optimizer step at which the "
                "learning rate reaches min_lr; set lr_decay_steps to the number of optimizer steps of the run"
            )
        return options

    def schedule(self) -> LrSchedule:
        """Create the schedule: the learning rate as a function of the optimizer step."""
        return LrSchedule(self.lr, self.min_lr, self.lr_warmup_steps, self.lr_decay_steps, self.lr_decay_style)


MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments in AdamW's state."""


@dataclass(frozen=True, slots=True)
class GradientStats:
    """Statistics of the gradient of an optimizer step, over all ranks."""

    norm: float
    nonzero: int  # entries that are not 0
    total: int  # entries of the parameters that received a gradient

    def metrics(self) -> dict[str, float]:
        """Return the statistics in a dict whose keys are the metric names."""
        share = self.nonzero / self.total if self.total else 0.0
        return {
            "grad_norm": self.norm,
            "grad_zero_count": float(self.total - self.nonzero),
            "grad_nonzero_count": float(self.nonzero),
            "grad_total_count": float(self.total),
            "grad_zero_ratio": 1.0 - share if self.total else 0.0,
            "grad_nonzero_ratio": share,
        }


def make_adam(
    tensors: Sequence[nn.Parameter] | Sequence[dict[str, Any]], config: OptimizerOptions
) -> torch.optim.Optimizer:
    """Create the PyTorch optimizer that updates fp32 tensors or groups of fp32 tensors.

    The tensors are the model's weights or its master weights. For a sharded optimizer, the tensors are this rank's shards
    of these weights.
    """
    if config.sgd:
        return torch.optim.SGD(tensors, lr=config.lr, weight_decay=config.weight_decay)
    rates: dict[str, Any] = {name: getattr(config, name) for name in ("lr", "betas", "eps", "weight_decay")}
    if config.adam_8bit:
        return adam_8bit.Adam8bit(tensors, **rates)
    if config.adam_bf16:
        return adam_bf16.AdamBf16(tensors, **rates)
    return torch.optim.AdamW(tensors, fused=True, **rates)


def take_moments(adam: torch.optim.Optimizer) -> None:
    """Allocate the missing moments of an optimizer that :func:`make_adam` created. New moments are 0."""
    if isinstance(adam, torch.optim.SGD):
        return
    for parameter, quantised in ((p, group.get("quantised")) for group in adam.param_groups for p in group["params"]):
        if isinstance(adam, adam_8bit.LowPrecisionAdam):
            adam.moments_of(parameter, quantised)
        elif not adam.state[parameter]:
            # Writes zeros, because the memory of zeros_like is allocated only on first write.
            moments = {name: torch.empty_like(parameter).zero_() for name in MOMENTS}
            adam.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}


class Optimizer(ABC):
    """Base class of the engine's optimizers. It counts the steps, and schedules the learning rate."""

    _adam: torch.optim.Optimizer
    is_part = False  # whether this rank has only some of the model's parameters

    def __init__(self, config: OptimizerOptions) -> None:
        self.config = config
        self.steps = 0
        self._schedule = config.schedule()
        self._constant_rate: float | None = None
        self.loss_scale = replace(config.loss_scale) if config.loss_scale is not None else None

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self._schedule.at(self.steps + 1) if self._constant_rate is None else self._constant_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        """Replace the schedule with a constant learning rate."""
        self._constant_rate = value

    def allocate(self) -> None:
        """Allocate the moments now. Without this call, the first optimizer step allocates the moments."""
        take_moments(self._adam)

    @abstractmethod
    def zero_grad(self) -> None:
        """Discard accumulated gradients."""

    @abstractmethod
    def collect(self) -> GradientStats:
        """Reduce the step's gradient over the ranks, and return the gradient's statistics."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply the collected gradient by ``factor``."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Return the accumulated fp32 gradients."""

    @abstractmethod
    def step(self) -> float:
        """Update the weights with the collected gradient, and return the learning rate of the update."""

    @abstractmethod
    def state_bytes(self) -> int:
        """Return the total size in bytes of the optimizer state that the ranks of this pipeline stage save together.

        The state consists of the moments, and of the master weights of parameters that are not fp32.
        """

    @abstractmethod
    def held_bytes(self, moments: bool = True) -> int:
        """Return the total size in bytes of this rank's master weights.

        Master weights that are also the model's weights do not count. With ``moments``, the size of this rank's moments
        is added, even if the moments are not allocated yet.
        """

    @abstractmethod
    def step_bytes(self, device: torch.device) -> int:
        """Estimate the working memory of :meth:`collect` and :meth:`step` in bytes.

        Optimizer state and gradients are not included.
        """

    @abstractmethod
    def state_head(self) -> dict[str, Any]:
        """Return the JSON fields of the saved optimizer state, such as step counts and the format of the moments."""

    @abstractmethod
    def state_parts(self) -> Iterator[StatePart]:
        """Yield this rank's shards of the tensors that an exact resume needs in addition to the model's weights.

        If several ranks hold the same shard, only the first of these ranks yields the shard.
        """

    @abstractmethod
    def load_state(self, saved: SavedState) -> None:
        """Load a saved optimizer state. The run that saved the state may have had another parallel layout.

        Raises:
            ValueError: the state belongs to other parameters, to another compute dtype or to another optimizer type.
            KeyError: a tensor is missing in the saved state.
        """

    def _update(self) -> float:
        rate = self.learning_rate
        self.steps += 1
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        return rate

    def _counts(self, names: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, int]:
        states = zip(names, map(self._adam.state.get, tensors), strict=True)
        return {name: int(state["step"]) for name, state in states if state}

    def _head(self, names: Sequence[str], counts: Mapping[str, int], masters: bool) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "constant_rate": self._constant_rate,
            "names": list(names),
            "counts": dict(counts),
            "masters": masters,
            "moments": self.config.moments,
            "loss_scale": None if self.loss_scale is None else asdict(self.loss_scale),
            "sgd": self.config.sgd,
        }

    def _take_head(self, head: Mapping[str, Any], names: Sequence[str], masters: bool) -> None:
        """Load the fields that :meth:`_head` returned. Raise ValueError if the saved state does not fit this optimizer.

        The saved state must contain exactly the parameters ``names``. On a pipeline stage, the saved state may also contain
        the parameters of other stages.
        """
        current, saved = set(names), set(head["names"])
        alike = masters <= head["masters"] if self.is_part else masters == head["masters"]
        if not (current <= saved if self.is_part else current == saved) or not alike:
            raise ValueError(
                "the saved optimizer state belongs to a run with a different model or --dtype; use the model and --dtype of "
                "the saved run"
            )
        if head["moments"] != self.config.moments:
            raise ValueError(
                f"the saved optimizer state stores moments as {head['moments']}, but this run stores them as "
                f"{self.config.moments}; use the same --adam-8bit setting as the saved run or, in an experiment configuration, "
                "the same optimizer.type and optimizer_dtype"
            )
        if head["sgd"] != self.config.sgd:
            raise ValueError(
                "the saved optimizer state belongs to a run with a different optimizer.type; set optimizer.type as in the "
                "saved run"
            )
        self.steps, self._constant_rate = int(head["steps"]), head["constant_rate"]
        if self.loss_scale is not None and head["loss_scale"]:
            self.loss_scale = LossScale(**head["loss_scale"])


class MasterAdamW(Optimizer):
    """AdamW (Loshchilov & Hutter 2019) over fp32 master weights. Weight decay applies to all parameters."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], config: OptimizerOptions) -> None:
        super().__init__(config)
        self._names = [name for name, _ in parameters]
        self._parameters = [p for _, p in parameters]
        self._masters = [self._master_of(p) for p in self._parameters]
        self._adam = make_adam(self._masters, config)

    def _master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the master of a parameter: the parameter itself, or an fp32 copy.

        A hook adds the gradient of each backward pass to the gradient of the copy.
        """
        place = torch.device("cpu") if self.config.offload else parameter.device
        if parameter.dtype == torch.float32 and place == parameter.device:
            return parameter
        master = nn.Parameter(parameter.detach().to(place, torch.float32))

        def accumulate(source: Tensor) -> None:
            assert source.grad is not None
            gradient = source.grad.to(place, torch.float32)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            source.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)
        return master

    def zero_grad(self) -> None:
        """Discard accumulated gradients."""
        self._adam.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """Return the accumulated fp32 gradients. Parameters without a gradient are skipped."""
        return [master.grad for master in self._masters if master.grad is not None]

    @torch.no_grad()
    def collect(self) -> GradientStats:
        """Return the statistics of the accumulated gradient."""
        gradients = self.gradients()
        norm, *nonzero = read_all([gradient_norm(gradients), *map(torch.count_nonzero, gradients)])
        return GradientStats(norm, round(sum(nonzero)), sum(g.numel() for g in gradients))

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the accumulated gradient by ``factor``."""
        if gradients := self.gradients():
            torch._foreach_mul_(gradients, factor)

    def held_bytes(self, moments: bool = True) -> int:
        """See :meth:`Optimizer.held_bytes`."""
        masters = sum(4 * m.numel() for p, m in zip(self._parameters, self._masters, strict=True) if p is not m)
        if not moments:
            return masters
        return masters + sum(self.config.moment_bytes(master.numel()) for master in self._masters)

    def step_bytes(self, device: torch.device) -> int:
        """See :meth:`Optimizer.step_bytes`."""
        return self.config.working_bytes(device)

    def state_bytes(self) -> int:
        """See :meth:`Optimizer.state_bytes`."""
        masters = sum(4 * p.numel() for p in self._parameters if is_rounded(p))
        return masters + sum(self.config.moment_bytes(master.numel()) for master in self._masters)

    @torch.no_grad()
    def step(self) -> float:
        """See :meth:`Optimizer.step`."""
        rate = self._update()
        apart = [(p, m) for p, m in zip(self._parameters, self._masters, strict=True) if p is not m]
        if apart:
            torch._foreach_copy_([p for p, _ in apart], [master for _, master in apart])
        return rate

    def state_head(self) -> dict[str, Any]:
        """See :meth:`Optimizer.state_head`."""
        return self._head(self._names, self._counts(self._names, self._masters), any(map(is_rounded, self._parameters)))

    def state_parts(self) -> Iterator[StatePart]:
        """Yield the unsharded moments, and the unsharded master weights of parameters that are not fp32."""
        for name, parameter, master in zip(self._names, self._parameters, self._masters, strict=True):
            for kind, values in self._adam.state.get(master, {}).items():
                if kind != "step":
                    yield StatePart(moment_key(name, kind), values, full_index(values.shape))
            if is_rounded(parameter):
                yield StatePart(master_key(name), master.detach(), full_index(master.shape))

    def load_state(self, saved: SavedState) -> None:
        """See :meth:`Optimizer.load_state`."""
        self._take_head(saved.head, self._names, any(map(is_rounded, self._parameters)))
        self._adam.state.clear()
        for name, parameter, master in zip(self._names, self._parameters, self._masters, strict=True):
            index = full_index(master.shape)
            if name in saved.head["counts"]:
                self._adam.state[master] = saved_moments(saved, name, master, index, self.config, master.device)
            master.data.copy_(saved_master(saved, name, parameter.detach(), index))


def is_rounded(parameter: Tensor) -> bool:
    """Return whether a parameter is a rounded copy of its master weights. If so, a saved state includes the master weights."""
    return parameter.dtype != torch.float32


def moment_key(name: str, kind: str) -> str:
    """Return the key of a parameter's moment in a saved state."""
    return f"state.{name}.{kind}"


def master_key(name: str) -> str:
    """Return the key of a parameter's master weights in a saved state."""
    return f"master.{name}"


def saved_master(saved: SavedState, name: str, weights: Tensor, index: Index) -> Tensor:
    """Load the master weights of a parameter's shard. ``weights`` are the model's weights for the same shard.

    If no master weights were saved and ``weights`` is fp32, return ``weights``.
    """
    key = master_key(name)
    return saved.read(key, index) if key in saved or is_rounded(weights) else weights


def saved_moments(
    saved: SavedState, name: str, parameter: Tensor, index: Index, config: OptimizerOptions, device: torch.device
) -> dict[str, Any]:
    """Load the optimizer state of a parameter's shard onto ``device``. ``index`` selects the shard."""
    count = saved.head["counts"][name]
    if not config.adam_8bit:
        moments = {kind: saved.read(moment_key(name, kind), index).to(device) for kind in MOMENTS}
        return {"step": torch.tensor(float(count), device=device), **moments}
    mean, second = (moment.to(device) for moment in low_moments(saved, name, parameter, index))
    return adam_8bit.state_of(count, mean, second, adam_8bit.is_quantised(parameter.numel()))


def low_moments(saved: SavedState, name: str, parameter: Tensor, index: Index) -> tuple[Tensor, Tensor]:
    """Load both moments of a parameter's shard as fp32 numbers. ``index`` selects the shard.

    With 8-bit moments, the second tensor is the square root of the second moment, as in :func:`adam_8bit.moments_in`.

    The saved state has the moments either as fp32 numbers or as 8-bit codes, which this function decodes. Codes are saved
    only if the boundaries of the quantization blocks do not depend on the sharding.
    """
    kinds = adam_8bit.moment_kinds(adam_8bit.is_quantised(parameter.numel()))
    if moment_key(name, kinds[0]) in saved:
        mean, second = (saved.read(moment_key(name, kind), index) for kind in kinds)
        return mean, second
    codes = {f"{kind}_{what}": saved.read_full(moment_key(name, f"{kind}_{what}")) for kind in kinds for what in _CODED}
    moments = [moment.view(parameter.shape) for moment in adam_8bit.moments_in(codes, parameter.numel())]
    for dim, axis in enumerate(index):
        moments = [moment.index_select(dim, axis) for moment in moments]
    return moments[0], moments[1]


_CODED = ("codes", "scales")


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the global L2 norm of ``gradients`` as a 0-d fp32 tensor; 0 if there are no gradients."""
    if not gradients:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor that clips a gradient of norm ``norm`` to ``max_norm``; 1 if ``max_norm`` is None."""
    return 1.0 if max_norm is None else min(max_norm / (norm + 1e-6), 1.0)
