"""Choice of the decode attention: candidates must pass a small trial."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from areno.engine.model.attention import LayerAttention
from areno.engine.rollout.paged import backends
from areno.engine.rollout.paged.backends import GATHER, AttentionBackend, best_backend, gather_attention, why_not

CPU = torch.device("cpu")


def exact(layer, q, keys, values, table, positions):
    """Compute attention row by row in float64."""
    out = []
    for row, position in enumerate(positions.tolist()):
        first = 0 if layer.window is None else max(position + 1 - layer.window, 0)
        k, v = (pool[table[row].long()].flatten(0, 1)[first : position + 1].double() for pool in (keys, values))
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("hd,nhd->hn", q[row].double(), k.repeat_interleave(group, 1)) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        mass = scores.exp()
        total = mass.sum(-1, keepdim=True) + (layer.sinks.double().exp()[:, None] if layer.sinks is not None else 0)
        out.append(torch.einsum("hn,nhd->hd", mass / total, v.repeat_interleave(group, 1)))
    return torch.stack(out)


@pytest.mark.parametrize("window", [None, 5, 17])
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}])
def test_gathered_pages_give_exact_attention(window, extra):
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(15, generator=generator).int().view(3, 5) + 1
    keys, values = (torch.randn(16, 4, 2, 8, generator=generator) for _ in range(2))
    q = torch.randn(3, 4, 8, generator=generator)
    layer, positions = LayerAttention(0, 0.4, window=window, **extra), torch.tensor([0, 19, 10])
    got = gather_attention(layer, q, keys, values, table, positions, 20)
    assert torch.allclose(got.double(), exact(layer, q, keys, values, table, positions), atol=1e-6)


def test_a_correct_candidate_passes_and_a_wrong_one_fails_with_a_reason():
    assert why_not(GATHER, CPU, torch.float32, 16) is None
    wrong = AttentionBackend("wrong", lambda *arguments: 1.2 * gather_attention(*arguments), fixed_shape=True)
    assert "differ from those of PyTorch's attention by" in str(why_not(wrong, CPU, torch.float32, 16))
    late = AttentionBackend(
        "late", lambda la, q, k, v, t, p, c: gather_attention(la, q, k, v, t, p - 1, c), fixed_shape=True
    )
    assert "differ from those of PyTorch's attention by" in str(why_not(late, CPU, torch.float32, 16))

    def raises(*arguments):
        raise RuntimeError("page size 16 must be a multiple of 256")

    assert why_not(AttentionBackend("none", raises, True), CPU, torch.float32, 16) == (
        "RuntimeError: page size 16 must be a multiple of 256"
    )


def test_a_cpu_gathers_without_a_word(caplog):
    with caplog.at_level(logging.WARNING):
        assert best_backend(CPU, torch.float32, 16) is GATHER
    assert not caplog.records


@pytest.mark.parametrize(("problem", "chosen"), [(None, "triton"), ("it is broken", "gather")])
def test_the_kernel_is_chosen_if_it_works_and_the_fallback_logs_why(problem, chosen, monkeypatch, caplog):
    """Runs without a GPU: both the device and the outcome of the trial are fakes."""
    monkeypatch.setattr(backends, "why_not", lambda *_: problem)
    gpu = SimpleNamespace(type="cuda")
    assert best_backend.__wrapped__(gpu, torch.bfloat16, 16).name == chosen
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    expected = "decode attention uses the slow backend gather, because the backend triton does not work: it is broken"
    assert warnings == ([expected] if chosen == "gather" else [])
