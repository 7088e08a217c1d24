"""One measurement of ``memory.py``: the engine's real phases, each with its peak over what the imports take. Prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import areno  # noqa: F401  (before torch, as the command line does)


def rows_of(lengths: list[int], scored: list[int]) -> list[Any]:
    from areno.types import TrainSequence

    rows = []
    for length, own in zip(lengths, scored, strict=True):
        mask = [index < length - own for index in range(length)]
        tokens = [(7 * index + length) % 500 for index in range(length)]
        zeros, ones = [-1.0] * length, [1.0] * length
        rows.append(
            TrainSequence(prompt_mask=mask, tokens=tokens, logprobs=zeros, advantages=ones, ref_logprobs=list(zeros))
        )
    return rows


def main() -> None:
    import torch

    from areno.config.algorithms import get_algorithm
    from areno.config.train_options import TrainOptions
    from areno.engine.engine import Engine, EngineConfig
    from areno.engine.native import are_large, give_freed_memory_back
    from areno.engine.plan.meter import held_memory, peak_memory
    from areno.engine.plan.sizes import RunSizes
    from areno.engine.train.optimizer import OptimizerConfig
    from areno.engine.train.step import TrainStep
    from areno.types import ModelRole, Request, SamplingParams

    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    options = TrainOptions(**settings["options"])
    cpu = torch.device("cpu")
    sizes = RunSizes(options, cpu)
    loss_fn = get_algorithm(options.algo).make_loss_fn(options)
    torch.randn(64, 64) @ torch.randn(64, 64)
    baseline = held_memory(cpu)
    peaks: dict[str, int] = {}

    with peak_memory(cpu) as peak:
        engine = Engine(
            str(options.ckpt),
            EngineConfig(
                dtype=sizes.dtype,
                optimizer=OptimizerConfig(lr=1e-6, adam_8bit=options.adam_8bit),
                activation_checkpointing=options.activation_checkpointing,
                keep_rollout_state=not options.drop_rollout_state,
                kv_cache_tokens=options.kv_cache_tokens,
                max_running=options.running_sequences,
                decode="eager",
            ),
        )
        for role in sizes.roles():
            engine.ensure_roles({role.name: ModelRole(role.name, role.path, role.trained)})
    peaks["load"] = peak.bytes
    engine.actor.trained_by().allocate()

    if sizes.spec.requires_rollout:
        prompts = [[(11 * i + j) % 500 for j in range(options.max_prompt_tokens)] for i in range(options.batch_size)]
        sampling = SamplingParams(max_new_tokens=options.max_new_tokens, ignore_eos=True)
        seeds = list(range(options.n_samples))
        with peak_memory(cpu) as peak:
            for future in engine.submit([Request(prompt, sampling, seeds) for prompt in prompts]):
                future.result()
        peaks["rollout"] = peak.bytes
        engine.end_rollout()

    lengths, microbatches = sizes.microbatch(sizes.longest_row(None))
    batch = rows_of(lengths, sizes.scored(lengths))
    if sizes.roles():
        with peak_memory(cpu) as peak:
            engine.score_logprobs("ref", [row.tokens for row in batch], micro_bs=options.score_micro_bs)
        peaks["score"] = peak.bytes
    step = TrainStep(engine.actor.model, engine.actor.trained_by(), options.activation_checkpointing)
    step.set_training(True)
    for _ in range(min(microbatches, 2)):
        with peak_memory(cpu) as peak:
            loss, _ = step._loss(batch, loss_fn)
        peaks["forward"] = max(peaks.get("forward", 0), peak.bytes)
        with peak_memory(cpu) as peak:
            loss.backward()
        peaks["backward"] = max(peaks.get("backward", 0), peak.bytes)
        del loss
    if are_large(engine.actor.model.weight_bytes):
        give_freed_memory_back()  # as the optimizer's step begins: what is above it belongs to the phase before
    with peak_memory(cpu) as peak:
        step.apply()
    peaks["optimizer"] = peak.bytes
    engine.close()
    print(json.dumps({"baseline": baseline, "peaks": {name: value - baseline for name, value in peaks.items()}}))


if __name__ == "__main__":
    main()
