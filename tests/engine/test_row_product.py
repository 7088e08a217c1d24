"""Our CPU matrix product for few rows against float64."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from areno.engine.kernels import row_product
from areno.engine.model.linear import FastLinear
from tests.support.threads import torch_threads

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")

KERNEL = row_product.KERNEL


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 15, 16, 17, 33, 50, 64, 65, 68, 129, 200])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (16, 48), (40, 24), (100, 53), (513, 97), (128, 600)])
def test_the_product_matches_float64(rows, inputs, outputs):
    random = torch.Generator().manual_seed(rows * inputs + outputs)
    x, weight = (torch.randn(n, inputs, generator=random) for n in (rows, outputs))
    got = row_product.row_product(x, weight)
    expected = x.double() @ weight.double().T
    bound = x.abs().double() @ weight.abs().double().T  # bounds the rounding error of a sum
    assert got.shape == (rows, outputs)
    assert ((got.double() - expected).abs() <= bound * inputs**0.5 * 2**-23).all()


def test_rows_and_weights_can_be_views_of_larger_tensors():
    x, weight = torch.randn(20, 3, 40)[:, 1], torch.randn(30, 60)[:, :40]
    torch.testing.assert_close(row_product.row_product(x, weight), x @ weight.T)


def test_features_that_are_not_contiguous_are_refused():
    with pytest.raises(RuntimeError, match="contiguous"):
        row_product.row_product(torch.randn(4, 40), torch.randn(40, 30).T)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_other_rows(threads):
    x, weight = torch.randn(100, 203), torch.randn(130, 203)
    with torch_threads(threads):
        whole = row_product.row_product(x, weight)
        for first, last in ((0, 1), (7, 9), (1, 4), (90, 94), (5, 22), (64, 100), (30, 95), (10, 77)):
            assert torch.equal(row_product.row_product(x[first:last], weight), whole[first:last])


@pytest.mark.parametrize("outputs", [16_384, 16_390])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_too_large_for_caches_equal_those_of_small_pieces(outputs, threads):
    x, weight = torch.randn(70, 24), torch.randn(outputs, 24)
    assert 70 * outputs * x.element_size() > 4 << 20  # bypasses the caches if rows are whole cache lines
    pieces = torch.cat([row_product.row_product(x, part) for part in weight.split(1000)], dim=1)
    with torch_threads(threads):
        assert torch.equal(row_product.row_product(x, weight), pieces)
    torch.testing.assert_close(pieces, x @ weight.T)


def test_non_finite_numbers_stay_in_their_row():
    x, weight = torch.randn(20, 32), torch.randn(50, 32)
    x[3] = torch.inf
    got = row_product.row_product(x, weight)
    assert not got[3].isfinite().any()
    assert got[torch.arange(20) != 3].isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
def test_a_traced_layer_calls_it(bias):
    layer = nn.Linear(32, 24, bias=bias).requires_grad_(False)
    x = torch.randn(5, 2, 32)
    expected = layer(x)
    layer.__class__ = FastLinear
    traced = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    assert "row_product" in str(traced.graph)
    torch.testing.assert_close(traced.module()(x), expected)


NARROW = """
import torch
from areno.engine.kernels import library, row_product
library._FAST += ({flag!r},)
assert row_product.KERNEL.build() == ""
assert row_product.KERNEL.load()
for rows, inputs, outputs in [(1, 1, 1), (3, 7, 5), (16, 40, 24), (17, 100, 53), (70, 513, 97), (33, 24, 20000)]:
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    torch.testing.assert_close(row_product.row_product(x, weight).double(), x.double() @ weight.double().T, rtol=0, atol=3e-4)
print("same")
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.long
@pytest.mark.parametrize("flag", ["-mno-avx512f", "-mno-avx"])
def test_processors_with_narrower_vectors_compute_the_same(flag, tmp_path):
    environment = {**os.environ, "ARENO_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", NARROW.format(flag=flag)], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "same\n", done.stderr
