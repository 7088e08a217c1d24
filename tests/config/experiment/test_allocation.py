"""The grammar of backends: hand-written examples, and round trips of arbitrary allocations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areno.config.experiment.allocation import (
    AllocationMode,
    AllocationValidationError,
    InvalidAllocationModeError,
    ModelAllocation,
    ParallelStrategy,
    translate_legacy,
)

SIZES = st.integers(1, 6)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)


def devices(mode: AllocationMode) -> int:
    return sum(group[0].world_size for group in mode.components)


@pytest.mark.parametrize(
    ("text", "sizes", "world"),
    [
        ("fsdp:d4", {"data": 4}, 4),
        ("fsdp:d2t2c2", {"data": 2, "tensor": 2, "context": 2}, 8),
        ("megatron:d4t2p2", {"data": 4, "tensor": 2, "pipeline": 2}, 16),
        ("archon : d2 e2", {"data": 2, "expert": 2}, 2),
        ("areno:d2t1", {"data": 2}, 2),
        ("vllm:t4d2", {"data": 2, "tensor": 4}, 8),
        ("sglang:d2d3", {"data": 3}, 3),  # the last one wins
        (
            "megatron:(attn:d4p2t2|ffn:d2p2e4)",
            {"data": 4, "pipeline": 2, "tensor": 2, "expert": 4, "expert_tensor": 1},
            16,
        ),
        ("megatron:attn:d4p2t2|ffn:p2e4", {"data": 4, "pipeline": 2, "tensor": 2, "expert": 4, "expert_tensor": 1}, 16),
        ("megatron:(attn:c2d2|ffn:t2d2)", {"data": 2, "context": 2, "expert_tensor": 2}, 4),
    ],
)
def test_sizes_and_world_size(text, sizes, world):
    allocation = ModelAllocation.from_str(text)
    assert allocation.parallel == ParallelStrategy(**sizes)
    assert allocation.world_size == world


@pytest.mark.parametrize(
    ("text", "world", "backends"),
    [
        ("sglang:d4+fsdp:d4", 8, {"rollout": "sglang:d4", "actor": "fsdp:d4"}),
        (
            "sglang[rollout]:d4|fsdp[actor]:d2t2",
            4,
            {"rollout": "sglang:d4", "actor": "fsdp:d2t2"},
        ),
        (
            "areno[rollout]:d2 + fsdp[actor]:d2|fsdp[critic]:d2 + fsdp[ref]:d1",
            5,
            {"rollout": "areno:d2", "actor": "fsdp:d2", "critic": "fsdp:d2", "ref": "fsdp:d1"},
        ),
        ("vllm:d2", 2, {"rollout": "vllm:d2"}),
        (
            "sglang[rollout]:d16|megatron[actor]:(attn:d4p2t2|ffn:d2p2e4)",
            16,
            {"rollout": "sglang:d16", "actor": "megatron:(attn:d4p2t2|ffn:d2p2e4)"},
        ),
    ],
)
def test_several_engines(text, world, backends):
    mode = AllocationMode.from_str(text)
    assert (devices(mode), mode.backends()) == (world, backends)
    assert AllocationMode.from_str(str(mode)) == mode


def test_colocated_engines_share_the_devices_of_the_first():
    mode = AllocationMode.from_str("areno:d2|fsdp[actor]:d2")
    assert mode.colocated() == {"actor": "rollout"}
    assert AllocationMode.from_str("areno:d2+fsdp:d2").colocated() == {}


@pytest.mark.parametrize(
    ("text", "modern"),
    [
        ("sglang.d4p1m1+d2p2m1", "sglang:d4+megatron:d2p2"),
        ("sglang.d2m2p1+d4m2p1", "sglang:d2t2+fsdp:d4t2"),
        ("areno.d1+d1", "areno:d1+fsdp:d1"),
        ("vllm.d3m1", "vllm:d3"),
        ("sglang.d4p1m1+megatron.d2p2m1", "sglang:d4+megatron:d2p2"),
        ("sglang.d4m2+megatron:d2p2", "sglang:d4t2+megatron:d2p2"),
        ("sglang:d1+d1", "sglang:d1+fsdp:d1"),
        ("vllm:d2t2 + d2p1t1c2", "vllm:d2t2+fsdp:d2c2"),
        ("d4m2", "areno[rollout]:d4t2|fsdp[actor]:d4t2"),
        ("d2p2m1", "areno[rollout]:d2p2|megatron[actor]:d2p2"),
        ("actor_gen:d4,*:d8", "areno:d4+fsdp:d8"),
        ("vllm.actor_gen:d4p1m2,actor_train:d2p2", "vllm:d4t2+megatron:d2p2"),
        ("actor_gen:d4,ref_inf:d2,*:d8", "areno[rollout]:d4+fsdp[actor]:d8+fsdp[ref]:d2"),
        ("sglang:d4+fsdp:d4", "sglang:d4+fsdp:d4"),
    ],
)
def test_legacy_forms_are_translated(text, modern):
    assert translate_legacy(text) == modern
    assert AllocationMode.from_str(text) == AllocationMode.from_str(modern)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the backend is empty"),
        ("d4", "write fsdp:d4 for training, or areno:d4 for generation"),
        ("sglang", "write sglang:d1 for one device"),
        ("fsdp:", "write fsdp:d1 for one device"),
        ("fspd:d2", "did you mean fsdp?"),
        ("fsdp:d0", "a number of at least 1"),
        ("fsdp:d2x", "a number of at least 1"),
        ("fsdp:x2", "fsdp does not support the size letter 'x'"),
        ("sglang:c2", "sglang does not support the size letter 'c'; use only d, t, p"),
        ("sglang.d4p1m2", "only the setting allocation_mode accepts; write sglang:d4t2"),
        ("d2p2m1", "write megatron:d2p2 for training, or areno:d2p2 for generation"),
        ("sglang:d4+fsdp:d4", "specifies several engines, but `backend` accepts only one engine"),
        ("fsdp:(attn:d2|ffn:d2)", "only megatron"),
        ("megatron:(attn:d2)", "does not have sizes for both attn and ffn; write both"),
        ("megatron:(attn:d2e2|ffn:d2)", "attn does not support the size letter 'e'"),
        ("megatron:(attn:d2|ffn:c2)", "ffn does not support the size letter 'c'"),
        ("megatron:(attn:d4p2|ffn:d4)", "use the same p for both"),
        ("megatron:(attn:d4|ffn:d2e4)", "attn takes 4 devices, but ffn takes 8"),
        ("megatron:(attn:d7|ffn:e3)", "attn takes 7 devices, but ffn takes 6"),
        ("megatron:(attn:d4|ffn:e3)", "choose sizes for which the two numbers are equal"),
    ],
)
def test_invalid_backends_are_refused_with_a_reason(text, words):
    with pytest.raises(InvalidAllocationModeError) as caught:
        ModelAllocation.from_str(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sglang:d4|fsdp:d4", "shares devices but has no name"),
        ("sglang:d4|fsdp[actor]:d2", "give engines that share devices the same number"),
        ("sglang[a]:d1+fsdp[a]:d1", "two engines are called a"),
        ("sglang:d1+fsdp[actor]:d1+fsdp[ref]:d1", "if there are three or more engines, give each engine a name"),
        ("fsdp:d1++areno:d1", "the backend is empty"),
        (
            "actor_gen:d4,other:d8",
            "'other:d8' is not of the form MODEL:SIZES, where MODEL is one of actor_gen, actor_train",
        ),
        ("actor_gen:d4,*", "'*' is not of the form MODEL:SIZES"),
        ("actor_gen:d4,actor:d8,actor_train:d2", "sizes for actor twice; remove one of the two entries"),
        ("*:d4,*:d8", "sizes for * twice"),
    ],
)
def test_contradictory_engines_are_refused(text, words):
    with pytest.raises(InvalidAllocationModeError) as caught:
        AllocationMode.from_str(text)
    assert words in str(caught.value)
    assert not isinstance(caught.value, AllocationValidationError)


def test_two_unnamed_engines_of_one_kind_are_ambiguous():
    with pytest.raises(InvalidAllocationModeError, match="two engines have the role actor"):
        AllocationMode.from_str("fsdp:d1+fsdp:d2").backends()


@pytest.mark.parametrize("text", ["fsdp:d4p2", "fsdp:d4e2", "megatron:d4e8", "archon:t2e4"])
def test_impossible_parallel_sizes_are_refused(text):
    with pytest.raises(AllocationValidationError):
        ModelAllocation.from_str(text)


@st.composite
def allocations(draw, name=""):
    backend = draw(st.sampled_from(["areno", "sglang", "vllm", "fsdp", "megatron", "archon"]))
    sizes = {"data": draw(SIZES), "tensor": draw(SIZES)}
    if backend in ("sglang", "vllm", "areno", "megatron", "archon"):
        sizes["pipeline"] = draw(SIZES)
    if backend in ("fsdp", "megatron", "archon"):
        sizes["context"] = draw(SIZES)
    if backend == "megatron":
        world = sizes["data"] * sizes["tensor"] * sizes["context"]
        sizes["expert_tensor"] = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
        rest = world // sizes["expert_tensor"]
        sizes["expert"] = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    return ModelAllocation(backend, ParallelStrategy(**sizes), name)


@given(allocations(), st.sampled_from(["", " "]))
def test_an_allocation_round_trips_through_text(allocation, space):
    text = str(allocation).replace(":", f"{space}:{space}")
    again = ModelAllocation.from_str(text)
    assert again == allocation
    parallel = again.parallel
    assert again.world_size == parallel.data * parallel.tensor * parallel.pipeline * parallel.context
    assert again.world_size % (parallel.expert * parallel.expert_tensor * parallel.pipeline) == 0


@given(st.data())
def test_several_engines_round_trip_through_text(data):
    names = data.draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    mode = AllocationMode(tuple((data.draw(allocations(name)),) for name in names))
    again = AllocationMode.from_str(str(mode))
    assert again == mode


@given(SIZES, SIZES, SIZES, SIZES, st.permutations("dmp"))
def test_the_dotted_form_keeps_the_number_of_devices(generate, tensor, train, stages, order):
    sizes = {"d": generate, "m": tensor, "p": 1}
    other = {"d": train, "m": 1, "p": stages}
    text = "+".join("".join(f"{letter}{one[letter]}" for letter in order) for one in (sizes, other))
    assert devices(AllocationMode.from_str(f"sglang.{text}")) == generate * tensor + train * stages
