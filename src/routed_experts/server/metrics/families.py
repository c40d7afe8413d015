"""Families of metrics under this project's prefix."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "routed_experts"
SECONDS = tuple(
    float(text) for text in "0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 30 60 120 300 600".split()
)  # upper ends of buckets


def gauges(*metrics: tuple[str, str, float]) -> Iterator[Metric]:
    """Gauges without labels: name, text and value of each."""
    for name, text, value in metrics:
        yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=float(value))


def counters(*metrics: tuple[str, str, float]) -> Iterator[Metric]:
    """Counters without labels: name, text and value of each."""
    for name, text, value in metrics:
        yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=float(value))


def by_label(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    """One family with a series for each value of a label."""
    metric = family(f"{PREFIX}_{name}", text, labels=[label])
    for value_label, value in values.items():
        metric.add_metric([value_label], float(value))
    return metric
