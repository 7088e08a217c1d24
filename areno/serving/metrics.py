"""The Prometheus metrics of ``GET /metrics``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from areno.errors import EngineError

if TYPE_CHECKING:
    from areno.engine.backend import Backend

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_LOAD = (
    (GaugeMetricFamily, "areno_samples_running", "Samples being decoded.", "running"),
    (GaugeMetricFamily, "areno_samples_waiting", "Samples waiting for a slot.", "waiting"),
    (GaugeMetricFamily, "areno_kv_tokens_used", "Tokens in the KV cache.", "kv_tokens_used"),
    (GaugeMetricFamily, "areno_kv_tokens", "Capacity of the KV cache in tokens.", "kv_tokens"),
    (CounterMetricFamily, "areno_generated_tokens", "Tokens sampled.", "generated_total"),
    (CounterMetricFamily, "areno_prefilled_tokens", "Prompt tokens prefilled.", "prefilled_total"),
    (CounterMetricFamily, "areno_reused_tokens", "Prompt tokens served from the prefix cache.", "reused_total"),
    (CounterMetricFamily, "areno_preemptions", "Preempted samples.", "preemptions_total"),
    (
        CounterMetricFamily,
        "areno_drafted_tokens",
        "Draft tokens of speculative decoding (--speculate).",
        "drafted_total",
    ),
    (CounterMetricFamily, "areno_agreed_tokens", "Accepted draft tokens.", "agreed_total"),
    (CounterMetricFamily, "areno_decode_steps", "Decode steps.", "decode_steps_total"),
    (CounterMetricFamily, "areno_replayed_steps", "Decode steps replayed from CUDA graphs.", "replayed_steps_total"),
)


class ServingMetrics:
    """Prometheus metrics of one server. The server records requests and latencies when they occur.

    The engine's current load is read each time the metrics are rendered.
    """

    def __init__(self) -> None:
        self.started_ns = time.time_ns()
        self.registry = CollectorRegistry()
        self.requests = Counter("areno_requests", "HTTP requests.", ["endpoint", "status"], registry=self.registry)
        self.disconnects = Counter(
            "areno_disconnects", "Clients that disconnected before their response was complete.", registry=self.registry
        )
        self.request_seconds = self._histogram(
            "areno_request_seconds", "Time from the request to the end of the response."
        )
        self.first_token = self._histogram(
            "areno_time_to_first_token_seconds", "Time between submission to the engine and a sample's first token."
        )
        self.per_token = self._histogram(
            "areno_time_per_output_token_seconds", "Time between consecutive tokens of a sample."
        )
        self.malformed_tool_calls = Counter(
            "areno_malformed_tool_calls",
            "Tool calls that could not be parsed and were returned as text.",
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_SECONDS, registry=self.registry)

    def watch(self, engine: Backend) -> None:
        """Export the load of the engine, such as the numbers of running and waiting samples, as metrics."""
        self.registry.register(_EngineLoad(engine))

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineLoad:
    def __init__(self, engine: Backend) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        try:
            load = self._engine.load()
        except EngineError:  # the engine has failed; the other metrics remain
            return
        for family, name, text, field in _LOAD:
            yield family(name, text, value=getattr(load, field))
