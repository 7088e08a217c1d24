"""Statistics are exact regardless of order, batch split and number of processes."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areno.observability import stats_collector
from areno.observability.stats_collector import ReduceType, StatsTracker, merge, reduced, without_counts
from tests.support.examples import examples

finite = st.floats(-1e6, 1e6, width=32)
rows = st.lists(st.tuples(finite, st.booleans()), max_size=12)


def record(tracker, batches, **options):
    for batch in batches:
        mask = torch.tensor([kept for _, kept in batch], dtype=torch.bool)
        tracker.denominator(n=mask)
        tracker.stat("n", x=torch.tensor([value for value, _ in batch], dtype=torch.float32), **options)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(rows, max_size=4), min_size=1, max_size=4))
def test_every_counted_value_weighs_the_same_across_calls_and_processes(processes):
    trackers = [StatsTracker() for _ in processes]
    for one, batches in zip(trackers, processes, strict=True):
        record(one, batches)
    gathered = json.loads(json.dumps([one.parts() for one in trackers]))  # parts are sent between processes
    numbers = reduced(merge(gathered))
    kept = np.array([v for batches in processes for batch in batches for v, k in batch if k], dtype=np.float64)
    if kept.size:
        assert numbers["x/avg"] == pytest.approx(math.fsum(kept) / kept.size, rel=1e-9, abs=1e-6)
        assert (numbers["x/min"], numbers["x/max"]) == (kept.min(), kept.max())
        assert numbers["n"] == kept.size
    else:
        assert not {"x/avg", "x/min", "x/max"} & set(numbers)
        assert numbers.get("n", 0) == 0


def test_each_reduce_type_exports_its_number_under_the_documented_name():
    tracker = StatsTracker()
    tracker.denominator(tokens=torch.tensor([[True, True], [False, True]]))
    values = torch.tensor([[1.0, 2.0], [100.0, 6.0]])
    tracker.stat("tokens", both=values)
    for kind in (ReduceType.AVG, ReduceType.SUM, ReduceType.MIN, ReduceType.MAX):
        tracker.stat(denominator="tokens", reduce_type=kind, **{kind.value: values})
    tracker.scalar(lr=1.0)
    tracker.scalar(lr=2.0, eps=0.2)
    assert tracker.export() == {
        "tokens": 3,
        **{"both/avg": 3, "both/min": 1, "both/max": 6},
        **{"avg": 3, "sum": 9, "min": 1, "max": 6},
        **{"lr": 1.5, "lr__count": 2, "eps": 0.2, "eps__count": 1},
    }
    assert without_counts({"lr": 1.5, "lr__count": 2}) == {"lr": 1.5}


def test_masked_values_do_not_count_even_if_nan():
    tracker = StatsTracker()
    tracker.denominator(n=torch.tensor([True, False]))
    tracker.stat("n", x=torch.tensor([2.0, math.nan]))
    assert tracker.export() == {"n": 1, "x/avg": 2, "x/min": 2, "x/max": 2}


def test_an_unmasked_nan_shows_in_all_three_numbers():
    tracker = StatsTracker()
    record(tracker, [[(1.0, True)], [(math.nan, True)], [(3.0, True)]])
    numbers = tracker.export()
    assert all(math.isnan(numbers[f"x/{name}"]) for name in ("avg", "min", "max"))


def test_bf16_values_are_added_up_in_float64():
    tracker = StatsTracker()
    values = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    tracker.denominator(n=torch.ones(4096, dtype=torch.bool))
    tracker.stat("n", ReduceType.SUM, x=values)
    assert tracker.export()["x"] == 4096  # bf16 sums stop growing at 256


def test_scopes_nest_and_a_denominator_of_an_outer_scope_is_visible():
    tracker = StatsTracker()
    with tracker.scope("ppo_actor"):
        tracker.denominator(n_valid_tokens=torch.tensor([True, True]))
        with tracker.scope("update"):
            tracker.stat("n_valid_tokens", actor_loss=torch.tensor([1.0, 3.0]))
        tracker.scalar(eps_clip=0.2)
    numbers = without_counts(tracker.export())
    assert numbers["ppo_actor/update/actor_loss/avg"] == 2
    assert numbers["ppo_actor/eps_clip"] == 0.2
    assert numbers["ppo_actor/n_valid_tokens"] == 2


def test_named_trackers_prefix_their_statistics_and_are_unique_per_process():
    stats_collector.export_all()  # discards what earlier tests of this process left
    assert stats_collector.get("eval-rollout") is stats_collector.get("eval-rollout")
    stats_collector.get("eval-rollout").scalar(reward=1.0)
    stats_collector.get().scalar(plain=3.0)
    assert stats_collector.export_all() == {
        **{"eval-rollout/reward": 1.0, "eval-rollout/reward__count": 1},
        **{"plain": 3.0, "plain__count": 1},
    }
    assert stats_collector.export_all() == {}


def test_exporting_one_key_returns_and_resets_only_that_key():
    tracker = StatsTracker()
    tracker.scalar(a=1.0, b=2.0)
    with tracker.scope("s"):
        tracker.scalar(c=3.0)
    assert tracker.export(key="a") == {"a": 1, "a__count": 1}
    assert tracker.export(key="a") == {}
    assert tracker.export(key="s", reset=False) == tracker.export(key="s") == {"s/c": 3, "s/c__count": 1}
    assert tracker.export() == {"b": 2, "b__count": 1}


def test_timings_add_up_inside_a_process_and_the_slowest_process_counts():
    ticks = iter([0.0, 1.5, 10.0, 12.0, 0.0, 9.0])
    trackers = [StatsTracker(clock=lambda: next(ticks)), StatsTracker(clock=lambda: next(ticks))]
    with trackers[0].scope("ppo_actor"):
        for _ in range(2):
            with trackers[0].record_timing("train_step"):
                pass
    with pytest.raises(KeyError), trackers[1].record_timing("train_step"):
        raise KeyError  # a block that fails is timed too
    assert trackers[0].export(reset=False) == {"timeperf/train_step": 3.5}
    assert reduced(merge([one.parts() for one in trackers])) == {"timeperf/train_step": 9.0}


def test_export_all_gathers_the_statistics_of_the_other_ranks():
    ranks = [StatsTracker("rollout") for _ in range(2)]
    ranks[0].scalar(reward=1.0)
    for _ in range(3):
        ranks[1].scalar(reward=0.0)
    others = ranks[1].parts()
    assert ranks[0].export_all(lambda own: [own, others]) == {"rollout/reward": 0.25, "rollout/reward__count": 4}


def test_scopes_of_threads_and_tasks_do_not_mix():
    tracker = StatsTracker()

    async def episode(name):
        with tracker.scope(name):
            await asyncio.sleep(0)
            tracker.scalar(reward=1.0)

    async def several():
        await asyncio.gather(*(episode(name) for name in "ab"))

    with tracker.scope("main"):
        thread = threading.Thread(target=lambda: tracker.scalar(alone=1.0))
        thread.start()
        thread.join()
        asyncio.run(several())
    assert set(without_counts(tracker.export())) == {"main/a/reward", "main/b/reward", "alone"}


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda t: t.stat("n", x=torch.ones(2)), "denominator 'n' is unknown"),
        (lambda t: (t.denominator(n=torch.ones(2).bool()), t.stat("n", x=torch.ones(3))), r"shape \(3,\).*\(2,\)"),
        (lambda t: t.denominator(n=torch.ones(2)), r"must be a bool tensor.*mask\.bool"),
        (
            lambda t: (t.denominator(x=torch.ones(2).bool()), t.scalar(x=1.0)),
            "with reduce type sum, but now with scalar",
        ),
    ],
)
def test_misuse_is_reported_with_a_remedy(use, words):
    with pytest.raises((ValueError, TypeError), match=words):
        use(StatsTracker())


def test_importing_and_recording_scalars_loads_neither_torch_nor_numpy():
    code = (
        "import sys, areno.observability.stats_collector as t\n"
        "t.get().scalar(x=1.0); t.export_all()\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
