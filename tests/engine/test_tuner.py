"""``--tune-params``: the chosen sizes fit and shrink with the memory it may use, and trials leave nothing behind."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import random
import re
from contextlib import closing

import numpy as np
import pytest
import torch
import yaml

from areno.cli.main import main
from areno.config.all_train_options import TrainOptions
from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.libc_tuning import trim_freed_memory
from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.layout import Layout
from areno.engine.plan.memory_probe import held_memory
from areno.engine.plan.tuner import tune_sizes
from areno.engine.train.optimizer import OptimizerOptions
from areno.errors import UsageError
from areno.loss_fns import grpo_loss_fn
from areno.types import Request, SamplingParams
from tests.engine.test_model_families import random_rows
from tests.support.cli import start_text, task_arguments, write_task
from tests.support.tiny import save_tiny_checkpoint

CPU = torch.device("cpu")
MIB = 2**20
CONFIG = EngineConfig(optimizer=OptimizerOptions(lr=1e-3), kv_cache_tokens=10**6, max_running=256)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Small weights, and 2 KiB for each cached token."""
    folder = tmp_path_factory.mktemp("tuned") / "model"
    return save_tiny_checkpoint(folder, hidden=256, layers=1, heads=2, num_key_value_heads=2)


@pytest.fixture
def engine(checkpoint):
    made = Engine(str(checkpoint), CONFIG)
    yield made
    made.close()


def options(checkpoint, *explicit, **values):
    sizes = {"max_prompt_tokens": 48, "max_new_tokens": 144, "n_samples": 4, **values}
    run = TrainOptions(ckpt=str(checkpoint), device="cpu", algo="grpo", kv_cache_tokens=10**6, **sizes)
    return dataclasses.replace(run, explicit=frozenset(explicit))


def room(more_mib):
    """Return a capacity whose default share leaves about ``more_mib`` MiB for the trials."""
    gc.collect()
    trim_freed_memory()  # as the first trial does
    return int((held_memory(CPU) + more_mib * MIB) / 0.9)


def sizes_of(chosen):
    return chosen.max_running_prompts, chosen.batch_size, chosen.mini_bs


def test_with_much_memory_the_largest_sizes_are_chosen(engine, checkpoint):
    chosen = tune_sizes(engine, options(checkpoint, tune_max_samples=64), grpo_loss_fn)
    assert sizes_of(chosen) == (64, 16, 16)
    assert chosen.drop_rollout_state
    assert not engine.config.keep_rollout_state


@pytest.mark.long
def test_half_the_share_gives_smaller_sizes_that_fit(checkpoint, tmp_path):
    # In a separate process: memory that earlier tests freed and the allocator retained would not count towards a share.
    program = (
        "import json, sys\n"
        "from tests.engine.test_tuner import with_all_and_half\n"
        "print(json.dumps(with_all_and_half(sys.argv[1])))\n"
    )
    process = start_text(program, tmp_path, checkpoint)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    large, small = json.loads(output.splitlines()[-1])
    assert large[0] > small[0]
    assert all(a >= b for a, b in zip(large, small, strict=True))


def with_all_and_half(checkpoint):
    """Return the sizes chosen for all of a capacity and for half of it."""
    with closing(Engine(str(checkpoint), CONFIG)) as engine:
        run, capacity = options(checkpoint, tune_max_samples=64), 2 * (held_memory(CPU) + 130 * MIB)
        shares = [dataclasses.replace(run, mem_frac=share) for share in (1.0, 0.5)]
        return [sizes_of(tune_sizes(engine, each, grpo_loss_fn, capacity=capacity)) for each in shares]


@pytest.mark.long
def test_every_trial_and_the_choice_are_logged(engine, checkpoint, caplog):
    with caplog.at_level(logging.INFO, logger="areno.engine.plan.tuner"):
        chosen = tune_sizes(engine, options(checkpoint), grpo_loss_fn, capacity=room(90))
    messages = [record.getMessage() for record in caplog.records]
    assert all(line.startswith("auto tune ") for line in messages)
    assert any("above the limit" in line for line in messages)
    assert f"max_running_prompts={chosen.max_running_prompts}: planned" in " ".join(messages)
    assert messages[-1].startswith(f"auto tune chose: max_running_prompts={chosen.max_running_prompts} batch_size=")


def test_explicit_sizes_are_kept(engine, checkpoint):
    run = options(checkpoint, "batch_size", "mini_bs", batch_size=3, mini_bs=6)
    assert sizes_of(tune_sizes(engine, run, grpo_loss_fn)) == (12, 3, 6)
    run = options(checkpoint, "max_running_prompts", "drop_rollout_state", max_running_prompts=9)
    chosen = tune_sizes(engine, run, grpo_loss_fn)
    assert sizes_of(chosen) == (9, 2, 8)
    assert not chosen.drop_rollout_state


def test_a_kept_cache_counts_once_in_a_trial_of_generation_and_once_in_a_trial_of_training(engine, checkpoint, caplog):
    peaks = {}
    for drops in (True, False):
        run = options(
            checkpoint, "drop_rollout_state", "batch_size", max_new_tokens=2000, batch_size=16, drop_rollout_state=drops
        )
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="areno.engine.plan.tuner"):
            tune_sizes(engine, run, grpo_loss_fn)
        peaks[drops] = dict(re.findall(r"tune (max_running_prompts=64|mini_bs=1): .* measured (\d+) MiB", caplog.text))
    added = {name: int(peaks[False][name]) - int(peaks[True][name]) for name in peaks[True]}
    cache = 64 * 2048 * 2 // 1024  # MiB: 64 sequences of 48 + 2000 tokens with 2 KiB each
    assert abs(added["max_running_prompts=64"]) < cache / 2
    assert abs(added["mini_bs=1"] - cache) < cache / 2


