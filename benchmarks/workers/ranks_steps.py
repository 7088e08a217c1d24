"""One side of ``ranks.py``: GRPO steps on one rank or several replicas. Prints one JSON line."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time

import areno
from areno.loss_fns import grpo_loss_fn
from areno.types import TrainSequence


def main() -> None:
    given = json.loads(sys.argv[1])
    rng = random.Random(0)
    config = areno.ArenoConfig(
        optimizer={"lr": 1e-5},
        max_running_prompts=given["prompts"] * given["samples"],
        runtime={
            "device": "cpu",
            "activation_checkpointing": False,
            "eager_decode": given["decode"] == "eager",  # else the step is on disk, and taken from there at once
            "kv_cache_tokens": 65536,
        },
    )
    trainer = areno.Trainer(world_size=given["world_size"], model_path=given["model"], custom_config=config)
    trainer.init()
    sampling = areno.SamplingParams(max_new_tokens=given["new"], ignore_eos=True)
    before: dict[str, int] = {}
    seconds, parts, rows = [], {"rollout": [], "train": []}, []
    for _ in range(given["steps"] + 1):
        prompts = [[rng.randrange(2, 500) for _ in range(16)] for _ in range(given["prompts"])]
        began = time.perf_counter()
        with trainer.rollout_session(sampling_params=sampling, proxy=False):
            results = trainer.rollout_token_batch(prompts, given["samples"], sampling)
        generated = time.perf_counter()
        rows = [
            TrainSequence(
                prompt_mask=[True] * len(prompt) + [False] * len(sample.resp_tokens),
                tokens=prompt + sample.resp_tokens,
                logprobs=[0.0] * len(prompt) + sample.resp_logprobs,
                advantages=[0.0] * len(prompt) + [rng.gauss(0, 1)] * len(sample.resp_tokens),
            )
            for prompt, result in zip(prompts, results, strict=True)
            for sample in result.sequences
        ]
        before = traffic(trainer)
        trainer.train(rows, grpo_loss_fn, mini_bs=16)
        ended = time.perf_counter()
        seconds.append(ended - began)
        parts["rollout"].append(generated - began)
        parts["train"].append(ended - generated)
    passed_on = {name: count - before.get(name, 0) for name, count in traffic(trainer).items()}
    found = {
        "bytes_of_a_train_call": passed_on,
        "seconds": seconds[1:],
        "parts": {name: round(statistics.median(values[1:]), 4) for name, values in parts.items()},
        "messages_s": messages(trainer, rows, results) if given["world_size"] > 1 else 0.0,
    }
    trainer.close()
    print(json.dumps(found))


def traffic(trainer: areno.Trainer) -> dict[str, int]:
    """Bytes that rank 0 has passed on so far, by operation."""
    workers = getattr(trainer.backend, "workers", None)
    return workers.call("peers.data.traffic.copy", ranks=[0])[0] if workers else {}


def messages(trainer: areno.Trainer, rows: list[TrainSequence], results: list[object]) -> float:
    """Median seconds of sending a step's rows to all ranks and its results back, with nothing done there."""
    workers = trainer.backend.workers
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        workers.call("apply", lambda _engine, *values: values[-1], rows, len(results), results)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
