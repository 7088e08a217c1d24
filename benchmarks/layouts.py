"""Every way to divide a trainer: time of a step, bytes sent, and memory of a rank, compared with the estimates.

    python benchmarks/layouts.py                        # table, then one line of JSON
    python benchmarks/layouts.py --save NAME            # also benchmarks/results/NAME.json
    python benchmarks/layouts.py --only fsdp:d2 p2v2    # some layouts
    python benchmarks/layouts.py --device cuda          # without torchrun; as many GPUs as the largest layout has ranks

Each layout trains the same random model on the same rows, in its own processes. ``sent`` is what all ranks send over the
loopback interface in a step (not measured on GPUs), ``ideal`` the sum of
:func:`areno.engine.plan.layout_estimates.sent_bytes`. ``held`` is the peak memory of the
fullest rank beyond that of a rank with a tiny model, ``planned`` the estimate by
:func:`areno.engine.plan.layout_estimates.rank_bytes`. Times are relative to the step of one process with all cores.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import finish, machine, make_checkpoint
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from areno.engine.parallel.layout import Layout
from areno.engine.plan.layout_estimates import ModelSizes, Training, idle_share, rank_bytes, sent_bytes
from areno.engine.plan.layout_trial import LayoutTrial, measure_layout

DENSE = {
    "one": Layout(),
    "fsdp:d2": Layout(2, fsdp=True),
    "fsdp:d4": Layout(4, fsdp=True),
    "t2": Layout(1, 2),
    "fsdp:d2t2": Layout(2, 2, fsdp=True),
    "c2": Layout(cp_size=2),
    "fsdp:d2c2": Layout(2, cp_size=2),
    "p2": Layout(pp_size=2),
    "p2v2": Layout(pp_size=2, pp_chunks=2),
    "p4": Layout(pp_size=4),
    "fsdp:d2p2": Layout(2, fsdp=True, pp_size=2),
    "p2t2": Layout(1, 2, pp_size=2),
}
MIXTURE = {"moe d2e2": Layout(2, ep_size=2), "moe d2p2e2": Layout(2, ep_size=2, pp_size=2)}
TINY = {"hidden": 64, "layers": 8, "heads": 8, "kv_heads": 8, "vocab": 600}
SHAPE = {"hidden": 768, "layers": 8, "heads": 12, "kv_heads": 12, "intermediate": 2304, "vocab": 8000}


def make_mixture(folder: Path, dense: Path, **sizes: int) -> None:
    """A random mixture-of-experts model with the tokenizer of another checkpoint."""
    config = AutoConfig.from_pretrained(dense)
    own = Qwen3MoeConfig(
        **{name: getattr(config, name) for name in ("vocab_size", "num_hidden_layers", "eos_token_id", "pad_token_id")},
        bos_token_id=None,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        hidden_size=config.hidden_size,
        head_dim=config.head_dim,
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
        **sizes,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(own).save_pretrained(folder)
    for file in dense.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())


def loopback() -> int:
    """Bytes sent over the loopback interface so far."""
    file = Path("/sys/class/net/lo/statistics/tx_bytes")
    return int(file.read_text()) if file.is_file() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*DENSE, *MIXTURE], default=[*DENSE, *MIXTURE])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each layout, after the first")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step")
    parser.add_argument("--microbatches", type=int, default=4, help="of a step of one replica with all rows")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--save", default="", help="name of a file under benchmarks/results")
    args = parser.parse_args()
    device = torch.device(args.device)
    compute = 2 if device.type == "cuda" else 4
    result: dict[str, Any] = {"benchmark": "layouts", "machine": machine(), "settings": vars(args), "layouts": {}}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in ("model", "tiny", "moe", "moe-tiny")}
        make_checkpoint(paths["model"], **SHAPE)
        make_checkpoint(paths["tiny"], **TINY)
        make_mixture(paths["moe"], paths["model"], moe_intermediate_size=512)
        make_mixture(paths["moe-tiny"], paths["tiny"], moe_intermediate_size=16)
        for name in args.only:
            layout = (DENSE | MIXTURE)[name]
            path = paths["moe" if name in MIXTURE else "model"]
            sizes = ModelSizes.of(AutoConfig.from_pretrained(path))
            per_pass = args.rows // args.microbatches
            passes = max(args.microbatches // layout.dp_size, 1)
            training = Training(per_pass * args.length, passes, compute)
            trained = LayoutTrial(
                path=str(path),
                tokens=per_pass * args.length,
                microbatches=args.microbatches,
                device=device,
                dtype=torch.bfloat16 if compute == 2 else torch.float32,
                steps=args.steps,
                longest=args.length,
                meter=loopback,
            )
            found = measure_layout(layout, trained)
            empty = measure_layout(layout, replace(trained, path=str(paths["moe-tiny" if name in MIXTURE else "tiny"])))
            planned = rank_bytes(sizes, layout, training)
            ideal = layout.world_size * sum(sent_bytes(sizes, layout, training).values())
            entry = {
                "seconds": found.seconds,
                "sent": found.counted,
                "ideal": ideal,
                "held": found.held - empty.held,
                "planned": planned.total,
                "parts": {part: getattr(planned, part) for part in planned.__slots__},
                "idle": round(idle_share(layout, passes), 3),
            }
            result["layouts"][name] = entry
            one = result["layouts"].get("one", entry)["seconds"]
            print(
                f"{name:12} {entry['seconds']:7.2f} s {entry['seconds'] / one:5.2f} x   sent {entry['sent'] / 2**20:8.1f} MiB, "
                f"ideal {ideal / 2**20:8.1f}   held {entry['held'] / 2**20:7.1f} MiB, planned {planned.total / 2**20:7.1f} "
                f"({entry['held'] / planned.total:.2f})",
                flush=True,
            )
    finish(result, args.save)


if __name__ == "__main__":
    main()
