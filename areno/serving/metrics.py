"""What ``GET /metrics`` reports, in Prometheus' text format."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from areno.engine.backend import Backend

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_LOAD = (
    (GaugeMetricFamily, "areno_samples_running", "Samples that are being decoded.", "running"),
    (GaugeMetricFamily, "areno_samples_waiting", "Samples that wait for a slot.", "waiting"),
    (GaugeMetricFamily, "areno_kv_tokens_used", "KV tokens in use.", "kv_tokens_used"),
    (GaugeMetricFamily, "areno_kv_tokens", "KV tokens that may be in use at once.", "kv_tokens"),
    (CounterMetricFamily, "areno_generated_tokens", "Tokens sampled.", "generated_total"),
    (CounterMetricFamily, "areno_prefilled_tokens", "Prompt tokens computed.", "prefilled_total"),
    (CounterMetricFamily, "areno_reused_tokens", "Prompt tokens that were computed before.", "reused_total"),
    (CounterMetricFamily, "areno_preemptions", "Samples that gave their slot back for a while.", "preemptions_total"),
    (CounterMetricFamily, "areno_drafted_tokens", "Tokens guessed ahead (--speculate).", "drafted_total"),
    (CounterMetricFamily, "areno_agreed_tokens", "Guessed tokens that were right.", "agreed_total"),
    (CounterMetricFamily, "areno_decode_steps", "Decode steps.", "decode_steps_total"),
    (CounterMetricFamily, "areno_replayed_steps", "Decode steps replayed from CUDA graphs.", "replayed_steps_total"),
)


class ServingMetrics:
    """Counters of one server; those of the engine are read when somebody asks."""

    def __init__(self) -> None:
        self.started_ns = time.time_ns()
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "areno_requests", "Answered HTTP requests.", ["endpoint", "status"], registry=self.registry
        )
        self.disconnects = Counter(
            "areno_disconnects", "Clients that went away before their answer was complete.", registry=self.registry
        )
        self.request_seconds = self._histogram("areno_request_seconds", "From request to the end of the answer.")
        self.first_token = self._histogram(
            "areno_time_to_first_token_seconds", "From request to a sample's first token."
        )
        self.per_token = self._histogram("areno_time_per_output_token_seconds", "Between two tokens of a sample.")
        self.malformed_tool_calls = Counter(
            "areno_malformed_tool_calls", "Tool calls that could not be read and stayed text.", registry=self.registry
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_SECONDS, registry=self.registry)

    def watch(self, engine: Backend) -> None:
        """Report an engine's load from now on."""
        self.registry.register(_EngineLoad(engine))

    def render(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)


class _EngineLoad:
    """Reads the engine's load at the time of the question."""

    def __init__(self, engine: Backend) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        load = self._engine.load()
        for family, name, text, field in _LOAD:
            yield family(name, text, value=getattr(load, field))
