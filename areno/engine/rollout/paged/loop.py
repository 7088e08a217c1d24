"""The rollout loop with a paged KV cache, for GPUs."""

from typing import Any

import torch

from areno.engine.model.causal_lm import CausalLM
from areno.engine.rollout.decode import EagerDecode
from areno.engine.rollout.filters import Filters
from areno.engine.rollout.loop import RolloutLoop
from areno.engine.rollout.paged.graphs import DeviceDecode
from areno.engine.rollout.paged.page_allocator import pages_for
from areno.engine.rollout.paged.paged_kv_cache import PagedCache
from areno.engine.rollout.paged.pipeline import DecodePipeline, Landed
from areno.engine.rollout.paged.plans import PagedDecodePlan, PagedPrefillPlan
from areno.engine.rollout.sampler import Draw
from areno.engine.rollout.scheduler import COLUMN_STEP, round_up
from areno.engine.rollout.sequence import SampleGroup, Sequence
from areno.engine.rollout.slot_cache import ROW_STEP


class PagedRolloutLoop(RolloutLoop):
    """A rollout loop in which decode steps overlap with work on the host.

    A step does not overlap if any row uses top-k, top-p, min-p, logit edits or top log-probs.

    ``eager_decode`` disables CUDA graphs. For the other arguments see :class:`~areno.engine.rollout.loop.RolloutLoop`.
    Speculative decoding and compiled steps are not supported, because these features need a
    :class:`~areno.engine.rollout.slot_cache.SlotCache`.
    """

    cache: PagedCache  # type: ignore[assignment]
    prefill_plan = PagedPrefillPlan

    def __init__(
        self,
        model: CausalLM,
        *,
        budget_tokens: int,
        max_running: int,
        prefix_tokens: int = 0,
        eager_decode: bool = False,
        **rest: Any,
    ) -> None:
        super().__init__(
            model,
            budget_tokens=budget_tokens,
            max_running=max_running,
            prefix_tokens=prefix_tokens,
            decode_mode="eager",
            speculate=0,
            **rest,
        )
        pages = pages_for(budget_tokens, prefix_tokens, max_running)
        columns = self._columns(budget_tokens)
        self.cache = PagedCache(pages, model.device, rows=max_running, columns=columns)
        self.cache.records = self.records
        self.cache.reclaim = self.prefixes.drop_oldest
        self.decode.decoder = EagerDecode(model, self.cache, PagedDecodePlan.of)
        self._eager = eager_decode
        self._make_rows(max_running)

    def _make_rows(self, most: int) -> None:
        self.device_decode = DeviceDecode(self.model, self.cache, most, eager=self._eager)
        self._pipeline = DecodePipeline(self.device_decode)

    def resize(self, budget_tokens: int, prefix_tokens: int) -> None:
        """See :meth:`RolloutLoop.resize`. The old cache is freed at once. The new cache is allocated on first use."""
        self.drop_cache()
        super().resize(budget_tokens, prefix_tokens)
        pages = pages_for(budget_tokens, prefix_tokens, self.device_decode.max_rows)
        self.cache.resize(pages, self._columns(budget_tokens))

    def _columns(self, budget_tokens: int) -> int:
        """Return the maximum length of a sequence, plus space for one more token.

        This token may be sampled after the sequence has ended; see :mod:`pipeline`.
        """
        return min(self.model.context_length or budget_tokens, budget_tokens) + COLUMN_STEP

    def make_room(self, sequences: int) -> None:
        """Ensure that a decode step can process up to ``sequences`` sequences.

        If the cache is too small for this number, wait until no request is pending, and replace the cache.
        """
        if sequences > self.device_decode.max_rows:
            self.wait_idle()
            self.device_decode.release()
            self._make_rows(sequences)
            self.resize(self.scheduler.budget_tokens, self.prefixes.budget_tokens)

    def drop_cache(self) -> None:
        """Free the pages, the CUDA graphs and the prefix cache. Call this method only if no request is pending."""
        self.prefixes.clear()
        self.device_decode.release()
        self.cache.release()

    def _turn(self) -> None:
        self.cache.keep(self.scheduler.held())
        self._prefill_some()
        self._make_room()
        self.cache.keep(self.scheduler.held())
        if self.scheduler.running:
            self._step()

    def _leave(self, done: list[Sequence]) -> None:
        super()._leave(done)
        self.cache.keep(self.scheduler.held())

    def _step(self) -> None:
        running = list(self.scheduler.running)
        if not all(_is_plain(group) for group in {sequence.group for sequence in running}):
            self._step_synchronously()
            return
        self._threads.apply(round_up(len(running), ROW_STEP))
        device = self.device_decode
        launches, replays = device.launches, device.replays
        tokens = self._pipeline.advance(running, self.version)
        if device.launches > launches:
            self.counters.decode_steps_total += 1
            self.counters.replayed_steps_total += device.replays - replays
            if self._progress is not None:
                self._progress.step(len(running), cuda_graph=device.replays > replays)
        self._push(tokens)

    def _step_synchronously(self) -> None:
        self._push(self._pipeline.drain(self.scheduler.running))
        if self.scheduler.running:
            super()._step()

    def _push(self, landed: list[Landed]) -> None:
        if landed:
            sequences, tokens, logprobs = zip(*landed, strict=True)
            self._take(list(sequences), Draw(torch.tensor(tokens), torch.tensor(logprobs, dtype=torch.float64), None))


def _is_plain(group: SampleGroup) -> bool:
    sampling = group.sampling
    edited = any(member.edits is not None for member in group.members)
    return not (edited or Filters.applies_to(sampling) or sampling.top_logprobs)
