"""The scheduler's metrics under the names of vLLM, for dashboards, autoscalers and gateways.

Made at each scrape from our own families, so nothing is counted twice. What Quire does not have
(adapters, drafts, images, a sleeping engine) is left out rather than shown as zero.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

Families = Mapping[str, Metric]

TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(step * 10**zeros) for zeros in range(7) for step in (1, 2, 5))[:-2]
STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))

_GAUGES = (
    ("num_requests_running", "quire_scheduler_running", "Requests that run."),
    ("num_requests_waiting", "quire_scheduler_waiting", "Requests that wait."),
    (
        "avg_time_per_token",
        "quire_scheduler_time_per_token_seconds",
        "Mean time between two tokens of one request in the last half minute, seconds.",
    ),
)
"""Name, the family of ours whose values are summed, what it is."""

_COUNTERS = (
    ("num_requests", "quire_scheduler_requests_accepted", "Requests accepted."),
    ("num_preemptions", "quire_scheduler_preemptions", "Requests that gave way."),
    (
        "prompt_tokens",
        "quire_scheduler_admitted_prompt_tokens",
        "Prompt tokens of requests that began, cached ones included.",
    ),
    ("generation_tokens", "quire_scheduler_generation_tokens", "Tokens generated."),
    (
        "prefix_cache_queries",
        "quire_scheduler_prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
    ),
    ("prefix_cache_hits", "quire_scheduler_prefix_cache_hits", "Tokens found in it."),
)

_HISTOGRAMS = (
    (
        "time_to_first_token_seconds",
        "quire_request_time_to_first_token_seconds",
        TTFT_S,
        "Time from the arrival of a request to its first token.",
    ),
    (
        "inter_token_latency_seconds",
        "quire_request_inter_token_latency_seconds",
        PER_TOKEN_S,
        "Time between two tokens of one request.",
    ),
    (
        "request_time_per_output_token_seconds",
        "quire_request_time_per_output_token_seconds",
        PER_TOKEN_S,
        "A request's mean time per token after the first.",
    ),
    (
        "e2e_request_latency_seconds",
        "quire_request_duration_seconds",
        LATENCY_S,
        "Time from the arrival of a request to its end.",
    ),
    (
        "request_queue_time_seconds",
        "quire_request_queue_time_seconds",
        LATENCY_S,
        "Time from the arrival of a request to its first step.",
    ),
    (
        "request_inference_time_seconds",
        "quire_request_inference_time_seconds",
        LATENCY_S,
        "Time from a request's first step to its end.",
    ),
    (
        "request_prefill_time_seconds",
        "quire_request_prefill_time_seconds",
        LATENCY_S,
        "Time from a request's first step to its first token.",
    ),
    (
        "request_decode_time_seconds",
        "quire_request_decode_time_seconds",
        LATENCY_S,
        "Time from a request's first token to its end.",
    ),
    (
        "request_prompt_tokens",
        "quire_request_prompt_tokens",
        TOKENS,
        "Tokens of a prompt.",
    ),
    (
        "request_generation_tokens",
        "quire_request_generation_tokens",
        TOKENS,
        "Tokens generated for a request.",
    ),
    (
        "request_max_num_generation_tokens",
        "quire_request_generation_tokens",
        TOKENS,
        "Most tokens of the answers of a request; it has one here.",
    ),
    (
        "request_params_max_tokens",
        "quire_request_max_tokens",
        TOKENS,
        "The max_tokens of requests that have one.",
    ),
    (
        "request_prefill_kv_computed_tokens",
        "quire_request_computed_prompt_tokens",
        TOKENS,
        "Prompt tokens not found in the prefix cache.",
    ),
    ("iteration_tokens_total", "quire_step_tokens", STEP_TOKENS, "Tokens in a step."),
)
"""Name, the family of ours, vLLM's bounds, what it is."""

_FINISHED = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "replaced": "abort",
    "deadline": "abort",
    "shed": "abort",
    "failed": "error",
    "no_worker": "error",
    "cannot_fit": "error",
    "fault": "error",
}
"""vLLM's finished reason of each way that a request can end."""

_SOURCES = {"computed": "local_compute", "cached": "local_cache_hit"}

_ENGINE = "0"
"""All workers together are shown as one engine."""


def vllm_families(ours: Families) -> Iterator[Metric]:
    """The families under vLLM's names.

    Args:
        ours: the scheduler's families by name.
    """
    labels = {"model_name": _info(ours)["model"], "engine": _ENGINE}
    made = _Made(labels)
    for name, source, text in _GAUGES:
        yield made.gauge(name, text, [({}, _total(ours, source))])
    yield from _capacity(ours, made)
    yield from _throughput(ours, made)
    for name, source, text in _COUNTERS:
        yield made.counter(name, text, [({}, _total(ours, source))])
    yield from _by_label(ours, made)
    for name, source, bounds, text in _HISTOGRAMS:
        yield made.histogram(name, text, ours[source], bounds)
    yield _params_n(ours, made)


