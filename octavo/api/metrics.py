"""EngineMetrics: what Prometheus scrapes. Names are vLLM's, and those of the article that describes it.

Counters and gauges are read from the last SchedulerStats, so that one scrape agrees with itself: received = waiting +
running + finished by reason. Latencies are observed here, in the API process.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, UnknownMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from octavo.core.scheduler_stats import STEP_SIZES, SchedulerStats

__all__ = ["EngineMetrics"]

FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
                       160, 640, 2560)  # fmt: skip
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)

HTTP_METHODS = frozenset(["GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH"])
REFUSAL_REASONS = ("queued_reqs", "queued_tokens")

IDLE = SchedulerStats(
    num_waiting=0,
    num_running=0,
    num_used_blocks=0,
    num_blocks=0,
    num_received=0,
    num_finished={"stop": 0, "length": 0, "abort": 0, "error": 0},
    num_preemptions=0,
    prefix_cache_queries=0,
    prefix_cache_hits=0,
    num_prompt_tokens=0,
    num_generation_tokens=0,
)


class EngineMetrics:
    """One engine's metrics in a registry of their own. `stats` is replaced whole as the engine sends them, and
    `memory_roof_share` with it."""

    def __init__(self, model_name: str) -> None:
        self.stats = IDLE
        self.memory_roof_share: float | None = None
        self._registry = CollectorRegistry()
        self._registry.register(_StatsCollector(self, model_name))

        def histogram(name: str, documentation: str, buckets: Iterable[float]) -> Histogram:
            metric = Histogram(
                f"vllm:{name}", documentation, ["model_name"], registry=self._registry, buckets=tuple(buckets)
            )
            return metric.labels(model_name)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN_BUCKETS
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Between a request's tokens, the first excepted.", TOKEN_BUCKETS
        )
        self._wholes = [
            histogram("e2e_request_latency_seconds", "From a request's arrival to its last token.", REQUEST_BUCKETS),
            histogram("request_latency_seconds", "The same as vllm:e2e_request_latency_seconds.", REQUEST_BUCKETS),
        ]
        self._prefill = histogram(
            "prefill_latency_seconds", "From arrival to the first token of a finished request.", REQUEST_BUCKETS
        )
        self._decode = histogram(
            "decode_latency_seconds", "From the first to the last token of a finished request.", REQUEST_BUCKETS
        )
        self._queue = histogram(
            "request_queue_time_seconds", "From a request's arrival to the step that began it.", REQUEST_BUCKETS
        )
        self._refused = Counter(
            "octavo:requests_refused",
            "Requests refused with status 429, by what was full.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        self._http = Counter(
            "http_requests",
            "HTTP requests by the route's path, the method and the kind of status.",
            ["model_name", "handler", "method", "status"],
            registry=self._registry,
        )
        for reason in REFUSAL_REASONS:
            self._refused.labels(model_name, reason)
        self._model_name = model_name

    def count_http(self, method: str, handler: str, status: int) -> None:
        """A request that was answered, by the path of its route ("none" without one)."""
        method = method if method in HTTP_METHODS else "other"
        self._http.labels(self._model_name, handler, method, f"{status // 100}xx").inc()

    def exposition(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self._registry)

    def observe_refusal(self, reason: str) -> None:
        self._refused.labels(self._model_name, reason).inc()

    def observe_queue_time(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def observe_inter_token(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` that came together, `seconds` after the one before."""
        for _ in range(num_tokens):
            self._inter_token.observe(seconds / num_tokens)

    def observe_whole(self, whole: float) -> None:
        """Of a request without tokens of its own, such as an embedding."""
        for histogram in self._wholes:
            histogram.observe(whole)

    def observe_finished(self, to_first_token: float, whole: float) -> None:
        self.observe_whole(whole)
        self._prefill.observe(to_first_token)
        self._decode.observe(whole - to_first_token)