def test_a_batch_is_no_larger_than_the_data_set(engine, checkpoint):
    assert tune_sizes(engine, options(checkpoint), grpo_loss_fn, rows=5).batch_size == 4


def test_too_little_memory_is_an_error_that_says_what_to_lower(engine, checkpoint):
    with pytest.raises(
        UsageError,
        match=r"--tune-params: max_running_prompts=1 needs more memory than the limit of .* lower --max-new-tokens",
    ):
        tune_sizes(engine, options(checkpoint), grpo_loss_fn, capacity=held_memory(CPU))


def test_trials_leave_nothing_behind(checkpoint):
    states, answers = [], []
    for tuned in (True, False):
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        made = Engine(str(checkpoint), EngineConfig(optimizer=OptimizerOptions(lr=1e-3), kv_cache_tokens=10**5))
        before = {name: p.detach().clone() for name, p in made.actor.model.parameters()}
        torch.manual_seed(6)
        if tuned:
            tune_sizes(made, options(checkpoint, tune_max_samples=8), grpo_loss_fn)
            assert all(torch.equal(p, before[name]) for name, p in made.actor.model.parameters())
            assert made.loop.cache.nbytes() == 0
            assert made.version == 0
        drawn = (float(torch.rand(())), np.random.rand(), random.random())
        request = Request([5, 6, 7], SamplingParams(max_new_tokens=12), [3])
        answers.append((drawn, made.submit([request])[0].result().sequences[0].resp_tokens))
        for seed in range(2):
            made.train(random_rows(6, seed), grpo_loss_fn, 3)
        states.append({name: p.detach().clone() for name, p in made.actor.model.parameters()})
        made.close()
    assert answers[0] == answers[1]
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


@pytest.mark.long
@pytest.mark.parametrize("layout", [pytest.param(Layout(2, 1), id="dp2"), pytest.param(Layout(1, 2), id="tp2")])
def test_ranks_try_sizes_together_and_leave_nothing_behind(layout, checkpoint, caplog):
    """Each replica gets its share of the sequences; the largest of the measured peaks counts."""
    config = EngineConfig(optimizer=OptimizerOptions(lr=1e-3), kv_cache_tokens=10**6, max_running=256, decode="eager")
    group = EngineGroup(str(checkpoint), config, layout)
    size = {"world_size": layout.world_size, "tp_size": layout.tp_size}
    run = options(checkpoint, tune_max_samples=64, **size)
    try:
        before = group.run_on_all_ranks(fingerprint)
        held = max(group.run_on_all_ranks(lambda engine: held_memory(CPU)))
        if layout.tp_size == 1:  # otherwise a rank's first steps take more than its half of the cache
            # First, while no rank's allocator has retained freed memory, which would not count towards a share.
            long = dataclasses.replace(run, max_new_tokens=2000)  # 64 sequences take 128 MiB of cache on each rank
            small = tune_sizes(group, long, grpo_loss_fn, capacity=int((held + 205 * MIB) / 0.9))
            assert sizes_of(small)[0] < 64
        with caplog.at_level(logging.INFO, logger="areno.engine.plan.tuner"):
            chosen = tune_sizes(group, run, grpo_loss_fn)
        assert sizes_of(chosen) == (64, 16, 16)
        assert chosen.drop_rollout_state
        assert group.run_on_all_ranks(lambda engine: engine.config.keep_rollout_state) == [False] * layout.world_size
        assert " MiB on each rank (mem_frac=" in caplog.text
        assert group.run_on_all_ranks(fingerprint) == before
        with pytest.raises(UsageError, match=r"--tune-params: max_running_prompts=1 needs more memory"):
            tune_sizes(group, run, grpo_loss_fn, capacity=held)
        request = Request([5, 6, 7], SamplingParams(max_new_tokens=3, ignore_eos=True), [3])
        assert len(group.submit([request])[0].result().sequences[0].resp_tokens) == 3
        assert group.train(random_rows(4), grpo_loss_fn, 2)["update_skipped"] == 0.0
    finally:
        group.close()


def fingerprint(engine):
    """Return what a trial must leave unchanged."""
    weights = sum(
        float(p.detach().to_local().sum() if hasattr(p, "to_local") else p.detach().sum())
        for _, p in engine.actor.model.parameters()
    )
    random_numbers = (torch.get_rng_state().sum().item(), random.getstate()[1][:3])
    return weights, engine.version, engine.loop.cache.nbytes(), random_numbers


def test_a_run_trains_with_the_chosen_sizes_and_saves_them(tmp_path, tiny_checkpoint):
    run = tmp_path / "run"
    arguments = task_arguments("grpo", tiny_checkpoint, write_task(tmp_path / "task"), run)
    flags = [str(word) for word in arguments]
    for flag in ("--batch-size", "--mini-bs"):
        del flags[flags.index(flag) : flags.index(flag) + 2]
    assert main([*flags, "--tune-params", "--tune-max-samples", "32", "--max-steps", "1"]) == 0
    stored = yaml.safe_load((run / "config.yaml").read_text())
    assert (stored["max_running_prompts"], stored["batch_size"], stored["mini_bs"]) == (32, 8, 16)
    assert stored["drop_rollout_state"] is True
    assert not {"tune_params", "mem_frac", "tune_max_samples"} & stored.keys()
    assert len([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]) == 1
    assert "auto tune chose" in (run / "log.txt").read_text()
