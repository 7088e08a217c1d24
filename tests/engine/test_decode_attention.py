"""Our CPU attention kernel against the formula in float64."""

from __future__ import annotations

import shutil

import pytest
import torch

from areno.engine.kernels import decode_attention
from areno.engine.kernels.library import KernelLibrary, compiler_missing, load_all
from areno.engine.model.attention import LayerAttention
from tests.support.threads import torch_threads

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")

KERNEL = decode_attention.KERNEL


def attention(layer, q, keys, values, positions, prefixes=None):
    """Run the kernel; without ``prefixes``, rows share no columns."""
    alone = torch.arange(len(q)), torch.zeros(len(q), dtype=torch.int64)
    return decode_attention.decode_attention(layer, q, keys, values, positions, prefixes or alone)


def formula(layer, q, keys, values, positions):
    rows, heads, _ = q.shape
    group = heads // keys.shape[1]
    out = torch.zeros(rows, heads, values.shape[3], dtype=torch.float64)
    for row in range(rows):
        stop = int(positions[row]) + 1
        first = max(0, stop - layer.window) if layer.window else 0
        for head in range(heads):
            seen = keys[row, head // group, first:stop].double()
            weights = torch.softmax(seen @ q[row, head].double() * layer.scale, 0)
            out[row, head] = weights @ values[row, head // group, first:stop].double()
    return out


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "value_size"),
    [(4, 2, 32, 32), (2, 2, 64, 64), (6, 1, 128, 128), (2, 1, 80, 80), (3, 3, 7, 5), (2, 1, 96, 256), (2, 2, 256, 96)],
)
def test_fp32_matches_the_formula(heads, key_heads, size, value_size, window):
    random = torch.Generator().manual_seed(size + heads)
    rows, columns = 9, 70
    cache = torch.randn(rows + 3, key_heads, columns, size, generator=random)  # more slots than rows
    values = torch.randn(rows + 3, key_heads, columns, value_size, generator=random)
    positions = torch.tensor([0, 1, 14, 15, 16, 31, 33, 47, 69])
    q = torch.randn(heads, rows, size, generator=random).transpose(0, 1)  # with the strides that models pass
    layer = LayerAttention(layer=0, scale=1.7 * size**-0.5, window=window)
    expected = formula(layer, q, cache, values, positions)
    got = attention(layer, q, cache, values, positions)
    assert got.shape == (rows, heads, value_size)
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=2e-6)


def test_columns_beyond_a_context_are_never_read():
    keys, values = torch.randn(2, 1, 40, 32), torch.randn(2, 1, 40, 32)
    positions = torch.tensor([4, 20])
    for row, position in enumerate(positions.tolist()):
        keys[row, :, position + 1 :] = values[row, :, position + 1 :] = float("nan")
    got = attention(LayerAttention(0, 0.2), torch.randn(2, 2, 32), keys, values, positions)
    assert got.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5, 30])
def test_shared_columns_are_read_from_the_leader_bit_for_bit(window, dtype):
    keys, values = (torch.randn(6, 2, 70, size).to(dtype) for size in (32, 48))
    leaders, shared = torch.tensor([0, 0, 0, 3, 4, 3]), torch.tensor([20, 20, 20, 33, 0, 33])
    for row in (1, 2, 5):
        for table in (keys, values):
            table[row, :, : shared[row]] = table[leaders[row], :, : shared[row]]
    q, positions = torch.randn(6, 4, 32).to(dtype), torch.tensor([20, 33, 69, 40, 12, 33])
    layer = LayerAttention(0, 0.2, window=window)
    expected = attention(layer, q, keys, values, positions)
    for row in (1, 2, 5):  # their own copies are not read
        keys[row, :, : shared[row]] = values[row, :, : shared[row]] = float("nan")
    assert torch.equal(attention(layer, q, keys, values, positions, (leaders, shared)), expected)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_row_does_not_depend_on_other_rows(threads):
    keys, values = torch.randn(16, 2, 50, 32), torch.randn(16, 2, 50, 32)
    q, positions, layer = torch.randn(16, 4, 32), torch.arange(16) * 3, LayerAttention(0, 0.2)
    with torch_threads(threads):
        whole = attention(layer, q, keys, values, positions)
    for row in range(16):
        one = slice(row, row + 1)
        alone = attention(layer, q[one], keys[one], values[one], positions[one])
        assert torch.equal(alone[0], whole[row])


def test_bf16_is_rounded_once_at_the_end():
    keys, values, q = (torch.randn(*shape).bfloat16() for shape in ((5, 1, 60, 64), (5, 1, 60, 64), (5, 3, 64)))
    positions, layer = torch.tensor([0, 9, 30, 48, 59]), LayerAttention(0, 0.125)
    got = attention(layer, q, keys, values, positions)
    expected = formula(layer, q, keys, values, positions)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=2**-8)


def test_loading_it_leaves_denormal_numbers_alone():
    assert (torch.tensor([1e-40]) * 0.5).item() > 0


def test_what_it_cannot_do_is_left_to_pytorch():
    q = torch.zeros(1, 1, 8)
    assert decode_attention.takes(LayerAttention(0, 1.0, window=3), q)
    assert not decode_attention.takes(LayerAttention(0, 1.0, softcap=30.0), q)
    assert not decode_attention.takes(LayerAttention(0, 1.0, sinks=torch.zeros(1)), q)
    assert not decode_attention.takes(LayerAttention(0, 1.0, explicit=True), q)
    assert not decode_attention.takes(LayerAttention(0, 1.0), q.half())


def test_without_a_compiler_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert "/nowhere/g++" in decode_attention.KERNEL.build()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_failing_compiler_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", shutil.which("false") or "false")
    assert "failed" in decode_attention.KERNEL.build()


def test_the_compiler_may_have_arguments(monkeypatch, tmp_path):
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "env TOOL=1 false")
    assert compiler_missing() == ""
    assert "failed" in decode_attention.KERNEL.build(), "the command ran"
    monkeypatch.setenv("CXX", "nowhere-ccache g++")
    assert "the C++ compiler 'nowhere-ccache' is not installed" in compiler_missing()


def test_a_library_that_cannot_be_loaded_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path))
    library = KernelLibrary("decode_attention")
    library.path().parent.mkdir(parents=True)
    library.path().write_bytes(b"not a library")
    assert not library.load()
    assert "could not be loaded" in load_all([library])
