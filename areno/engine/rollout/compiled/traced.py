"""The function to compile: one decode step from token ids to the next token ids, including temperature sampling.

Everything that varies between steps is an argument, so one trace works for all batch sizes, context lengths and cache sizes.
"""

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor, nn

from areno.engine.kernels import plain_draw as draw_kernel
from areno.engine.kernels.decode_attention import decode_attention, takes
from areno.engine.model.attention import LayerAttention
from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.token_logprobs import scale_logits
from areno.engine.rollout import inverse_cdf
from areno.engine.rollout.slot_cache import DecodePlan, LayerShape, SlotCache


class KernelPlan(DecodePlan):
    """Decode plan with areno's attention kernel, which reads only each row's context. See also :func:`decode_attention`."""

    def __init__(self, *args: Any, prefixes: tuple[Tensor, Tensor]) -> None:
        super().__init__(*args)
        self._prefixes = prefixes

    def attend(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append keys ``k`` and values ``v`` [rows, heads, size] to the cache, and attend over the cache."""
        if not takes(layer, q):
            return super().attend(layer, q, k, v)
        self.write(layer, k, v)
        keys, values = self.cache.keys[layer.layer], self.cache.values[layer.layer]
        return decode_attention(layer, q, keys, values, self.position_ids, self._prefixes)


class DecodeStep(nn.Module):
    """One decode step of a causal language model with a KV cache.

    Args:
        model: model whose weights become the parameters of this module.
        layers: layers with a KV cache, in the order of ``keys`` and ``values``.
        kernels: whether attention and sampling use :mod:`areno.engine.kernels` where possible.
    """

    def __init__(self, model: CausalLM, layers: Seq[LayerShape], *, kernels: bool = False) -> None:
        super().__init__()
        self.module = model.module
        self.model, self.layers = model, [layer.layer for layer in layers]
        self._kernels = kernels

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        write_at: Tensor,
        columns: Tensor,
        leaders: Tensor,
        shared: Tensor,
        temperatures: Tensor,
        greedy: Tensor,
        u: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Append the tokens to the cache, and sample the next token of each row.

        Args:
            tokens: input token ids [B].
            positions: positions of the input tokens [B].
            write_at: cache column to which each input token is written [B].
            columns: indices of the cache columns to attend to [L].
            leaders: for each row, the index of the first row with the same prefix [B].
            shared: for each row, the length of the shared prefix in tokens [B].
            temperatures: temperature of each row [B].
            greedy: for each row, whether to select the most likely token [B].
            u: uniform random number in [0, 1) for each row, float64 [B].
            keys: cached keys of the layers, each [B, heads, columns, size]; written in place.
            values: cached values of the layers, with the same shapes; written in place.

        Returns:
            Logits [B, V], sampled tokens [B], and the log-probs of these tokens under the temperature-scaled policy [B].
        """
        cache = SlotCache()
        cache.keys, cache.values = (dict(zip(self.layers, tables, strict=True)) for tables in (keys, values))
        step = (cache, positions, write_at, columns)
        plan = KernelPlan(*step, prefixes=(leaders, shared)) if self._kernels else DecodePlan(*step)
        logits = self.model.logits(self.model.body(tokens, positions, plan))
        if self._kernels and logits.dtype == torch.float32:
            size = inverse_cdf.block_size(logits.shape[1])
            return logits, *draw_kernel.plain_draw(logits, temperatures, greedy, u, size)
        return logits, *plain_draw(logits, temperatures, greedy, u)


def plain_draw(logits: Tensor, temperatures: Tensor, greedy: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row, for rows that have neither filters nor logit edits.

    The results equal those of :meth:`SamplingTable.draw` up to rounding.

    Returns:
        Sampled tokens [B], and the log-probs of these tokens [B].
    """
    scaled = scale_logits(logits, temperatures)
    vocab = scaled.shape[1]
    size = inverse_cdf.block_size(vocab)
    blocks = -(-vocab // size)
    # When compiled, this materializes only the largest logit and the sum of each block, not the weights of all tokens.
    table = nn.functional.pad(scaled, (0, blocks * size - vocab), value=-torch.inf).view(-1, blocks, size)
    largest = table.amax(-1)
    highest = largest.amax(-1)
    sums = torch.exp(table - highest[:, None, None]).sum(-1).double()
    normalizer = highest + sums.sum(-1).log().to(highest.dtype)
    block, rest = inverse_cdf.draw_block(sums, u)
    weights = torch.exp(inverse_cdf.take_block(table, block) - highest[:, None])
    drawn = inverse_cdf.draw_inside(weights, block, rest).clamp(max=vocab - 1)
    tokens = torch.where(greedy, _most_likely(table, largest), drawn)
    return tokens, scaled.gather(-1, tokens[:, None])[:, 0] - normalizer


def _most_likely(table: Tensor, largest: Tensor) -> Tensor:
    """Return the most likely token id of each row [B]; among equal logits, the lowest id.

    ``table`` [B, blocks, size] holds the logits of each row, divided into blocks. ``largest`` [B, blocks] holds the maximum of
    each block.
    """
    block = largest.argmax(-1)
    return block * table.shape[2] + inverse_cdf.take_block(table, block).argmax(-1)


def example_inputs(
    layers: Seq[LayerShape], dtype: torch.dtype, vocab: int, rows: int, columns: int, cached: int
) -> tuple[Tensor | list[Tensor], ...]:
    """Return random arguments of :meth:`DecodeStep.forward`, for tracing and validation.

    The step has ``rows`` rows, each with a KV cache of ``cached`` columns. A column holds the keys and values of one token. The
    step attends to the first ``columns`` columns. ``cached`` must be greater than ``columns``.
    """
    random = torch.Generator().manual_seed(0)

    def table(heads: int, size: int) -> Tensor:
        return torch.randn(rows, heads, cached, size, generator=random).to(dtype)

    positions = torch.randint(0, columns, (rows,), generator=random)
    return (
        torch.randint(0, vocab, (rows,), generator=random),
        positions,
        positions.clone(),
        torch.arange(columns),
        torch.arange(rows),
        torch.zeros(rows, dtype=torch.int64),
        torch.ones(rows),
        torch.arange(rows) % 2 == 1,
        torch.rand(rows, dtype=torch.float64, generator=random),
        [table(layer.heads, layer.key_size) for layer in layers],
        [table(layer.heads, layer.value_size) for layer in layers],
    )
