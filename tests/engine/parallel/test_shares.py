"""Sharded optimizers, against one process with the same gradients, and against torch's AdamW.

8-bit moments on replicas equal those of one process bit for bit: shards begin and end at blocks of unsharded parameters.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch

from areno.engine.parallel.layout import Layout
from areno.engine.parallel.rank_context import RankContext
from areno.engine.train.adam_8bit import BLOCK, Quantised, state_bytes
from areno.engine.train.optimizer import MasterAdamW, OptimizerOptions
from areno.engine.train.sharded import ZeroAdamW
from areno.engine.train.state_files import SavedState
from tests.engine.parallel.shares import SHAPES, SPREAD, start, weights_and_gradients
from tests.support.optimizer_states import contents, saved

CONFIG = OptimizerOptions(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01, eps=1e-6)
LOW = dataclasses.replace(CONFIG, adam_8bit=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    group = start(Layout(2, 1), tmp_path_factory.mktemp("two") / "ranks")
    yield group
    group.close()


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    group = start(Layout(1, 2), tmp_path_factory.mktemp("spread") / "ranks")
    yield group
    group.close()


def alone(config, weights, gradients, state=None):
    """Do the same in this process; return weights, folder of the state, and statistics of the last step."""
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in weights.items()}
    optimizer = MasterAdamW(list(parameters.items()), config)
    if state is not None:
        optimizer.load_state(SavedState(state))
    stats = None
    for step in gradients:
        for name, gradient in step.items():
            (parameters[name] * gradient.to(parameters[name].dtype)).sum().backward()
        stats = optimizer.collect()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in parameters.items()}, saved(optimizer), stats


def assert_same(got, expected):
    """Assert that trees of numbers and tensors, or the contents of folders, are equal bit for bit."""
    if isinstance(expected, Path):
        got, expected = contents(got), contents(expected)
    assert type(got) is type(expected) or isinstance(got, torch.Tensor | int | float)
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected)
    else:
        assert got == expected


@pytest.mark.parametrize("signed", [True, False])
def test_dequantised_numbers_get_the_same_codes_again(signed):
    """All codes, with scales over 12 decades: saving them in full precision and loading them again changes nothing."""
    scales = 10 ** (torch.rand(3000, generator=torch.Generator().manual_seed(1)) * 12 - 12)
    codes = torch.arange(256, dtype=torch.uint8).repeat(3000, 1)
    kept = Quantised(codes, scales * (torch.tensor([1.0, -1.0]).repeat(1500) if signed else 1.0), signed)
    again = Quantised.of(kept.numbers(codes.numel()), signed)
    assert torch.equal(again.scales, kept.scales)
    assert torch.equal(again.codes, kept.codes)
    assert torch.equal(Quantised.of(torch.ones(BLOCK + 3), signed).numbers(BLOCK + 3), torch.ones(BLOCK + 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exchanged", [1 << 24, 1000])
def test_low_precision_moments_of_two_replicas_equal_those_of_one_process(two, dtype, exchanged):
    weights, gradients = weights_and_gradients(5, dtype)
    expected, state, stats = alone(LOW, weights, gradients)
    for got, found, _, seen in two.call("run", LOW, weights, gradients, None, exchanged):
        assert_same(got, expected)
        assert_same(found, state)
        assert seen.norm == pytest.approx(stats.norm, rel=1e-6)
        assert (seen.nonzero, seen.total) == (stats.nonzero, stats.total)


def test_a_state_moves_from_two_replicas_to_one_process_and_back(two):
    weights, gradients = weights_and_gradients(6)
    expected, last, _ = alone(LOW, weights, gradients)
    got, state, *_ = two.call("run", LOW, weights, gradients[:2])[0]
    got, state, _ = alone(LOW, got, gradients[2:4], state)
    got, state, *_ = two.call("run", LOW, got, gradients[4:], state)[1]
    assert_same(got, expected)
    assert_same(state, last)


@pytest.mark.parametrize("rounded", ["first", "odd"])
def test_fp32_weights_beside_rounded_ones_move_between_layouts(two, rounded):
    """As an adapter in fp32 beside a scalar head in bf16."""
    weights, gradients = weights_and_gradients(6)
    weights[rounded] = weights[rounded].to(torch.bfloat16)
    expected, last, _ = alone(LOW, weights, gradients)
    got, state, *_ = two.call("run", LOW, weights, gradients[:2])[0]
    assert [key for key in contents(state) if key.startswith("master.")] == [f"master.{rounded}"]
    got, state, _ = alone(LOW, got, gradients[2:4], state)
    got, state, *_ = two.call("run", LOW, got, gradients[4:], state)[1]
    assert_same(got, expected)
    assert_same(state, last)


@pytest.mark.parametrize("config", [CONFIG, LOW], ids=["fp32 moments", "8-bit moments"])
def test_replicas_resume_the_state_of_a_parameter_without_gradients(two, config):
    """Replicas treat a missing gradient as 0, which without weight decay changes nothing."""
    config = dataclasses.replace(config, weight_decay=0.0)
    weights, gradients = weights_and_gradients(4)
    zeros = [step | {"norm": torch.zeros_like(step["norm"])} for step in gradients[:2]]
    expected = two.call("run", config, weights, zeros + gradients[2:])[0][0]
    got, state, _ = alone(config, weights, [{n: g for n, g in step.items() if n != "norm"} for step in gradients[:2]])
    assert "norm" not in contents(state)["head"]["counts"]
    got = two.call("run", config, got, gradients[2:], state)[0][0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("layout", [Layout(3, 1), pytest.param(Layout(2, 2), marks=pytest.mark.long)])
def test_shards_that_split_tensors_anywhere_give_the_same_results(layout, tmp_path):
    weights, gradients = weights_and_gradients(3)
    group = start(layout, tmp_path / "ranks")
    try:
        found = group.call("run", LOW, weights, gradients)
    finally:
        group.close()
    expected, state, _ = alone(LOW, weights, gradients)
    cut = SPREAD if layout.tp_size > 1 else ()
    for got, folder, held, _ in found:
        assert held[1] == sum(8 * t.numel() if name in cut else state_bytes(t.numel()) for name, t in weights.items())
        if layout.tp_size == 1:
            assert_same(got, expected)
            assert_same(folder, state)
        else:
            assert_close(got, expected, weights)


def assert_close(got, expected, start):
    """Assert that the weights moved about as far in total.

    With other block boundaries a moment is off by at most a code's spacing, 1.5 % of its block's largest number, so small
    numbers next to large ones move differently.
    """
    for name in expected:
        moved, wanted = got[name] - start[name], expected[name] - start[name]
        assert float((moved - wanted).norm() / wanted.norm()) < 0.05, name


def test_low_precision_moments_of_sharded_tensors_follow_fp32_and_move_to_one_process(spread):
    weights, gradients = weights_and_gradients(6)
    ideal, _, stats = alone(CONFIG, weights, gradients)
    one, _, _ = alone(LOW, weights, gradients)
    got, state, *_ = spread.call("run", LOW, weights, gradients[:3])[0]
    kinds = {
        name: {key.rsplit(".", 1)[1] for key in contents(state) if key.startswith(f"state.{name}.")} for name in SHAPES
    }
    codes = {"mean_codes", "mean_scales", "root_codes", "root_scales"}
    assert {name for name, found in kinds.items() if found == codes} == {"first", "odd"}
    assert {name for name, found in kinds.items() if found == {"mean", "root"}} == set(SPREAD)
    assert contents(state)["state.tall.mean"].shape == SHAPES["tall"]
    whole, again = alone(LOW, got, gradients[3:], state)[0], spread.call("run", LOW, got, gradients[3:], state)[1]
    for found in (whole, again[0]):
        assert_close(found, one, weights)
        for name in SHAPES:
            gap = (found[name] - ideal[name]).norm() / (ideal[name] - weights[name]).norm()
            assert float(gap) < 0.15, f"{name}: 8-bit moments in one process may differ from AdamW by 12 %"
    assert again[3].norm == pytest.approx(stats.norm, rel=1e-6)


def test_an_8_bit_shard_takes_at_most_30_percent_of_fp32(two):
    weights, gradients = weights_and_gradients(1)
    moments = (
        8 * sum(tensor.numel() for tensor in weights.values()) / 2
    )  # masters are the weights, which replicas share
    low, full = (two.call("run", config, weights, gradients)[0][2][0] for config in (LOW, CONFIG))
    assert full == pytest.approx(moments, rel=0.01)
    assert low <= 0.3 * full


def test_full_precision_moments_equal_those_of_adamw(two, spread):
    weights, gradients = weights_and_gradients(4)
    expected, state, stats = alone(CONFIG, weights, gradients)
    for group in (two, spread):
        got, folder, _, seen = group.call("run", CONFIG, weights, gradients, None, 1000)[0]
        for name in SHAPES:
            assert torch.allclose(got[name], expected[name], rtol=1e-6, atol=1e-7), name
        found, wanted = contents(folder), contents(state)
        assert found.pop("head") == wanted.pop("head")
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.allclose(found[key], value, rtol=1e-5, atol=1e-9), key
        assert (seen.nonzero, seen.total) == (stats.nonzero, stats.total)


def test_states_of_another_precision_are_refused(two):
    weights, gradients = weights_and_gradients(1)
    _, low, _ = alone(LOW, weights, gradients)
    with pytest.raises(ValueError, match="--adam-8bit"):
        two.call("run", CONFIG, weights, gradients, low)
    _, full, _ = alone(CONFIG, weights, gradients)
    with pytest.raises(ValueError, match="--adam-8bit"):
        two.call("run", LOW, weights, gradients, full)


@pytest.mark.parametrize("low", [False, True])
def test_offloaded_states_get_the_same_updates(two, low):
    """Takes the code path of states in another memory; on a CPU, both memories are the same."""
    weights, gradients = weights_and_gradients(3, torch.bfloat16)
    near = dataclasses.replace(CONFIG, adam_8bit=low)
    apart = dataclasses.replace(near, offload=True)
    expected, got = (two.call("run", config, weights, gradients, None, 1000)[0] for config in (near, apart))
    assert_same(got[0], expected[0])
    assert_same(got[1], expected[1])
    assert got[2][:2] == expected[2][:2]
    assert got[2][2] < expected[2][2], "during a step, only the exchanged part is on the device"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU beside the computer's memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("low", [False, True])
def test_offloaded_shards_are_in_host_memory(low, dtype):
    weights, gradients = weights_and_gradients(4, dtype)
    config = dataclasses.replace(CONFIG, adam_8bit=low, offload=True)
    made = []
    for kind in (MasterAdamW, partial(ZeroAdamW, peers=RankContext())):
        parameters = {name: torch.nn.Parameter(tensor.cuda()) for name, tensor in weights.items()}
        optimizer = kind(list(parameters.items()), config)
        for step in gradients:
            for name, parameter in parameters.items():
                (parameter * step[name].cuda()).sum().backward()
            assert all(gradient.device.type == "cpu" for gradient in optimizer.gradients())
            optimizer.collect()
            optimizer.step()
            optimizer.zero_grad()
        made.append((optimizer, {name: p.detach().cpu() for name, p in parameters.items()}))
    assert made[1][0]._master.device.type == "cpu"
    assert_same(made[1][1], made[0][1])
    made[1][0].load_state(SavedState(saved(made[0][0])))
    assert_same(saved(made[1][0]), saved(made[0][0]))
