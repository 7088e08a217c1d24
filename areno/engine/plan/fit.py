"""``areno plan --fit``: which layouts of a number of devices hold a model, the fastest first, as far as sums can say."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig

from areno.config.paths import base_of
from areno.engine.parallel.layout import Layout
from areno.engine.plan.layout_trial import LayoutTrial, Measured, measure_layout
from areno.engine.plan.layouts import (
    Machines,
    ModelSizes,
    Training,
    idle_share,
    layouts_of,
    rank_bytes,
    seconds,
    sent_bytes,
)
from areno.engine.train.optimizer import OptimizerConfig
from areno.errors import UsageError

_GIB = 2**30
_SHOWN = 8
_MOMENTS = {"adam": 8, "adam_bf16": 4, "adam_8bit": 2, "sgd": 0}
_RATES = {"tflops": 1e12, "node_bandwidth": 1e9, "network_bandwidth": 1e9}
_USABLE = 0.9  # of a device; the rest is for the libraries, and for what is freed and kept


@dataclass(frozen=True, slots=True)
class Fit:
    """A layout, and what it asks of its fullest device."""

    layout: Layout
    held: int  # bytes
    sent: int  # bytes in a step
    idle: float  # share of a step in which a stage waits
    seconds: float  # of a step, roughly
    measured: Measured | None = None

    @property
    def backend(self) -> str:
        """As ``actor.backend`` takes it."""
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
    """Layouts whose fullest device holds at most ``memory`` bytes; the microbatches are those of all replicas together."""
    for layout in layouts_of(devices, model, machines.per_node):
        passes = -(-per_step.microbatches // layout.dp_size)
        training = Training(per_step.tokens, passes, per_step.compute, per_step.moments)
        held = rank_bytes(model, layout, training).total
        if held <= memory:
            sent = sum(sent_bytes(model, layout, training).values())
            yield Fit(layout, held, sent, idle_share(layout, passes), seconds(model, layout, training, machines))


def run(argv: Sequence[str]) -> int:
    """Run the command; returns 1 where nothing fits."""
    parser = argparse.ArgumentParser(prog="areno plan --fit", description=__doc__)
    parser.add_argument("--fit", action="store_true", help="propose layouts instead of planning one run")
    parser.add_argument("--ckpt", required=True, help="model folder or hub id; its configuration is read")
    parser.add_argument("--devices", type=int, required=True, help="number of devices")
    parser.add_argument("--device-memory", type=float, default=80, help="GiB of a device (default 80)")
    parser.add_argument(
        "--per-node", type=int, default=8, help="devices of a node, within which layers are cut (default 8)"
    )
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a microbatch (default 16384)")
    parser.add_argument(
        "--microbatches", type=int, default=64, help="microbatches of a step, of all replicas (default 64)"
    )
    parser.add_argument(
        "--tflops", type=float, default=400, help="10^12 operations a second that a device reaches (default 400)"
    )
    parser.add_argument(
        "--node-bandwidth", type=float, default=200, help="GB/s of a device within its node (default 200)"
    )
    parser.add_argument(
        "--network-bandwidth", type=float, default=20, help="GB/s of a device to other nodes (default 20)"
    )
    parser.add_argument("--optimizer", choices=list(_MOMENTS), default="adam", help="optimizer.type (default adam)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="what passes compute in")
    parser.add_argument(
        "--try", dest="tried", type=int, default=0, metavar="N", help="train in the N fastest on this machine's devices"
    )
    parser.add_argument("--json", action="store_true", help="print the table as data")
    options = parser.parse_args(argv)
    if options.tried < 0:
        raise UsageError(f"--try {options.tried}: give the number of layouts to try")
    for name in (*("devices", "device_memory", "per_node", "tokens", "microbatches"), *_RATES):
        if getattr(options, name) <= 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(options, name)}: use at least 1")
    try:
        model = ModelSizes.of(AutoConfig.from_pretrained(base_of(options.ckpt)))
    except (OSError, ValueError) as error:
        raise UsageError(f"--ckpt {options.ckpt}: its configuration cannot be read: {error}") from error
    compute = 2 if options.dtype == "bfloat16" else 4
    step = Training(options.tokens, options.microbatches, compute, _MOMENTS[options.optimizer])
    memory = int(options.device_memory * _GIB * _USABLE)
    operations, node, network = (rate * getattr(options, name) for name, rate in _RATES.items())
    machines = Machines(operations, node, network, options.per_node)
    fits = fits_of(model, options.devices, memory, step, machines)
    found = sorted(fits, key=lambda fit: fit.seconds)[:_SHOWN]
    if options.tried:
        found = _measured(found[: options.tried], options)
    print(json.dumps([_data(fit) for fit in found]) if options.json else _table(model, found, options))  # noqa: T201
    return int(not found)


def _measured(found: Sequence[Fit], options: argparse.Namespace) -> list[Fit]:
    """Train a few steps in each layout; the fastest first."""
    gpus = torch.cuda.device_count()
    if gpus and options.devices > gpus:
        raise UsageError(f"--try with --devices {options.devices}: this machine has {gpus} GPUs; leave --try out")
    if not gpus and options.dtype != "float32":
        raise UsageError(f"--try on a CPU with --dtype {options.dtype}: use --dtype float32")
    adam = OptimizerConfig(
        lr=1e-5,
        sgd=options.optimizer == "sgd",
        **{kind: options.optimizer == kind for kind in ("adam_8bit", "adam_bf16")},
    )
    wanted = LayoutTrial(
        path=options.ckpt,
        tokens=options.tokens,
        microbatches=options.microbatches,
        device=torch.device("cuda" if gpus else "cpu"),
        dtype=getattr(torch, options.dtype),
        optimizer=adam,
    )
    tried = [replace(fit, measured=measure_layout(fit.layout, wanted)) for fit in found]
    return sorted(tried, key=lambda fit: fit.measured.seconds if fit.measured else 0.0)


def _data(fit: Fit) -> dict[str, Any]:
    names = {"bytes": fit.held, "sent": fit.sent, "idle": fit.idle, "seconds": fit.seconds}
    tried = {} if fit.measured is None else {"measured": {"seconds": fit.measured.seconds, "bytes": fit.measured.held}}
    return {"backend": fit.backend, **names, **tried}


def _table(model: ModelSizes, found: Sequence[Fit], options: argparse.Namespace) -> str:
    whole = f"{model.parameters / 1e9:.2f} B weights on {options.devices} devices of {options.device_memory:g} GiB"
    if not found:
        return (
            f"{whole}: no layout holds them; use more devices, --optimizer adam_bf16 or adam_8bit, or smaller --tokens"
        )
    lines = [f"{whole}; the fastest first", ""]
    measured = f" {'measured s':>11} {'GiB':>7}" if options.tried else ""
    lines.append(f"{'actor.backend':24} {'GiB held':>9} {'GiB sent':>9} {'waiting':>8} {'about s':>9}{measured}")
    for fit in found:
        figures = f"{fit.held / _GIB:9.1f} {fit.sent / _GIB:9.1f} {fit.idle:8.0%} {fit.seconds:9.1f}"
        tried = f" {fit.measured.seconds:11.2f} {fit.measured.held / _GIB:7.2f}" if fit.measured else ""
        lines.append(f"{fit.backend:24} {figures}{tried}")
    lines += [
        "",
        "Held by the fullest device; sent by each, and seconds, in an optimizer step. megatron: keeps replicas whole.",
    ]
    if options.tried:
        lines.append("Measured on this machine, with random tokens; the memory is that of a whole process.")
    return "\n".join(lines)
