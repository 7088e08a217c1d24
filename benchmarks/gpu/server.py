"""A vLLM or SGLang server as rollout replica of a trainer on the same GPU: answers, aborts, new weights in mid-answer.

``SERVER_COMMAND`` starts it where it is not installed beside areno, such as ``/opt/sglang/bin/python -m sglang.launch_server``.
"""

# ruff: noqa: I001  (shared comes first: it finds the checkout and imports areno before torch)

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections import Counter
from typing import Any

from shared import Checks, Report, answers, half, model_config, random_module, run_stage, save_tokenizer

import torch

from areno.config.experiment.backend_sections import SGLangConfig, vLLMConfig
from areno.config.experiment.server_arguments import server_arguments
from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.rollouts.fleet.fleet import FleetOptions, RolloutFleet
from areno.rollouts.servers.command_line import ServerOptions
from areno.types import Request, SamplingParams

# Half of the GPU, because the trainer has the other one.
_SECTIONS: dict[str, Any] = {
    "vllm": vLLMConfig(gpu_memory_utilization=0.4, max_num_seqs=64),
    "sglang": SGLangConfig(mem_fraction_static=0.4, max_running_requests=64),
}
_START_S = 300.0


def checkpoint(args: argparse.Namespace) -> str:
    """Random weights in a shape that the servers compute with."""
    config = model_config("tiny" if args.tiny else "0.6B")
    if args.tiny:
        config.head_dim = 32
    folder = args.out / "model-server"
    random_module(args, half(args.device), config).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def open_fleet(args: argparse.Namespace, path: str, trainer: Engine) -> RolloutFleet:
    """One replica, on the trainer's GPU."""
    gpu = args.device.startswith("cuda")
    arguments = server_arguments(
        _SECTIONS[args.engine],
        dtype=str(half(args.device)).removeprefix("torch."),
        context_length=1024 if args.tiny else 4096,
        gpu=gpu,
    )
    server = ServerOptions(
        product=args.engine,
        arguments=(*arguments, *(["--enforce-eager"] if args.tiny and args.engine == "vllm" else [])),
        command=tuple(shlex.split(os.environ.get("SERVER_COMMAND", ""))),
        gpu=gpu,
    )
    options = FleetOptions(log_folder=args.out, server=server, startup_timeout_s=_START_S, restart=False)
    return RolloutFleet(path, trainer.config, options)


def gap(trainer: Engine, asked: list[Request], results: list[Any], version: int) -> float:
    """Mean distance of the log-probs of this version's tokens from the trainer's, in nats."""
    pairs = [(request, sample) for request, result in zip(asked, results, strict=True) for sample in result.sequences]
    scores = trainer.score_logprobs("actor", [request.prompt_tokens + sample.resp_tokens for request, sample in pairs])
    distances = [
        abs(found - expected)
        for (request, sample), score in zip(pairs, scores, strict=True)
        for found, expected, stamp in zip(
            sample.resp_logprobs, score[len(request.prompt_tokens) :], sample.versions, strict=True
        )
        if stamp == version
    ]
    return sum(distances) / len(distances)


def move(trainer: Engine) -> None:
    """Weights as training could leave them."""
    with torch.no_grad():
        for parameter in trainer.actor.model.module.parameters():
            parameter += 0.002 * torch.randn_like(parameter)


def stage(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    path, bound = checkpoint(args), 0.05 if args.device.startswith("cuda") else 1e-3
    trainer = Engine(path, EngineConfig(device=torch.device(args.device), dtype=half(args.device), decode="eager"))
    began = time.perf_counter()
    fleet = open_fleet(args, path, trainer)
    report["start_s"] = round(time.perf_counter() - began, 1)
    try:
        length, under_way = (
            (900, 0.1) if args.tiny else (3000, 0.5)
        )  # tokens of a long answer, seconds that it takes to begin
        sampling = SamplingParams(max_new_tokens=32 if args.tiny else 256, ignore_eos=True)
        asked = [Request([5 + i, 7, 9, 11], sampling, list(range(4))) for i in range(16)]
        answers(fleet.submit, asked[:1])  # the first request compiles
        began = time.perf_counter()
        results = answers(fleet.submit, asked)
        took = time.perf_counter() - began
        report["tokens per s"] = round(len(asked) * 4 * sampling.max_new_tokens / took)
        checks.below("log-probs of the first weights", gap(trainer, asked, results, 0), bound)
        long = [Request([3, 5, 7], SamplingParams(max_new_tokens=length, ignore_eos=True), list(range(16)))]
        for version in (1, 2):
            futures = fleet.submit(long)
            time.sleep(under_way)
            move(trainer)
            update = fleet.update_weights(trainer, version, verify=True)
            report.add(
                "updates",
                {"seconds": round(update.seconds, 3), "pause_s": update.pauses_s, "mb": update.nbytes // 10**6},
            )
            checks.below(f"update {version}: log-probs of a fixed prompt", update.logprob_gap or 0.0, bound)
            found = [future.result(timeout=300) for future in futures]
            stamps = {stamp for sample in found[0].sequences for stamp in sample.versions}
            checks.true(f"update {version}: versions in mid-answer", stamps == {version - 1, version})
            checks.below(f"update {version}: log-probs of the new tokens", gap(trainer, long, found, version), bound)
        futures = fleet.submit(long)
        time.sleep(under_way)
        began = time.perf_counter()
        fleet.cancel(futures[0])
        kept = futures[0].result(timeout=60)
        report["abort_s"] = round(time.perf_counter() - began, 2)
        reasons = Counter(sample.finish_reason for sample in kept.sequences)
        report["ends after an abort"] = dict(reasons)
        # A few may have had all their tokens when the server got to it.
        checks.true(
            "an abort ends the samples that are not complete",
            "abort" in reasons and reasons.keys() <= {"abort", "length"},
        )
    finally:
        fleet.close()
        trainer.close()


if __name__ == "__main__":
    run_stage("server", stage)
