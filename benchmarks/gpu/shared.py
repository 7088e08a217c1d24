"""What the stages of ``gpu.sh`` share: arguments, models made on the spot, the device's measured limits, the JSON file.

Each stage is a program of its own, so that one that fails or hangs costs itself. Its file is written after every measurement
and every check, so that a stage which is killed keeps what it had. ``--device cpu --tiny`` runs the same code over small
shapes, to prove everything but the GPU.
"""

# ruff: noqa: I001  (areno is imported before torch)

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import areno  # noqa: E402, F401  (before torch, as the command line does)
import torch  # noqa: E402

GIB = 2**30


class Report(dict[str, Any]):
    """A dictionary that writes itself to a file whenever an entry of its own is set.

    Args:
        file: where to.
        facts: first entries.
    """

    def __init__(self, file: Path, **facts: Any) -> None:
        super().__init__(facts)
        self._file = file
        self.save()

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.save()

    def add(self, key: str, entry: Any) -> None:
        """Append to a list, and print what."""
        self.setdefault(key, []).append(entry)
        self.save()
        print(key, json.dumps(entry), flush=True)

    def save(self) -> None:
        """Replace the file; whoever is killed in between leaves the old one."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self, indent=1, default=str) + "\n")
        os.replace(part, self._file)


class Checks:
    """Named figures that must stay below a bound; all are tried, and the stage fails at its end.

    Args:
        report: takes each result at once.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self.results: list[dict[str, Any]] = []
        report["checks"] = self.results

    def below(self, name: str, value: float, bound: float) -> None:
        """Check that a figure is at most its bound."""
        good = bool(value <= bound)
        self.results.append({"check": name, "value": value, "bound": bound, "ok": good})
        self.report.save()
        print(f"{'ok  ' if good else 'FAIL'} {name}: {value:.3g} (at most {bound:.3g})", flush=True)

    def true(self, name: str, good: bool) -> None:
        """Check a statement."""
        self.below(f"{name} (0: true)", float(not good), 0)

    def replayed(self, name: str, loop: Any, since: tuple[int, int] = (0, 0)) -> None:
        """Check that all decode steps came from graphs; ``since`` are the counts of :func:`step_counts` before."""
        steps, replays = (now - before for now, before in zip(step_counts(loop), since, strict=True))
        self.report[f"{name}: decode steps"], self.report[f"{name}: replays"] = steps, replays
        if self.report["machine"]["device"].startswith("cuda"):
            self.below(f"{name}: decode steps that were not replayed, of {steps}", abs(steps - replays), 0)

    @property
    def failed(self) -> list[str]:
        """Names of what failed."""
        return [result["check"] for result in self.results if not result["ok"]]


def step_counts(loop: Any) -> tuple[int, int]:
    """Decode steps and replays of a rollout loop so far."""
    return loop.counters.decode_steps_total, loop.counters.replayed_steps_total


def run_stage(name: str, stage: Callable[[argparse.Namespace, Checks, Report], None]) -> None:
    """Run a stage; its file says how far it came."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm", help="of the stage server")
    args = parser.parse_args()
    began = time.perf_counter()
    report = Report(args.out / f"{name}.json", stage=name, tiny=args.tiny, ok=False, finished=False)
    report["machine"] = machine(args.device)
    checks = Checks(report)
    try:
        stage(args, checks, report)
    except Exception:
        report["error"] = traceback.format_exc()[-4000:]
        traceback.print_exc()
    report.update(seconds=round(time.perf_counter() - began, 1), finished=True)
    report["ok"] = "error" not in report and not checks.failed
    sys.exit(0 if report["ok"] else 1)


def attempt(report: Report, checks: Checks, name: str, work: Callable[[], None]) -> None:
    """Run a piece of a stage; if it fails, the others still run."""
    try:
        work()
    except Exception:
        report.add("errors", {"piece": name, "trace": traceback.format_exc()[-2000:]})
        checks.true(f"{name} ran", False)


def machine(device: str) -> dict[str, Any]:
    """Software, and the device with its measured limits."""
    import transformers

    facts: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, "device": device}
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "processors": properties.multi_processor_count,
            "memory": properties.total_memory,
        }
        facts |= {"copy_tb_s": copy_rate(), "matmul_tflop_s": matmul_rate()}
        torch.cuda.empty_cache()
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


def seconds(work: Callable[[], Any], repeats: int = 10, warm: int = 3) -> float:
    """Mean time of a call on the device, after some that do not count."""
    for _ in range(warm):
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


def graph_seconds(work: Callable[[], Any], calls: int = 20) -> float:
    """Mean time of a call inside a CUDA graph, where launching costs nothing."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(calls):
            work()
    return seconds(graph.replay) / calls


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak_gib(device: str) -> float | None:
    """Most memory that tensors took since the last call, on a GPU."""
    if not device.startswith("cuda"):
        return None
    peak = torch.cuda.max_memory_allocated() / GIB
    torch.cuda.reset_peak_memory_stats()
    return round(peak, 2)


