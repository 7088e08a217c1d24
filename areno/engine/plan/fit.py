"""List up to eight parallel layouts in which a model fits into the memory of the devices, sorted by estimated speed."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from areno.engine.limits import read_config
from areno.engine.parallel.layout import Layout
from areno.engine.plan.layout_estimates import (
    Machines,
    ModelSizes,
    Training,
    idle_share,
    layouts_of,
    rank_bytes,
    seconds,
    sent_bytes,
)
from areno.engine.plan.layout_trial import LayoutTrial, Measured, measure_layout
from areno.engine.train.optimizer import OptimizerOptions
from areno.errors import ArenoError, UsageError

_GIB = 2**30
_SHOWN = 8
_MOMENTS = {"adam": 8, "adam_bf16": 4, "adam_8bit": 2, "sgd": 0}
_NUMBERS: dict[str, tuple[Any, float, str]] = {
    "--device-memory": (float, 80, "memory of each device in GiB"),
    "--per-node": (
        int,
        8,
        "devices per node; also the maximum tensor-parallel size and the maximum context-parallel size",
    ),
    "--tokens": (int, 16384, "number of tokens per microbatch"),
    "--microbatches": (int, 64, "number of microbatches per optimizer step, over all replicas"),
    "--tflops": (float, 400, "computing speed that each device achieves, in TFLOP/s"),
    "--node-bandwidth": (float, 200, "bandwidth between devices of a node, in GB/s per device"),
    "--network-bandwidth": (float, 20, "bandwidth between nodes, in GB/s per device"),
}
"""Type, default and help text of each option that takes a number."""
_USABLE = 0.9  # usable share of a device's memory; the rest is for libraries and the allocator's cache


@dataclass(frozen=True, slots=True)
class Fit:
    """Estimates for training with one layout."""

    layout: Layout
    held: int  # bytes, on the device that needs the most memory
    sent: int  # bytes per step
    idle: float  # pipeline bubble, as a share of the step
    seconds: float  # estimated, per step
    measured: Measured | None = None

    @property
    def backend(self) -> str:
        """The value of the setting ``actor.backend`` for this layout."""
        layout = self.layout
        sizes = {
            "d": layout.dp_size,
            "p": layout.pp_size,
            "t": layout.tp_size,
            "c": layout.cp_size,
            "e": layout.ep_size,
        }
        letters = "".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1) or "d1"
        if not layout.fsdp and layout.world_size > 1:
            return f"megatron:{letters}"
        return f"{'archon' if layout.pp_size * layout.ep_size > 1 else 'fsdp'}:{letters}"


def fits_of(model: ModelSizes, devices: int, memory: int, per_step: Training, machines: Machines) -> Iterator[Fit]:
    """Yield layouts in which each device needs at most ``memory`` bytes.

    ``per_step.microbatches`` is the number of microbatches that all replicas together process per optimizer step.
    """
    for layout in layouts_of(devices, model, machines.per_node):
        passes = -(-per_step.microbatches // layout.dp_size)
        training = Training(per_step.tokens, passes, per_step.compute, per_step.moments)
        held = rank_bytes(model, layout, training).total
        if held <= memory:
            sent = sum(sent_bytes(model, layout, training).values())
            yield Fit(layout, held, sent, idle_share(layout, passes), seconds(model, layout, training, machines))


def run(argv: Sequence[str]) -> int:
    """Run ``areno plan --fit``. Return the exit status, which is 1 if no layout fits, and 0 otherwise."""
    parser = argparse.ArgumentParser(prog="areno plan --fit", description=__doc__)
    parser.add_argument(
        "--fit", action="store_true", help="list layouts that fit into memory, instead of planning a run"
    )
    parser.add_argument(
        "--ckpt", required=True, help="model folder or hub id; without --try, only the configuration is read"
    )
    parser.add_argument("--devices", type=int, required=True, help="number of devices")
    for flag, (kind, default, text) in _NUMBERS.items():
        parser.add_argument(flag, type=kind, default=default, help=f"{text} (default {default})")
    parser.add_argument(
        "--optimizer",
        choices=list(_MOMENTS),
        default="adam",
        help="optimizer, as in the setting optimizer.type (default adam)",
    )
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="dtype of forward and backward passes (default bfloat16)",
    )
    parser.add_argument(
        "--try",
        dest="tried",
        type=int,
        default=0,
        metavar="N",
        help="measure the N fastest layouts (at most 8) on this machine",
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    options = parser.parse_args(argv)
    if options.tried < 0:
        raise UsageError(
            f"--try {options.tried}: the number of layouts must not be negative; use a number from 1 to 8, or omit --try"
        )
    for flag in ("--devices", *_NUMBERS):
        number = getattr(options, flag.removeprefix("--").replace("-", "_"))
        if not 0 < number < math.inf:
            raise UsageError(f"{flag} {number}: the value must be a finite number above 0")
    config = read_config(options.ckpt, option="--ckpt")
    try:
        model = ModelSizes.of(config)
    except Exception as error:  # from the model's code, or for a size that differs between its layers
        raise UsageError(
            f"--ckpt {options.ckpt}: memory and speed of this architecture cannot be estimated: {error}"
        ) from error
    compute = 2 if options.dtype == "bfloat16" else 4
    step = Training(options.tokens, options.microbatches, compute, _MOMENTS[options.optimizer])
    memory = int(options.device_memory * _GIB * _USABLE)
    node, network = 1e9 * options.node_bandwidth, 1e9 * options.network_bandwidth
    machines = Machines(1e12 * options.tflops, node, network, options.per_node)
    fits = fits_of(model, options.devices, memory, step, machines)
    best = sorted(fits, key=lambda fit: fit.seconds)[:_SHOWN]
    if options.tried:
        best = _measured(best[: options.tried], options)
    print(json.dumps([_data(fit) for fit in best]) if options.json else _table(model, best, options))  # noqa: T201
    return int(not best)


def _measured(fits: Sequence[Fit], options: argparse.Namespace) -> list[Fit]:
    """Train a few steps in each layout, and sort the layouts by measured time. Layouts whose training failed come last.

    If the training failed in all layouts, the first error is raised.
    """
    gpus = torch.cuda.device_count()
    if gpus and options.devices > gpus:
        raise UsageError(
            f"--try with --devices {options.devices}: this machine has only {gpus} GPU{'s' * (gpus > 1)}; lower "
            "--devices, or omit --try"
        )
    if not gpus and options.dtype != "float32":
        raise UsageError(
            f"--try with --dtype {options.dtype}: on a CPU, only float32 can be measured; use --dtype float32"
        )
    adam = OptimizerOptions(
        lr=1e-5,
        sgd=options.optimizer == "sgd",
        **{kind: options.optimizer == kind for kind in ("adam_8bit", "adam_bf16")},
    )
    trial = LayoutTrial(
        path=options.ckpt,
        tokens=options.tokens,
        microbatches=options.microbatches,
        device=torch.device("cuda" if gpus else "cpu"),
        dtype=getattr(torch, options.dtype),
        optimizer=adam,
    )
    tried, errors = [], []
    for fit in fits:
        try:
            tried.append(replace(fit, measured=measure_layout(fit.layout, trial)))
        except (ArenoError, MemoryError, RuntimeError) as error:  # mostly a lack of memory
            sys.stderr.write(f"the trial of {fit.backend} failed: {error}\n")
            tried.append(fit)
            errors.append(error)
    if errors and len(errors) == len(tried):
        raise errors[0]
    return sorted(tried, key=lambda fit: fit.measured.seconds if fit.measured else math.inf)


def _data(fit: Fit) -> dict[str, Any]:
    names = {"bytes": fit.held, "sent": fit.sent, "idle": fit.idle, "seconds": fit.seconds}
    measured = (
        {} if fit.measured is None else {"measured": {"seconds": fit.measured.seconds, "bytes": fit.measured.held}}
    )
    return {"backend": fit.backend, **names, **measured}


def _table(model: ModelSizes, fits: Sequence[Fit], options: argparse.Namespace) -> str:
    title = f"{model.parameters / 1e9:.2f} B weights on {options.devices} devices of {options.device_memory:g} GiB"
    if not fits:
        return f"{title}: no layout fits; use more devices, a smaller --tokens, --optimizer adam_bf16, or --optimizer adam_8bit"
    lines = [f"{title}, fastest first", ""]
    measured = f" {'measured s':>11} {'GiB':>7}" if options.tried else ""
    lines.append(f"{'actor.backend':24} {'GiB held':>9} {'GiB sent':>9} {'waiting':>8} {'about s':>9}{measured}")
    for fit in fits:
        figures = f"{fit.held / _GIB:9.1f} {fit.sent / _GIB:9.1f} {fit.idle:8.0%} {fit.seconds:9.1f}"
        failed = f" {'failed':>11}" if options.tried else ""
        actual = f" {fit.measured.seconds:11.2f} {fit.measured.held / _GIB:7.2f}" if fit.measured else failed
        lines.append(f"{fit.backend:24} {figures}{actual}")
    lines += [
        "",
        'Column "GiB held": memory of the device that uses the most memory. "GiB sent": data that each device sends per step.',
        'Column "waiting": share of a step for which devices wait in the pipeline. "about s": estimated seconds per step.',
        'In layouts with the prefix "megatron", every replica has the full weights.',
    ]
    if options.tried:
        lines.append(
            "The last two columns were measured on this machine with random tokens: seconds per step, and peak memory in "
            "GiB of the rank that used the most memory. On a GPU, only the memory of PyTorch tensors is counted."
        )
    return "\n".join(lines)
