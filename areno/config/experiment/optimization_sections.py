"""Configuration sections for the optimizer, microbatches and normalization."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from areno.config.experiment.setting_declaration import Problems, ineffective, setting


@dataclass
class OptimizerConfig:
    """Optimizer, learning-rate schedule and gradient clipping."""

    type: str = setting(
        "adam",
        "AdamW (adam), AdamW with 8-bit moments (adam_8bit), AdamW with bf16 moments (adam_bf16) or SGD "
        "without moments (sgd).",
        choices=("adam", "sgd", "adam_8bit", "adam_bf16"),
    )
    lr: float = setting(0.001, "Peak learning rate.", above=0)
    weight_decay: float = setting(0.01, "Decoupled weight decay.", minimum=0)
    beta1: float = setting(0.9, "Decay rate of the first moment (not for type sgd).", minimum=0, below=1)
    beta2: float = setting(0.999, "Decay rate of the second moment (not for type sgd).", minimum=0, below=1)
    eps: float = setting(1e-08, "Constant added to the square root of the second moment (not for type sgd).", above=0)
    min_lr_ratio: float = setting(
        0.0, "Final learning rate of a linear or cosine schedule, as a fraction of lr.", minimum=0, maximum=1
    )
    lr_scheduler_type: str = setting(
        "constant", "Shape of the learning-rate schedule after the warmup.", choices=("linear", "cosine", "constant")
    )
    warmup_steps_proportion: float = setting(
        0.001, "Length of the linear warmup from 0 to lr, as a fraction of all steps.", minimum=0, maximum=1
    )
    initial_loss_scale: float = setting(float(2**32), "Initial loss scale (dtype float16 only).", above=0)
    min_loss_scale: float = setting(1.0, "Minimum loss scale (dtype float16 only).", above=0)
    loss_scale_window: float = setting(
        5.0,
        "Number of consecutive steps without overflow after which the loss scale doubles (dtype float16 only).",
        above=0,
    )
    hysteresis: int = setting(
        2,
        "Number of overflows after which the loss scale is first halved (dtype float16 only). Each later "
        "overflow halves the scale again. The count restarts when the scale doubles.",
        minimum=1,
    )
    gradient_clipping: float = setting(1.0, "Maximum global norm of the gradients.", above=0)
    offload: bool = setting(
        False,
        "For training on a GPU: keep optimizer states and accumulated gradients in host memory, and update the weights "
        "on the CPU.",
    )

    def problems(self) -> Problems:
        """Yield the problems with settings of this section."""
        if self.type == "sgd":
            yield from ineffective(self, ("beta1", "beta2", "eps"), "with type sgd; use type adam")
        if self.lr_scheduler_type == "constant":
            yield from ineffective(self, ("min_lr_ratio",), "with lr_scheduler_type constant; use linear or cosine")


@dataclass
class MicroBatchSpec:
    """How the rows of an optimizer step are split into microbatches. The split changes results only by rounding errors."""

    n_mbs: int | None = setting(
        1,
        "Number of microbatches per data-parallel rank. With max_tokens_per_mb, this value is the minimum number.",
        minimum=1,
    )
    granularity: int = setting(
        1,
        "Number of adjacent rows that stay together in one microbatch, such as 2 for pairs. The number of rows need not be a "
        "multiple of this value.",
        minimum=1,
    )
    max_tokens_per_mb: int | None = setting(
        None,
        "Maximum number of tokens in a microbatch. Choose a value that fits into memory. A longer row gets "
        "its own microbatch.",
        minimum=1,
    )
    n_mbs_divisor: int = setting(1, "Make the number of microbatches a multiple of this value.", minimum=1)
    packing_algorithm: str = setting(
        "ffd",
        "How to pack rows: into few microbatches (ffd: first-fit decreasing), or into microbatches of similar size "
        "(kk: Karmarkar-Karp).",
        choices=("ffd", "kk"),
    )

    def new(self, **changes: Any) -> MicroBatchSpec:
        """Return a copy in which the given settings are changed."""
        return replace(self, **changes)

    def problems(self) -> Problems:
        """Yield the problems with settings of this section."""
        if self.n_mbs is None and self.max_tokens_per_mb is None:
            yield (
                "n_mbs",
                "is null, and max_tokens_per_mb is null too, so the number of microbatches is undefined; set one of the two",
            )


@dataclass
class NormConfig:
    """Normalization of rewards or advantages: (x - mean) / (std + eps)."""

    mean_level: str | None = setting(
        "batch", "Scope of the mean. If null, no mean is subtracted.", choices=("batch", "group")
    )
    mean_leave1out: bool = setting(False, "Subtract from each value the mean of the other values (leave-one-out).")
    std_level: str | None = setting(
        "batch",
        "Scope of the standard deviation. If null, there is no division by a standard deviation.",
        choices=("batch", "group"),
    )
    std_unbiased: bool = setting(True, "Divide by n - 1 instead of n in the variance.")
    eps: float = setting(1e-05, "Constant added to the standard deviation.", minimum=0)
    group_size: int = setting(
        1,
        "Number of answers per prompt. If mean_level or std_level is group, this number must equal gconfig.n_samples.",
        minimum=1,
        inherits="gconfig.n_samples",
        shown="gconfig.n_samples",
    )

    def problems(self) -> Problems:
        """Yield the problems with settings of this section."""
        if self.mean_level is None:
            yield from ineffective(self, ("mean_leave1out",), "without a mean; set mean_level too")
        if self.std_level is None:
            yield from ineffective(self, ("std_unbiased", "eps"), "without a standard deviation; set std_level too")
        if self.mean_level is None and self.std_level is None:
            yield (
                "mean_level",
                "is null, and std_level is null too, so nothing is normalized; set the whole section to null instead",
            )