@dataclass(frozen=True, slots=True)
class _Made:
    """Makes families with these labels in front of their own."""

    labels: Mapping[str, str]

    def gauge(
        self, name: str, text: str, points: Iterable[tuple[Mapping[str, str], float]]
    ) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text)
        for labels, value in points:
            family.add_sample(family.name, {**self.labels, **labels}, value)
        return family

    def counter(
        self, name: str, text: str, points: Iterable[tuple[Mapping[str, str], float]]
    ) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text)
        for labels, value in points:
            family.add_sample(f"{family.name}_total", {**self.labels, **labels}, value)
        return family

    def histogram(self, name: str, text: str, source: Metric, bounds: Iterable[float]) -> Metric:
        """All series of `source` together, in these of its buckets."""
        counts = dict.fromkeys((*bounds, float("inf")), 0.0)
        total = 0.0
        for sample in source.samples:
            if sample.name.endswith("_sum"):
                total += sample.value
            elif sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                if bound in counts:
                    counts[bound] += sample.value
        return self.buckets(name, text, counts, total)

    def buckets(self, name: str, text: str, counts: Mapping[float, float], total: float) -> Metric:
        """From cumulated counts by bound, infinity last."""
        family = HistogramMetricFamily(f"vllm:{name}", text)
        for bound, count in counts.items():
            le = floatToGoString(bound)  # type: ignore[no-untyped-call]  # it says no types
            labels = {**self.labels, "le": le}
            family.add_sample(f"{family.name}_bucket", labels, count)
        family.add_sample(f"{family.name}_count", {**self.labels}, counts[float("inf")])
        family.add_sample(f"{family.name}_sum", {**self.labels}, total)
        return family


def _capacity(ours: Families, made: _Made) -> Iterator[Metric]:
    """What waits for it, how much of it is taken, and how much there is."""
    waiting = _total(ours, "quire_scheduler_waiting")
    yield made.gauge(
        "num_requests_waiting_by_reason",
        "Requests that wait; here all for a seat, for memory or for a worker.",
        [({"reason": "capacity"}, waiting), ({"reason": "deferred"}, 0.0)],
    )
    held = _total(ours, "quire_scheduler_kv_blocks", lambda labels: labels["state"] == "held")
    blocks = _total(ours, "quire_scheduler_kv_blocks")
    usage = held / blocks if blocks else 0.0
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
        yield made.gauge(name, "Share of the KV blocks that requests hold, 0 to 1.", [({}, usage)])
    info = _info(ours)
    labels = {
        "block_size": info["block_size"],
        "num_gpu_blocks": str(int(blocks)),
        "enable_prefix_caching": str(bool(info["prefix_hash"])),
        "prefix_caching_hash_algo": info["prefix_hash"],
    }
    text = "1; the KV cache of all workers, in the labels."
    yield made.gauge("cache_config_info", text, [(labels, 1.0)])


def _throughput(ours: Families, made: _Made) -> Iterator[Metric]:
    """Prefill and decode; the totals are gauges since their names have no `_total`."""
    for kind in ("prefill", "decode"):

        def of_kind(labels: Mapping[str, str], kind: str = kind) -> bool:
            return labels["kind"] == kind

        yield made.gauge(
            f"num_{kind}_tokens",
            f"Tokens of {kind} planned since start.",
            [({}, _total(ours, "quire_scheduler_computed_tokens", of_kind))],
        )
        yield made.gauge(
            f"{kind}_throughput",
            f"Tokens of {kind} per second in the last half minute.",
            [({}, _total(ours, "quire_scheduler_throughput", of_kind))],
        )


def _by_label(ours: Families, made: _Made) -> Iterator[Metric]:
    finished = dict.fromkeys(_FINISHED.values(), 0.0)
    for sample in ours["quire_scheduler_requests_ended"].samples:
        finished[_FINISHED[sample.labels["reason"]]] += sample.value
    yield made.counter(
        "request_success",
        "Requests that ended, by how.",
        [({"finished_reason": reason}, count) for reason, count in finished.items()],
    )
    sources = {
        _SOURCES[sample.labels["source"]]: sample.value
        for sample in ours["quire_scheduler_admitted_prompt_tokens"].samples
    }
    yield made.counter(
        "prompt_tokens_by_source",
        "Prompt tokens of requests that began, by where they come from.",
        [({"source": source}, count) for source, count in sources.items()],
    )
    yield made.counter(
        "prompt_tokens_cached",
        "Prompt tokens found in the cache.",
        [({}, sources[_SOURCES["cached"]])],
    )


def _params_n(ours: Families, made: _Made) -> Metric:
    count = sum(
        sample.value
        for sample in ours["quire_request_duration_seconds"].samples
        if sample.name.endswith("_count")
    )
    counts = dict.fromkeys((1.0, 2.0, 5.0, 10.0, 20.0, float("inf")), count)
    return made.buckets("request_params_n", "Answers asked for at once; one here.", counts, count)


def _info(ours: Families) -> Mapping[str, str]:
    return ours["quire_scheduler_info"].samples[0].labels


def _total(
    ours: Families, name: str, chosen: Callable[[Mapping[str, str]], bool] = lambda labels: True
) -> float:
    """Sum over the series; zero where there is none, as of workers while none is attached."""
    if name not in ours:
        return 0.0
    return sum(sample.value for sample in ours[name].samples if chosen(sample.labels))
