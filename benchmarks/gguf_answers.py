"""Exact answers to held-out orders before and after the export to GGUF: ``transformers`` and llama.cpp.

    bash benchmarks/peers.sh llama
    python benchmarks/gguf_answers.py RUN --save NAME      # RUN: a folder of areno quickstart --real

The checkpoint is written in each precision, as by ``areno export --gguf``, and llama.cpp answers greedily, with the chat
template in the file. The last line of output is the result as JSON: the means of the reward's parts, and the share of answers
with the same text as those of ``transformers``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import PEERS, ROOT, finish, machine, run_worker

from areno.engine.checkpoint.export import export_model

sys.path.insert(0, str(ROOT / "examples" / "structured"))
import evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of areno quickstart --real")
    parser.add_argument("--precision", nargs="+", default=["f16", "q8_0"], choices=["f32", "f16", "bf16", "q8_0"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores given")
    parser.add_argument("--save", default="", help="name of a file under benchmarks/results")
    args = parser.parse_args()
    checkpoint = json.loads((args.run / "summary.json").read_text(encoding="utf-8"))["checkpoint"]
    data = args.run / "task" / "heldout.jsonl"
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    texts = {"transformers": evaluate.answers(checkpoint, rows)}
    for precision in args.precision:
        with tempfile.TemporaryDirectory() as folder:
            file = export_model(checkpoint, f"{folder}/model", gguf=precision) / f"model-{precision}.gguf"
            settings = {"gguf": str(file), "data": str(data), "threads": args.threads, "max_tokens": 64}
            worker = ROOT / "benchmarks" / "workers" / "llama_answers.py"
            texts[f"llama.cpp {precision}"] = run_worker(PEERS / "llama" / "bin" / "python", worker, settings)  # type: ignore[assignment]
    sides: dict[str, Any] = {
        name: evaluate.score(found, rows)
        | {"same_text": sum(map(str.__eq__, found, texts["transformers"])) / len(rows)}
        for name, found in texts.items()
    }
    result = {"benchmark": "gguf_answers", "machine": machine(), "rows": len(rows), "sides": sides}
    for name, side in sides.items():
        print(f"{name:<16} exact {side['exact']:.1%}, same text as transformers {side['same_text']:.1%}")
    finish(result, args.save)


if __name__ == "__main__":
    main()