SHAPES = {
    "0.6B": (1024, 3072, 28, 16, 8),
    "4B": (2560, 9728, 36, 32, 8),
    "tiny": (64, 128, 3, 4, 2),
}


def model_config(shape: str) -> Any:
    """The shape of Qwen3-0.6B or Qwen3-4B, or a small relative of them."""
    import transformers as tf

    hidden, inner, layers, heads, key_heads = SHAPES[shape]
    return tf.Qwen3Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=16 if shape == "tiny" else 128,
        vocab_size=600 if shape == "tiny" else 151_936,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        rope_theta=1e6,
        eos_token_id=None,
    )


def random_module(args: argparse.Namespace, dtype: torch.dtype, config: Any = None) -> torch.nn.Module:
    """A model with random weights, made on the device; by default in the shape of Qwen3-0.6B."""
    import transformers as tf

    torch.manual_seed(0)
    with torch.device(args.device):
        module = tf.AutoModelForCausalLM.from_config(
            config or model_config("tiny" if args.tiny else "0.6B"), dtype=dtype, attn_implementation="eager"
        ).eval()
    return module.to(args.device)


def half(device: str) -> torch.dtype:
    """bf16 on a GPU; a CPU computes in fp32."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


def random_engine(args: argparse.Namespace, shape: str, **options: Any) -> Any:
    """An engine over random weights in a shape; what it loads is a folder with a configuration and a tokenizer alone."""
    from areno.engine.engine_config import EngineConfig
    from areno.engine.engine import Engine

    folder = args.out / f"model-{shape}"
    model_config(shape).save_pretrained(folder)
    save_tokenizer(folder)
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device(args.device)
    path = str(folder)
    return Engine(path, EngineConfig(device=device, dtype=half(args.device), random_path=path, **options))


def save_tokenizer(folder: Path) -> None:
    """Words are numbers: enough for an engine that is given token ids."""
    import transformers as tf
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<eos>": 0} | {str(i): i for i in range(1, 500)}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tf.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(folder)


def random_rows(lengths: Iterable[int], vocab: int) -> list[Any]:
    """Rows of random tokens to train on, a quarter of each a prompt."""
    from areno.types import TrainSequence

    generator = torch.Generator().manual_seed(0)
    made = []
    for index, length in enumerate(lengths):
        prompt = length // 4
        made.append(
            TrainSequence(
                prompt_mask=[True] * prompt + [False] * (length - prompt),
                tokens=torch.randint(1, vocab, (length,), generator=generator).tolist(),
                logprobs=[0.0] * prompt + [-6.0] * (length - prompt),
                advantages=[0.0] * prompt + [1.0 - 2.0 * (index % 2)] * (length - prompt),
            )
        )
    return made


def rollout_loop(model: Any, **options: Any) -> Any:
    """A loop over pages that ends no answer by itself."""
    from areno.engine.rollout.paged.loop import PagedRolloutLoop

    settings = {"eos_ids": frozenset(), "tokenizer": None, "budget_tokens": 65_536, "max_running": 32, **options}
    return PagedRolloutLoop(model, **settings)


def answers(submit: Callable[[list[Any]], list[Any]], asked: list[Any]) -> list[Any]:
    """Results of requests."""
    return [future.result(timeout=300) for future in submit(asked)]
