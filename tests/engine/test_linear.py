"""Linear layers through oneDNN: the same function and gradients as PyTorch's, wherever they are used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from areno.engine.model import linear
from areno.engine.model.linear import FastLinear, use_fast_products, use_row_products

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


def twins(inputs: int, outputs: int, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(inputs + outputs)
    ours, exact = nn.Linear(inputs, outputs, bias=bias), nn.Linear(inputs, outputs, bias=bias).double()
    exact.load_state_dict(ours.state_dict())
    ours.__class__ = FastLinear
    return ours, exact


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (700,), (2, 5, 90)])
@pytest.mark.parametrize(("inputs", "outputs"), [(40, 24), (128, 600), (33, 257)])
def test_output_and_gradients_match_float64(inputs, outputs, shape, bias):
    ours, exact = twins(inputs, outputs, bias)
    x = torch.randn(*shape, inputs, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    weights = torch.randn(*shape, outputs)
    got, expected = ours(x), exact(wide)
    (got * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(ours.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)


def test_large_products_go_through_onednn_and_small_ones_do_not(monkeypatch):
    seen = []
    multiply = linear._multiply
    monkeypatch.setattr(linear, "_wide", lambda: True)  # it pays off only with AVX-512
    monkeypatch.setattr(linear, "_multiply", lambda *a: seen.append(a[0].shape) or multiply(*a))
    ours, _ = twins(256, 256, False)
    ours(torch.randn(4, 256))
    assert seen == []
    ours(torch.randn(64, 256))
    assert seen == [(64, 256)]


def test_frozen_weights_get_no_gradient_but_pass_it_on():
    ours, _ = twins(256, 256, True)
    ours.requires_grad_(False)
    x = torch.randn(64, 256, requires_grad=True)
    ours(x).sum().backward()
    assert x.grad is not None
    assert ours.weight.grad is None


def test_only_plain_fp32_layers_change(monkeypatch):
    monkeypatch.setattr(linear, "least_weight", lambda: 0)

    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16), nn.Embedding(4, 4))
    names = list(model.state_dict())
    use_fast_products(model)
    assert [type(child) for child in model] == [FastLinear, Own, nn.Linear, nn.Embedding]
    assert isinstance(model[0], nn.Linear)
    assert list(model.state_dict()) == names


def test_other_processors_keep_what_pytorch_chooses(monkeypatch):
    monkeypatch.setattr(linear, "least_weight", lambda: None)
    model = nn.Sequential(nn.Linear(4, 4))
    use_fast_products(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.skipif(linear.least_weight.__wrapped__() is None, reason="a processor without AVX2")
def test_on_intel_only_large_output_layers_use_our_products(monkeypatch):
    monkeypatch.setattr(linear, "least_weight", linear.least_weight.__wrapped__)
    monkeypatch.setattr(linear, "_is_intel", lambda: True)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 125_000))
    use_fast_products(model)
    assert [type(child) for child in model] == [nn.Linear, FastLinear]
    assert not linear._wide.__wrapped__()
    monkeypatch.setattr(linear, "_is_intel", lambda: False)
    use_fast_products(model)
    assert [type(child) for child in model] == [FastLinear, FastLinear]


def test_few_rows_without_gradients_use_our_kernel_once_it_is_enabled(monkeypatch):
    calls = []

    def product(x, w):
        assert x.is_contiguous()
        calls.append(len(x))
        return x @ w.T

    monkeypatch.setattr(linear, "least_weight", lambda: 0)
    monkeypatch.setattr(linear.row_product, "row_product", product)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 6, bias=False))
    x = torch.randn(3, 5, 8)
    expected = model(x)
    use_fast_products(model)
    with torch.no_grad():
        model(x)
        assert calls == []
        use_row_products(model)
        torch.testing.assert_close(model(x), expected)
        assert calls == [15, 15]
        columns = x[0].T.contiguous().T
        torch.testing.assert_close(model(columns), expected[0])
        assert calls == [15, 15, 5, 5]
        model(torch.randn(257, 8))
    model(x)
    assert calls == [15, 15, 5, 5], "many rows, and rows with gradients, use the libraries"
