"""Figures for Prometheus, by vLLM's names with the prefix `llmbatch:`."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from llmbatch.runtime.online.guests import GuestEnd
from llmbatch.scheduler.output import FinishReason
from llmbatch.serving.shared import Occupancy

_LABEL: Final = ("model_name",)
_SECONDS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_GAPS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE: Final = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_REASONS: Final = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class ServingMetrics:
    """The figures of one endpoint."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(f"llmbatch:{name}", help, _LABEL, registry=self._registry).labels(model)

        def counter(name: str, help: str) -> Counter:
            return Counter(f"llmbatch:{name}", help, _LABEL, registry=self._registry).labels(model)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"llmbatch:{name}", help, _LABEL, buckets=buckets, registry=self._registry)
            return made.labels(model)

        self._running = gauge("num_requests_running", "Sequences that run, of requests and batches.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait, of requests and batches.")
        self._kv = gauge("kv_cache_usage_perc", "The share of the KV memory that is used, 0 to 1.")
        self._guests = gauge("guest_time_share", "The share of the last hour that the work of requests took, 0 to 1.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = counter("generation_tokens", "Tokens of answers.")
        success = Counter(
            "llmbatch:request_success", "Answers, by how they ended.", (*_LABEL, "finished_reason"),
            registry=self._registry,
        )  # fmt: skip  # as few lines as may be
        self._success = {name: success.labels(model, name) for name in ("stop", "length", "error")}
        self.first_token = histogram("time_to_first_token_seconds", "Seconds from a request to a token.", _SECONDS)
        self.between_tokens = histogram("inter_token_latency_seconds", "Seconds between two tokens.", _GAPS)
        self._whole = histogram("e2e_request_latency_seconds", "Seconds from a request to its end.", _WHOLE)

    def ended(self, end: GuestEnd, seconds: float) -> None:
        """Count an answer that took so many seconds."""
        self._success["error" if end.error is not None else _REASONS.get(end.reason, "error")].inc()
        self._whole.observe(seconds)

    def text(self, now: Occupancy) -> bytes:
        """Write all figures, with how full the engine is now."""
        self._running.set(now.running)
        self._waiting.set(now.waiting)
        self._kv.set(now.kv_used)
        self._guests.set(now.guest_share)
        return generate_latest(self._registry)
