"""CompatMetrics: the metrics under the names of vLLM or SGLang, for their dashboards."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from routed_experts.engine.control.stats import EngineStats
from routed_experts.server.metrics.families import SECONDS
from routed_experts.server.metrics.finished_request import FinishedRequest

Compat = Literal["vllm", "sglang"] | None  # whose names metrics have as well
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_REQUEST_TOKENS = ("request_prompt_tokens request_generation_tokens request_params_max_tokens request_params_n").split()
_REQUEST_SECONDS = (
    "request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds"
).split()
_SAME = "The same under the name of the other server"


class CompatMetrics:
    """Metrics under the names of vLLM or SGLang, each with the label `model_name`, as their dashboards select them.

    A histogram of what only streams show has streamed requests alone. `vllm:iteration_tokens_total` and
    `vllm:request_num_preemptions` have a sum and a count, and one bucket."""

    def __init__(self, compat: Literal["vllm", "sglang"], model_name: str, registry: CollectorRegistry) -> None:
        self.compat: Literal["vllm", "sglang"] = compat
        self._model_name = model_name
        self._prompt_tokens = self._generated_tokens = self._cached_tokens = 0
        self._requests = 0

        def histogram(name: str, buckets: Sequence[float]) -> Histogram:
            family = Histogram(f"{compat}:{name}", _SAME, ["model_name"], buckets=buckets, registry=registry)
            return family.labels(model_name)

        self._first, self._total, self._between = (
            histogram(name, SECONDS)
            for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "inter_token_latency_seconds")
        )
        self._of_vllm: dict[str, Histogram] = {}
        if compat == "vllm":
            self._of_vllm = {name: histogram(name, _TOKENS) for name in _REQUEST_TOKENS}
            self._of_vllm |= {name: histogram(name, SECONDS) for name in _REQUEST_SECONDS}

    def finished(self, request: FinishedRequest) -> None:
        """Count a finished sequence."""
        self._requests += 1
        self._prompt_tokens += request.prompt_tokens
        self._generated_tokens += request.completion_tokens
        self._cached_tokens += request.cached_tokens
        self._total.observe(request.total_s)
        if request.first_token_s is not None:
            self._first.observe(request.first_token_s)
            if request.completion_tokens > 1:
                self._between.observe((request.total_s - request.first_token_s) / (request.completion_tokens - 1))
        values: dict[str, float] = {
            "request_prompt_tokens": request.prompt_tokens,
            "request_generation_tokens": request.completion_tokens,
            "request_params_max_tokens": request.max_tokens,
            "request_params_n": request.n,
        }
        if request.queue_s is not None:
            values |= {
                "request_queue_time_seconds": request.queue_s,
                "request_inference_time_seconds": request.total_s - request.queue_s,
            }
            if request.first_token_s is not None:
                values["request_prefill_time_seconds"] = request.first_token_s - request.queue_s
                values["request_decode_time_seconds"] = request.total_s - request.first_token_s
        for name, metric in self._of_vllm.items():
            if name in values:
                metric.observe(max(0.0, values[name]))

    def collect(self, stats: EngineStats, usage: float, *, page_size: int, context_length: int) -> Iterator[Metric]:
        """The engine's counts. `usage`: fraction of KV pages that running requests hold."""
        num_tokens = stats.total_pages * page_size
        if self.compat == "sglang":
            used = stats.total_pages - stats.free_pages - stats.cached_pages
            yield from self._gauges(
                num_running_reqs=stats.running,
                num_queue_reqs=stats.waiting,
                token_usage=usage,
                num_used_tokens=used * page_size,
                max_total_num_tokens=num_tokens,
                cache_hit_rate=self._cached_tokens / max(1, self._prompt_tokens),
            )
            yield from self._counters(
                prompt_tokens=self._prompt_tokens,
                generation_tokens=self._generated_tokens,
                cached_tokens=self._cached_tokens,
                num_requests=self._requests,
            )
            return
        yield from self._gauges(
            num_requests_running=stats.running, num_requests_waiting=stats.waiting, kv_cache_usage_perc=usage
        )
        yield from self._counters(
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generated_tokens,
            prefix_cache_queries=self._prompt_tokens,
            prefix_cache_hits=self._cached_tokens,
            num_preemptions=stats.preemptions,
            admission_rejections=stats.finished.get("rejected", 0),
        )
        ended = {reason: stats.finished.get(reason, 0) for reason in ("stop", "length", "abort")}
        yield self._by_label(CounterMetricFamily, "request_success", "finished_reason", ended)
        yield self._by_label(GaugeMetricFamily, "num_requests_waiting_by_reason", "reason", {"capacity": stats.waiting})
        tokens = self._prompt_tokens + self._generated_tokens
        yield self._sum_and_count("iteration_tokens_total", tokens, stats.num_steps)
        yield self._sum_and_count("request_num_preemptions", stats.preemptions, self._requests)
        config = {
            "block_size": page_size,
            "num_gpu_blocks": stats.total_pages,
            "kv_cache_size_tokens": num_tokens,
            "kv_cache_max_concurrency": round(num_tokens / context_length, 2),
        }
        family = GaugeMetricFamily("vllm:cache_config_info", _SAME, labels=["model_name", *config])
        family.add_metric([self._model_name, *(str(value) for value in config.values())], 1.0)
        yield family

    def _gauges(self, **values: float) -> Iterator[Metric]:
        for name, value in values.items():
            yield self._by_label(GaugeMetricFamily, name, None, {"": value})

    def _counters(self, **values: float) -> Iterator[Metric]:
        for name, value in values.items():
            yield self._by_label(CounterMetricFamily, name, None, {"": value})

    def _by_label(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        label: str | None,
        values: Mapping[str, float],
    ) -> Metric:
        metric = family(f"{self.compat}:{name}", _SAME, labels=["model_name", *([] if label is None else [label])])
        for value_label, value in values.items():
            metric.add_metric([self._model_name, *([] if label is None else [value_label])], float(value))
        return metric

    def _sum_and_count(self, name: str, total: float, count: int) -> Metric:
        metric = HistogramMetricFamily(f"{self.compat}:{name}", _SAME, labels=["model_name"])
        metric.add_metric([self._model_name], buckets=[("+Inf", count)], sum_value=float(total))
        return metric