class _StatsCollector(Collector):
    def __init__(self, metrics: EngineMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        stats = self._metrics.stats
        usage = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        finished = stats.num_finished
        yield self._gauge("num_requests_running", "Requests in the running batch.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests waiting to be scheduled.", stats.num_waiting)
        reasons = {"capacity": stats.num_waiting - stats.num_unready, "deferred": stats.num_unready}
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests waiting to be scheduled: for room, or deferred until their grammar is compiled.",
            labels=["model_name", "reason"],
        )
        for reason, number in reasons.items():
            waiting.add_metric([*self._labels, reason], number)
        yield waiting
        yield self._step_sizes(stats)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use, from 0 to 1.", usage)
        yield self._gauge("gpu_cache_usage", "The same as vllm:kv_cache_usage_perc.", usage)
        free = stats.num_blocks - stats.num_used_blocks
        yield self._gauge("num_available_blocks", "KV blocks that are free or hold only cached prefixes.", free)
        swap_usage = stats.num_used_swap_blocks / stats.num_swap_blocks if stats.num_swap_blocks else 0.0
        yield self._gauge("num_requests_swapped", "Requests that wait, swapped out.", stats.num_swapped)
        yield self._gauge("cpu_cache_usage_perc", "Share of the tier's blocks that requests hold.", swap_usage)
        yield self._counter("num_requests", "Requests received by the engine.", stats.num_received)
        yield self._plain("num_requests_succeeded", "Requests that finished.", finished["stop"] + finished["length"])
        yield self._plain("num_requests_failed", "Requests that ended with an error.", finished["error"])
        by_reason = {str(reason): count for reason, count in finished.items()}
        yield self._by("vllm:request_success", "Finished requests by reason.", "finished_reason", by_reason)
        yield self._counter("num_preemptions", "Times a running request was put back.", stats.num_preemptions)
        for name in ("prompt_tokens", "input_tokens"):
            yield self._counter(name, "Prompt tokens of admitted requests.", stats.num_prompt_tokens)
        for name in ("generation_tokens", "generated_tokens"):
            yield self._counter(name, "Tokens generated.", stats.num_generation_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_cache_hits)
        if (share := self._metrics.memory_roof_share) is not None:
            documentation = "Of the rate at which memory is read, that of the latest decode steps."
            yield self._gauge("memory_roof_share", documentation, share, prefix="octavo")
        yield from self._own_counters(stats)

    def _step_sizes(self, stats: SchedulerStats) -> Metric:
        metric = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens that each step of the engine computed.", labels=["model_name"]
        )
        counts = accumulate(stats.num_steps_by_size or [0] * (len(STEP_SIZES) + 1))
        bounds = [*(f"{size}.0" for size in STEP_SIZES), "+Inf"]
        metric.add_metric(self._labels, list(zip(bounds, counts, strict=True)), stats.num_step_tokens)
        return metric

    def _gauge(self, name: str, documentation: str, value: float, prefix: str = "vllm") -> Metric:
        metric = GaugeMetricFamily(f"{prefix}:{name}", documentation, labels=["model_name"])
        metric.add_metric(self._labels, value)
        return metric

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        """Exposed with `_total` at its end."""
        metric = CounterMetricFamily(f"vllm:{name}", documentation, labels=["model_name"])
        metric.add_metric(self._labels, value)
        return metric

    def _plain(self, name: str, documentation: str, value: float) -> Metric:
        """A counter that has no `_total` in its name, which the library's counters can't do without."""
        metric = UnknownMetricFamily(f"vllm:{name}", documentation, labels=["model_name"])
        metric.add_metric(self._labels, value)
        return metric

    def _own_counters(self, stats: SchedulerStats) -> Iterator[Metric]:
        """What vLLM has no name for."""
        num_swaps, num_tier_hits = stats.num_swap_preemptions, stats.tier_prefix_cache_hits
        preemptions = {"recompute": stats.num_preemptions - num_swaps, "swap": num_swaps}
        hits = {"pool": stats.prefix_cache_hits - num_tier_hits, "swap": num_tier_hits}
        copied = {"in": stats.num_blocks_swapped_in, "out": stats.num_blocks_swapped_out}
        copied_bytes = {direction: num_blocks * stats.block_bytes for direction, num_blocks in copied.items()}
        evicted = {"pool": stats.num_evicted_blocks}
        lengths = {
            "predicted": stats.num_predicted_tokens,
            "actual": stats.num_actual_tokens,
            "error": stats.num_mispredicted_tokens,
        }
        yield self._by("octavo:preemptions", "Times a running request was put back.", "mode", preemptions)
        yield self._by("octavo:prefix_cache_hits", "Prompt tokens found in the cache.", "tier", hits)
        yield self._by("octavo:swapped_blocks", "KV blocks copied to the tier or back.", "direction", copied)
        yield self._by("octavo:swapped_bytes", "The same in bytes.", "direction", copied_bytes)
        yield self._by("octavo:evicted_blocks", "Cached KV blocks given up for others.", "tier", evicted)
        yield self._by("octavo:output_length_tokens", "Output lengths of finished requests, added up.", "kind", lengths)

    def _by(self, name: str, documentation: str, label: str, values: Mapping[str, int]) -> Metric:
        metric = CounterMetricFamily(name, documentation, labels=["model_name", label])
        for value, count in values.items():
            metric.add_metric([*self._labels, value], count)
        return metric
