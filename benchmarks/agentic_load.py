"""What an agentic rollout costs besides generation: many concurrent conversations through a rollout session's server.

    python benchmarks/agentic_load.py                            # 256 conversations of 8 turns, tiny model
    python benchmarks/agentic_load.py --model small --tokens 128 # 42 M parameters
    python benchmarks/agentic_load.py --save NAME

The agent program is a separate process with the official asynchronous client; its cost is reported separately. The server's
cost is the CPU time of its two threads (HTTP and templates; the engine has a third), per request and as a share of the wall
time. ``prefix_reuse`` is the share of prompt tokens that earlier turns had computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import ROOT, finish, machine, make_checkpoint

if TYPE_CHECKING:
    from areno import Trainer

MODELS = {"tiny": {}, "small": {"hidden": 512, "layers": 8, "vocab": 32_000}}
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def serving_cpu_s() -> float:
    """CPU seconds that the serving threads have used so far."""
    clocks = [
        time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.name.startswith("areno-serv") and thread.ident is not None
    ]
    return sum(time.clock_gettime(clock) for clock in clocks)


def python_loop_ms() -> float:
    """CPU milliseconds of a fixed loop: the speed of a shared machine changes by the minute, and with it all results."""
    began, total = time.thread_time(), 0
    for number in range(5_000_000):
        total += number
    return 1000 * (time.thread_time() - began)


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run sessions with an agent program each; returns medians over them."""
    from areno import ArenoConfig, Trainer  # before torch: areno sets how long idle threads spin

    from transformers import AutoTokenizer  # isort: skip

    parameters = make_checkpoint(folder, **MODELS[args.model])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    runtime = {"kv_cache_tokens": args.kv_tokens, "prefix_cache_tokens": args.kv_tokens}
    config = ArenoConfig(runtime=runtime, max_running_prompts=args.conversations)
    with Trainer(1, str(folder), custom_config=config) as trainer:
        trainer.init()
        runs = [one_session(trainer, args, number) for number in range(args.repeats)]
    middle = {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}
    return {"parameters": parameters, "requests": args.conversations * args.turns, **middle, "runs": runs}


def one_session(trainer: Trainer, args: argparse.Namespace, number: int) -> dict[str, Any]:
    """One session; its conversations are about other numbers than those of earlier sessions."""
    from areno import SamplingParams

    requests = args.conversations * args.turns
    speed = python_loop_ms()
    sampling = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    with trainer.rollout_session(sampling_params=sampling, timeout_s=3600) as session:
        first = number * args.conversations
        settings = {"url": session.base_url, "key": session.api_key, "first": first, **vars(args)}
        script = ROOT / "benchmarks" / "workers" / "agentic_client.py"
        load = trainer.backend.load
        before, cpu, began = load(), serving_cpu_s(), time.perf_counter()
        done = subprocess.run([sys.executable, str(script), json.dumps(settings)], stdout=subprocess.PIPE, check=True)
        wall, cpu, after = time.perf_counter() - began, serving_cpu_s() - cpu, load()
    client = json.loads(done.stdout.splitlines()[-1])
    reused = after.reused_total - before.reused_total
    computed = after.prefilled_total - before.prefilled_total
    return {
        "generated_tokens": after.generated_total - before.generated_total,
        "wall_s": round(wall, 2),
        "server_cpu_ms_per_request": round(1000 * cpu / requests, 3),
        "server_share_of_wall": round(cpu / wall, 4),
        "client_cpu_ms_per_request": round(1000 * client["cpu_s"] / requests, 3),
        "median_request_s": round(statistics.median(client["latencies_s"]), 3),
        "prefix_reuse": round(reused / (reused + computed), 4),
        "python_loop_ms": round((speed + python_loop_ms()) / 2, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="tiny")
    parser.add_argument("--conversations", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-tokens", type=int, default=600_000)
    parser.add_argument("--save", default="")
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "agentic_load", "machine": machine(), "settings": vars(args)}
    with tempfile.TemporaryDirectory() as folder:
        result |= measure(Path(folder), args)
    for name, value in result.items():
        if isinstance(value, int | float):
            print(f"{name:<30}{value:>12}")
    finish(result, args.save)


if __name__ == "__main__":
    main()
