"""Variable-length attention kernels: how they are called, when they are not used, and the trial that each must pass.

The kernels need a GPU; here ``flash`` stands in for them with FlashAttention's documented semantics, in float64.
"""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from areno.engine.model import packing, varlen
from areno.engine.model.attention import LayerAttention
from areno.engine.model.loading import prepare
from areno.engine.model.packing import PackedPlan
from areno.engine.model.varlen import VarlenKernel, find_kernel, torch_varlen, why_not
from tests.support.tiny import tiny_module

CPU = torch.device("cpu")


def flash(q, k, v, starts_q, starts_k, most_q, most_k, *, scale, window_size, enable_gqa=False):
    """FlashAttention's semantics: query i of Lq is at Lk - Lq + i and sees ``left`` keys before it and ``right`` after."""
    assert enable_gqa or q.shape[1] == k.shape[1]
    assert (most_q, most_k) == (int(starts_q.diff().max()), int(starts_k.diff().max()))
    assert starts_q.dtype == starts_k.dtype == torch.int32
    left, right = window_size
    out = []
    for a, b, c, d in zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True):
        own = [x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (q[a:b], k[c:d], v[c:d])]
        at = torch.arange(int(d - c) - int(b - a), int(d - c))[:, None]
        key = torch.arange(int(d - c))[None, :]
        seen = (key <= at + right) & ((key >= at - left) | torch.tensor(left < 0))
        scores = torch.einsum("qhd,khd->hqk", own[0], own[1]) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, own[2]))
    return torch.cat(out).to(q.dtype)


KERNEL = VarlenKernel("stand-in", flash, "scale", groups="enable_gqa")


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_a_packed_forward_and_its_gradient_are_the_same_through_a_kernel(family, monkeypatch):
    model = prepare(tiny_module(family), family)
    lengths = [5, 23, 1, 40, 14]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 97, (sum(lengths),), generator=generator)
    weights = torch.randn(len(tokens), 64, generator=generator)

    def run():
        model.module.zero_grad()
        plan = PackedPlan(lengths)
        hidden = model.body(tokens, plan.position_ids, plan)
        (hidden * weights).sum().backward()
        return hidden.detach(), [p.grad.clone() for _, p in model.parameters() if p.grad is not None]

    padded, gradients = run()
    monkeypatch.setattr(packing, "find_kernel", lambda layer, q, v: KERNEL)
    packed, again = run()
    assert torch.allclose(packed, padded, atol=2e-5 * float(padded.abs().max()))
    for a, b in zip(again, gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-4 * float(b.abs().max()))


def test_chunks_after_a_cached_prefix_are_the_same_through_a_kernel(monkeypatch):
    from areno.engine.rollout.paged import plans
    from areno.engine.rollout.paged.paged_kv_cache import PagedCache
    from areno.engine.rollout.slot_cache import PrefillSpan

    model = prepare(tiny_module("qwen2"), "qwen2")

    def run():
        cache, out = PagedCache(50), []
        cache.reserve(2, 64)
        for spans in ([PrefillSpan([0], 13), PrefillSpan([1], 4)], [PrefillSpan([0], 20, 13), PrefillSpan([1], 9, 4)]):
            plan = plans.PagedPrefillPlan(cache, spans)
            count = sum(span.length for span in spans)
            out.append(model.body(torch.arange(count), plan.position_ids, plan))
        return torch.cat(out)

    with torch.inference_mode():
        expected = run()
        for module in (plans, packing):
            monkeypatch.setattr(module, "find_kernel", lambda layer, q, v: KERNEL)
        got = run()
    assert torch.allclose(got, expected, atol=2e-5 * float(expected.abs().max()))


def test_a_kernel_without_groups_gets_as_many_key_heads_as_query_heads():
    kernel = VarlenKernel("stand-in", flash, "scale", repeats=True)
    q, k, v = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    arguments = ((starts, starts), (4, 4), LayerAttention(0, 0.3))
    assert torch.allclose(kernel.attend(q, k, v, *arguments), KERNEL.attend(q, k, v, *arguments))


def test_a_correct_kernel_passes_and_a_wrong_one_is_refused():
    assert why_not(KERNEL, CPU, torch.float32) is None

    def off_by_one(*tensors, scale, window_size, **more):
        return flash(*tensors, scale=scale, window_size=(window_size[0] + 1, window_size[1]), **more)

    def top_left(q, k, v, starts_q, starts_k, most_q, most_k, **more):
        kept = torch.cat([k[:5], k[9:]]), torch.cat([v[:5], v[9:]])
        return flash(q, *kept, starts_q, starts_q, most_q, most_q, **more)

    def no_gradient(*tensors, **more):
        return flash(*[x.detach() for x in tensors[:3]], *tensors[3:], **more)

    for wrong, reason in (
        (off_by_one, "differ from PyTorch's attention by"),
        (top_left, "differ from PyTorch's attention by"),
        (no_gradient, "does not require grad"),
    ):
        assert reason in str(why_not(dataclasses.replace(KERNEL, call=wrong), CPU, torch.float32))


def test_the_trial_works_in_inference_mode():
    with torch.inference_mode():
        assert why_not(KERNEL, CPU, torch.float32) is None


def test_a_cpu_and_the_native_backend_use_no_kernel_and_log_nothing(caplog):
    q = torch.zeros(3, 2, 8)
    with caplog.at_level(logging.WARNING):
        assert find_kernel(LayerAttention(0, 1.0), q, q) is None
        assert find_kernel(LayerAttention(0, 1.0, explicit=True), OnGpu(), OnGpu()) is None
    assert not caplog.records


class OnGpu:
    """The attributes of a CUDA tensor that ``find_kernel`` reads; no GPU is needed."""

    def __init__(self, dtype=torch.bfloat16, size=64):
        self.device, self.dtype, self.shape = torch.device("cuda"), dtype, (3, 2, size)


@pytest.mark.parametrize(
    ("layer", "q", "reason"),
    [
        (LayerAttention(0, 1.0), OnGpu(torch.float32), "computes in torch.float32"),
        (LayerAttention(0, 1.0), OnGpu(size=320), "query heads have size 320 and the value heads have size 320"),
        (LayerAttention(0, 1.0, sinks=torch.zeros(2)), OnGpu(), "sinks"),
        (LayerAttention(0, 1.0, softcap=20.0), OnGpu(), "soft-caps"),
    ],
)
def test_what_a_kernel_does_not_support_is_logged_once_with_the_reason(layer, q, reason, monkeypatch, caplog):
    monkeypatch.setattr(varlen, "_working", lambda device: (KERNEL,))
    varlen._warn_once.cache_clear()
    assert find_kernel(layer, q, q) is None
    assert find_kernel(layer, q, q) is None
    assert [reason in r.message for r in caplog.records] == [True]


def test_a_gpu_uses_the_first_kernel_that_supports_the_layer(monkeypatch):
    capping = dataclasses.replace(KERNEL, name="capping", softcap=True)
    monkeypatch.setattr(varlen, "_working", lambda device: (KERNEL, capping))
    assert find_kernel(LayerAttention(0, 1.0), OnGpu(), OnGpu()) is KERNEL
    assert find_kernel(LayerAttention(0, 1.0, softcap=9.0), OnGpu(), OnGpu()) is capping


def test_an_old_gpu_uses_no_kernel(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    varlen._warn_once.cache_clear()
    assert varlen._working.__wrapped__(torch.device("cuda")) == ()
    assert "compute capability (7, 5)" in caplog.records[0].message


def test_this_pytorch_has_the_expected_kernel():
    kernel = torch_varlen()
    assert kernel is not None
    assert kernel.scale == "scale"
