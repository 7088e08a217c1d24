"""Losses, gradients and weights in every layout equal those of one process.

The ground truth is one rank of the same code, which other tests compare with stock transformers and torch's AdamW.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from areno.engine.parallel.layout import Layout
from areno.engine.train.optimizer import OptimizerOptions
from areno.errors import UsageError
from tests.engine.parallel.trainee import Learned, Lesson, Trainees
from tests.support.examples import some_quick
from tests.support.tiny import save_tiny_checkpoint

# Relative to a statistic, and to the largest entry of a gradient and of a weight after five steps.
LOSS, GRADIENT, WEIGHT = 1e-5, 1e-5, 1e-5


class Case(NamedTuple):
    """One layout of one family; ``quick`` cases run in every test run."""

    family: str
    layout: Layout
    quick: bool = False
    lesson: dict = {}  # noqa: RUF012  # never changed
    heads: int = 4
    tied: bool = False

    def __str__(self) -> str:
        layout = self.layout
        sizes = {"d": layout.dp_size, "p": layout.pp_size, "v": layout.pp_chunks}
        sizes |= {"t": layout.tp_size, "c": layout.cp_size, "e": layout.ep_size}
        name = "".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1)
        more = "".join(f"-{name}{'' if value is True else value}" for name, value in self.lesson.items())
        heads = f"-heads{self.heads}" if self.heads != 4 else ""
        return f"{self.family}{heads}{'-tied' * self.tied}-{'fsdp-' * layout.fsdp}{name}{more}"


SHARDED = {
    "d2": Layout(2, fsdp=True),
    "c2": Layout(cp_size=2),
    "d2t2": Layout(2, 2, fsdp=True),
    "d2c2": Layout(2, cp_size=2),
    "c2t2": Layout(1, 2, cp_size=2),
    "c4": Layout(cp_size=4),
}
EXPERTS = {
    "d2e2": Layout(2, ep_size=2),
    "d4e2": Layout(4, ep_size=2),
    "d4e4": Layout(4, ep_size=4),
    "d2t2e2": Layout(2, 2, ep_size=2),
    "c2e2": Layout(cp_size=2, ep_size=2),
    "d2c2e4": Layout(2, cp_size=2, ep_size=4),
}
STAGES = {
    "p2": Layout(pp_size=2),
    "p4": Layout(pp_size=4),
    "p2v2": Layout(pp_size=2, pp_chunks=2),
    "d2p2": Layout(2, pp_size=2),
    "d2p2-fsdp": Layout(2, fsdp=True, pp_size=2),
    "d2p2v2": Layout(2, fsdp=True, pp_size=2, pp_chunks=2, pp_less=(1, 1)),
    "p2t2": Layout(1, 2, pp_size=2),
    "p2c2": Layout(cp_size=2, pp_size=2),
}
STAGED_EXPERTS = {"d2p2e2": Layout(2, ep_size=2, pp_size=2)}
MIXTURES = ("qwen3_moe", "gpt_oss")
FAMILIES = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "qwen3_5")
NO_TENSOR_PLAN = ("gpt_oss", "qwen3_5")
LAYOUTS = SHARDED | STAGES
CASES = [
    Case("qwen3", SHARDED["d2t2"], True),
    Case("qwen3", SHARDED["c2"], True, {"tree": True}),
    Case("llama", SHARDED["c2"], False, {"loss": "value"}, heads=3),
    Case("gpt_oss", SHARDED["d2c2"], True),
    Case("qwen3_5", SHARDED["c2"], True),
    Case("qwen3_moe", EXPERTS["d2t2e2"], True),
    Case("qwen3", STAGES["d2p2v2"], True, tied=True),
    Case("llama", STAGES["p2t2"], True, {"tree": True}),
    Case("qwen3_5", STAGES["d2p2"], True),
    Case("gpt_oss", STAGES["p2c2"], True),
    Case("qwen3_moe", STAGED_EXPERTS["d2p2e2"]),
    Case("qwen3", SHARDED["d2"], True, {"lora": True}),
    Case("llama", SHARDED["d2c2"], False, {"lora": True, "tree": True}),
    Case("qwen3_moe", EXPERTS["d2e2"], False, {"lora": ("q_proj", "o_proj")}),
    Case("qwen3_moe", SHARDED["d2"], False, {"lora": True}),
    Case("llama", STAGES["p4"], False, {"loss": "value"}),
    Case("llama", STAGES["p2v2"], False, {"loss": "value"}, tied=True),
    Case("llama", STAGES["p4"], False, {"mini_bs": 8, "tree": True}, tied=True),
    Case("qwen3", STAGES["p2"], False, {"loss": "sft", "recompute": False}, tied=True),
    Case("qwen3", STAGES["d2p2-fsdp"], False, {"loss": "sft", "recompute": False}),
    Case("gpt_oss", EXPERTS["d4e2"]),
    Case("qwen3_moe", EXPERTS["d2c2e4"], False, {"tree": True, "recompute": False}),
    Case("qwen3", SHARDED["c2t2"], False, {"loss": "sft", "recompute": False}),
    Case("qwen3", SHARDED["d2c2"], False, {"mini_bs": 8, "tree": True}),
    Case("llama", SHARDED["c4"], False, {}, heads=3),
]
CASES += [
    Case(family, layout)
    for family in FAMILIES
    for name, layout in (LAYOUTS | EXPERTS | STAGED_EXPERTS if family in MIXTURES else LAYOUTS).items()
    if not ("t" in name and family in NO_TENSOR_PLAN)
    and not any(case.family == family and case.layout == layout and not case.lesson for case in CASES)
]


@pytest.fixture(scope="module")
def trainees(tmp_path_factory):
    made = Trainees(4, tmp_path_factory.mktemp("ranks"))
    yield made
    made.group.close()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("models"), {}

    def of(case: Case) -> str:
        family, heads, tied = kind = case.family, case.heads, case.tied
        if kind not in found:
            path = folder / f"{family}-{heads}-{tied}"
            sizes = {"heads": heads, "hidden": 16 * heads, "layers": 4, "tie_word_embeddings": tied}
            found[kind] = str(save_tiny_checkpoint(path, family, **sizes))
        return found[kind]

    return of


ZEROS = (
    "grad_zero_count",
    "grad_nonzero_count",
)  # whether a sum that is only rounding error is zero depends on the order


def assert_same(got: Learned, expected: Learned) -> None:
    for mine, theirs in zip(got.stats, expected.stats, strict=True):
        for name in ZEROS:
            assert mine[name] == pytest.approx(theirs[name], abs=1e-4 * theirs["grad_total_count"])
        # Which rows share prompts differs between layouts.
        kept = {name: value for name, value in mine.items() if name not in (*ZEROS, "tree_token_ratio")}
        assert kept == pytest.approx({name: theirs[name] for name in kept}, rel=LOSS, abs=LOSS)
    for what, bound in (("gradients", GRADIENT), ("weights", WEIGHT)):
        mine, theirs = getattr(got, what), getattr(expected, what)
        assert mine.keys() == theirs.keys()
        # In a tensor hundreds of times smaller than the largest, larger terms cancel and leave rounding error.
        least = 3e-3 * max(float(tensor.abs().max()) for tensor in theirs.values())
        for name, tensor in theirs.items():
            gap, scale = (mine[name] - tensor).abs().max(), tensor.abs().max()
            assert gap <= bound * max(scale, least), f"{what} {name}: {gap} of {scale}"


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=[] if c.quick else [pytest.mark.long]) for c in CASES]
)
def test_a_layout_learns_what_one_process_learns(case, trainees, checkpoints):
    lesson = Lesson(checkpoints(case), **case.lesson)
    expected = trainees.alone(lesson)
    found = trainees.learn(case.layout, lesson)
    assert len(found) == case.layout.world_size
    assert_same(found[0], expected)
    assert all(one.stats == found[0].stats for one in found)
    layout, held = case.layout, [one.held for one in found]
    if layout.pp_size == 1:  # each rank keeps its part; tensors of an odd number of rows do not divide evenly
        assert max(held) < 1.2 * expected.held / layout.world_size
    else:  # stages have different parts
        assert sum(held) < (1.7 if case.tied else 1.2) * expected.held * (1 if layout.fsdp else layout.dp_size)


EIGHT = {
    "d8": Layout(8, fsdp=True),
    "d2t2c2": Layout(2, 2, cp_size=2),
    "d2p2t2": Layout(2, 2, fsdp=True, pp_size=2),
    "d2p2t2-whole": Layout(2, 2, pp_size=2),
    "p2c2t2": Layout(1, 2, cp_size=2, pp_size=2),
    "d2p4": Layout(2, fsdp=True, pp_size=4),
    "d2c2p2": Layout(2, cp_size=2, pp_size=2),
    "d2p2c2e4": Layout(2, cp_size=2, ep_size=4, pp_size=2),
    "d2p2t2e2": Layout(2, 2, ep_size=2, pp_size=2),
}


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    made = Trainees(8, tmp_path_factory.mktemp("eight"))
    yield made
    made.group.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", EIGHT)
def test_eight_ranks_learn_what_one_process_learns(kind, eight, checkpoints):
    layout = EIGHT[kind]
    lesson = Lesson(checkpoints(Case("qwen3_moe" if layout.ep_size > 1 else "qwen3", layout)))
    assert_same(eight.learn(layout, lesson)[0], eight.alone(lesson))


SHARDINGS = {
    "kept between forward and backward": replace(SHARDED["d2"], reshards=False),
    "attention and mlp apart": replace(SHARDED["d2"], units=("Qwen3Attention", "Qwen3MLP")),
    "read once": replace(SHARDED["d2c2"], reads_once=True),
    "in host memory": replace(SHARDED["d2"], offloads=True),
    "stages read once": replace(STAGES["d2p2v2"], reads_once=True),
}


@pytest.mark.parametrize("kind", some_quick(SHARDINGS, "read once", "in host memory"))
def test_sharding_options_change_no_results(kind, trainees, checkpoints):
    layout = SHARDINGS[kind]
    case = Case("qwen3", layout, tied=layout.pp_size > 1)
    lesson = Lesson(checkpoints(case))
    assert_same(trainees.learn(layout, lesson)[0], trainees.alone(lesson))


def test_experts_read_by_one_rank_equal_those_of_the_checkpoint(trainees, checkpoints):
    layout = replace(EXPERTS["d2e2"], reads_once=True)
    lesson = Lesson(checkpoints(Case("qwen3_moe", layout)))
    assert_same(trainees.learn(layout, lesson)[0], trainees.alone(lesson))


def test_expert_parallelism_with_adapters_on_experts_is_refused(trainees, checkpoints):
    with pytest.raises(UsageError, match=r"LoRA cannot train the experts .* remove expert parallelism \(e\)"):
        trainees.learn(EXPERTS["d4e2"], Lesson(checkpoints(Case("qwen3_moe", EXPERTS["d4e2"])), lora=True))


def test_sharded_states_can_be_offloaded_to_host_memory(trainees, checkpoints):
    lesson = Lesson(checkpoints(Case("llama", SHARDED["d2"])))
    offloaded = replace(lesson, settings=replace(lesson.settings, offload=True))
    assert_same(trainees.learn(SHARDED["d2"], offloaded)[0], trainees.alone(lesson))


@pytest.mark.parametrize("layout", [SHARDED["d2"], STAGES["p2"], Layout(2)], ids=["sharded", "stages", "whole"])
def test_plain_gradient_descent_equals_that_of_one_process(layout, trainees, checkpoints):
    lesson = Lesson(checkpoints(Case("llama", layout)), settings=OptimizerOptions(lr=0.1, sgd=True))
    assert_same(trainees.learn(layout, lesson)[0], trainees.alone(lesson))


def test_gradients_can_be_reduced_in_16_bits(trainees, checkpoints):
    lesson = Lesson(checkpoints(Case("llama", SHARDED["d2"])))
    rounded = replace(lesson, settings=replace(lesson.settings, reduce_bf16=True))
    found, expected = trainees.learn(SHARDED["d2"], rounded)[0].gradients, trainees.alone(lesson).gradients
    gaps = [float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items()]
    assert 2**-12 < max(gaps) < 2**-7


def test_frozen_base_weights_are_sharded_in_the_compute_dtype(trainees, checkpoints):
    lesson = Lesson(checkpoints(Case("llama", SHARDED["d2"])), lora=True, dtype=torch.bfloat16)
    found, expected = trainees.learn(SHARDED["d2"], lesson), trainees.alone(lesson)
    for name, tensor in expected.weights.items():
        assert (found[0].weights[name] - tensor).norm() < 0.05 * tensor.norm(), name
    assert sum(one.held for one in found) < 1.2 * expected.held
