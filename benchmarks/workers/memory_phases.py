"""One measurement of ``memory.py``: the engine's real phases, each with its peak over what the imports take. Prints JSON.

With several ranks every figure is that of all, and memory that they share counts once. ``before`` is what they hold before they
load anything, as far as it is no other process's as well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import areno  # noqa: F401  (before torch, as the command line does)


def rows_of(lengths: list[int], scored: list[int]) -> list[Any]:
    from areno.types import TrainSequence

    rows = []
    for first, (length, own) in enumerate(zip(lengths, scored, strict=True)):  # none begins like another
        mask = [index < length - own for index in range(length)]
        tokens = [(7 * index + first) % 500 for index in range(length)]
        zeros, ones = [-1.0] * length, [1.0] * length
        rows.append(
            TrainSequence(prompt_mask=mask, tokens=tokens, logprobs=zeros, advantages=ones, ref_logprobs=list(zeros))
        )
    return rows


class Baseline:
    """A rank that has imported what an engine needs, and multiplied once."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        import torch

        torch.randn(64, 64) @ torch.randn(64, 64)

    def held(self) -> tuple[int, int]:
        """Resident bytes, and those of them that no other process shares."""
        import torch

        from areno.engine.plan.memory_probe import held_memory

        with open("/proc/self/smaps_rollup") as file:
            figures = dict(line.split(":") for line in file if ":" in line and "kB" in line)
        private = sum(int(figures[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
        return held_memory(torch.device("cpu")), private * 1024


def counted_twice() -> int:
    """Resident bytes of memory that ranks share, less this rank's part of it."""
    twice, shared = 0, False
    with open("/proc/self/smaps") as file:
        for name, *figures in map(str.split, file):
            if not name.endswith(":"):
                shared = any("areno-memory" in figure for figure in figures)
            elif shared and name in ("Rss:", "Pss:"):
                twice += int(figures[0]) * (1024 if name == "Rss:" else -1024)
    return twice


def peak(engine: Any) -> int:
    """Bytes that the rank held at most since the peak began, shared ones in part."""
    from areno.engine.plan import trial

    return trial.peak(engine) - counted_twice()


def update(engine: Any, batch: list[Any], passes: int, loss_fn: Any) -> dict[str, int]:
    """Forward, backward and the optimizer's step of one rank, with rows of its replica's own."""
    import torch

    from areno.engine.libc_tuning import trim_freed_memory
    from areno.engine.plan.memory_probe import begin_peak, peak_since

    cpu, peaks = torch.device("cpu"), {"forward": 0, "backward": 0, "optimizer": 0}
    step = engine.actor.training
    step.set_training(True)
    for _ in range(passes):
        begin_peak(cpu)
        loss = step._loss(batch, loss_fn, False)[0]
        peaks["forward"] = max(peaks["forward"], peak_since(cpu))
        begin_peak(cpu)
        loss.backward()
        peaks["backward"] = max(peaks["backward"], peak_since(cpu))
        del loss
    trim_freed_memory()  # as where memory is short: what is above it belongs to the phase before
    begin_peak(cpu)
    step.apply()
    peaks["optimizer"] = peak_since(cpu)
    step.set_training(False)
    return {name: found - counted_twice() for name, found in peaks.items()}


def allocate(engine: Any) -> None:
    """The states of the optimizer, as after a first step."""
    engine.actor.trained_by().allocate()


def main() -> None:
    import torch

    from areno.config.algorithms import get_algorithm
    from areno.config.train_options import TrainOptions
    from areno.engine.engine import Engine
    from areno.engine.engine_config import EngineConfig
    from areno.engine.parallel.group import EngineGroup
    from areno.engine.parallel.workers import WorkerGroup
    from areno.engine.plan import trial
    from areno.engine.plan.memory_probe import begin_peak, held_memory
    from areno.engine.plan.sizes import RunSizes
    from areno.engine.train.optimizer import OptimizerOptions
    from areno.types import ModelRole, Request, SamplingParams

    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    options = TrainOptions(**settings["options"])
    cpu = torch.device("cpu")
    sizes = RunSizes(options, cpu)
    loss_fn = get_algorithm(options.algo).make_loss_fn(options)
    torch.randn(64, 64) @ torch.randn(64, 64)
    baseline, before = held_memory(cpu), 0
    if options.world_size > 1:
        ranks = WorkerGroup([Baseline] * options.world_size)
        baseline, before = map(sum, zip(*ranks.call("held"), strict=True))
        ranks.close()
    peaks: dict[str, int] = {}
    config = EngineConfig(
        dtype=sizes.config.dtype,
        optimizer=OptimizerOptions(lr=1e-6, adam_8bit=options.adam_8bit),
        activation_checkpointing=options.recomputes,
        keep_rollout_state=not options.drop_rollout_state,
        kv_cache_tokens=options.kv_cache_tokens,
        max_running=sizes.running,
        decode="eager",
    )
    begin_peak(cpu)
    alone = options.world_size == 1
    engine = Engine(str(options.ckpt), config) if alone else EngineGroup(str(options.ckpt), config, sizes.layout)
    for role in sizes.roles():
        engine.ensure_roles({role.name: ModelRole(role.name, role.path, role.optimizer is not None)})
    peaks["load"] = sum(engine.run_on_all_ranks(peak))
    lengths, microbatches = sizes.microbatch(sizes.longest_row(None))
    batch = rows_of(lengths, sizes.scored(lengths))
    if alone:
        engine.run_on_all_ranks(allocate)
    else:  # memory in which ranks sum gradients is there from a first update on
        engine.run_on_all_ranks(update, batch, 1, loss_fn)

    if sizes.spec.requires_rollout:
        prompts = [[(11 * i + j) % 500 for j in range(options.max_prompt_tokens)] for i in range(options.batch_size)]
        sampling = SamplingParams(max_new_tokens=options.max_new_tokens, ignore_eos=True)
        seeds = list(range(options.n_samples))
        engine.run_on_all_ranks(trial.begin)
        for future in engine.submit([Request(prompt, sampling, seeds) for prompt in prompts]):
            future.result()
        peaks["rollout"] = sum(engine.run_on_all_ranks(peak))
        engine.end_rollout()

    if sizes.roles():
        engine.run_on_all_ranks(trial.begin)
        tokens = [row.tokens for row in batch] * sizes.layout.dp_size
        engine.score_logprobs("ref", tokens, micro_bs=options.score_micro_bs)
        peaks["score"] = sum(engine.run_on_all_ranks(peak))
    found = engine.run_on_all_ranks(update, batch, min(microbatches, 2), loss_fn)
    peaks |= {name: sum(one[name] for one in found) for name in found[0]}
    engine.close()
    print(json.dumps({"before": before, "peaks": {name: value - baseline + before for name, value in peaks.items()}}))


if __name__ == "__main__":
    main()
