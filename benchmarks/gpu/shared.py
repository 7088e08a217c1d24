"""What the parts of ``gpu.sh`` share: arguments, the model, the device's measured limits, the JSON file.

Each part is a program of its own, so that one that fails or hangs costs itself. ``--device cpu --tiny`` runs the same code
over small shapes, to prove everything but the GPU.
"""

# ruff: noqa: I001  (areno is imported before torch)

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import areno  # noqa: E402, F401  (before torch, as the command line does)
import torch  # noqa: E402

Report = dict[str, Any]


class Checks:
    """Named figures that must stay below a bound; all are tried, and the part fails at its end."""

    def __init__(self) -> None:
        self.results: list[Report] = []

    def below(self, name: str, value: float, bound: float) -> None:
        good = bool(value <= bound)
        self.results.append({"check": name, "value": value, "bound": bound, "ok": good})
        print(f"{'ok  ' if good else 'FAIL'} {name}: {value:.3g} (at most {bound:.3g})", flush=True)

    @property
    def failed(self) -> list[str]:
        return [result["check"] for result in self.results if not result["ok"]]


def run_part(name: str, part: Callable[[argparse.Namespace, Checks, Report], None]) -> None:
    """Run a part and write its file, also when it fails half-way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    checks, began = Checks(), time.perf_counter()
    report: Report = {"part": name, "tiny": args.tiny, "machine": machine(args.device)}
    try:
        part(args, checks, report)
    except Exception:
        report["error"] = traceback.format_exc()[-4000:]
        traceback.print_exc()
    report |= {"checks": checks.results, "seconds": round(time.perf_counter() - began, 1)}
    report["ok"] = "error" not in report and not checks.failed
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(0 if report["ok"] else 1)


def machine(device: str) -> Report:
    """Software, and the device with its measured limits."""
    import transformers

    facts: Report = {"torch": torch.__version__, "transformers": transformers.__version__, "device": device}
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "processors": properties.multi_processor_count,
            "memory": properties.total_memory,
        }
        facts |= {"copy_tb_s": copy_rate(), "matmul_tflop_s": matmul_rate()}
    return facts


def copy_rate() -> float:
    """TB/s of a large copy on the GPU, bytes read and written counted."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    return round(2 * source.numel() / seconds(lambda: target.copy_(source)) / 1e12, 3)


def matmul_rate() -> float:
    """TFLOP/s of a large bf16 matrix product on random numbers."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return round(2 * 8192**3 / seconds(lambda: a @ b) / 1e12, 1)


def seconds(work: Callable[[], Any], repeats: int = 10) -> float:
    """Mean time of a call on the device, after three that do not count."""
    for _ in range(3):
        work()
    if not torch.cuda.is_available():
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - began) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def model_config(tiny: bool) -> Any:
    """The shape of Qwen3-0.6B, or a small relative of it."""
    import transformers as tf

    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151_936}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 600}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return tf.Qwen3Config(
        **sizes, **heads, max_position_embeddings=40_960, tie_word_embeddings=True, rope_theta=1e6, eos_token_id=None
    )


def random_module(args: argparse.Namespace, dtype: torch.dtype, sharpen: float = 1.0) -> torch.nn.Module:
    """The model with random weights, made on the device; ``sharpen`` makes its distribution less flat."""
    import transformers as tf

    torch.manual_seed(0)
    with torch.device(args.device):
        module = tf.AutoModelForCausalLM.from_config(
            model_config(args.tiny), dtype=dtype, attn_implementation="eager"
        ).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(sharpen)
    return module.to(args.device)
