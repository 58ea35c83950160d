"""Samples as schedulers would say them, with as little as a test has to state."""

from dataclasses import fields
from typing import Any

from quire.top.sample import Latencies, PriorityClass, Sample, Tenant, Timings, Worker
from quire.v1 import info_pb2

COUNTERS = tuple(field.name for field in info_pb2.SchedulerCounters.DESCRIPTOR.fields)


def zeros(kind: Any) -> dict[str, Any]:
    """Nothing of everything: 0, "" or None for each field."""
    neutral = {"int": 0, "str": ""}
    return {
        one.name: neutral.get(getattr(one.type, "__name__", str(one.type))) for one in fields(kind)
    }


def timings(**values: int) -> Timings:
    return Timings(**{**zeros(Timings), **values})


def latencies(**values: int) -> Latencies:
    return Latencies(**{**zeros(Latencies), **values})


def worker(worker_id: str = "w0", **values: Any) -> Worker:
    usual = {
        "epoch": 1,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 256,
        "blocks_total": 1000,
        "blocks_free": 1000,
        "device": "cpu",
        "dtype": "float32",
        "version": "0.1.0",
    }
    return Worker(**{**zeros(Worker), **usual, "worker_id": worker_id, **values})


def priority_class(name: str, **values: Any) -> PriorityClass:
    return PriorityClass(**{**zeros(PriorityClass), "name": name, **values})


def tenant(name: str, **values: int) -> Tenant:
    return Tenant(**{**zeros(Tenant), "name": name, **values})


def sample(
    uptime_s: float = 60.0, *, counters: dict[str, int] | None = None, **values: Any
) -> Sample:
    usual = {
        "version": "0.1.0",
        "model": "tiny",
        "uptime_us": int(uptime_s * 1e6),
        "workers": (worker(),),
        "classes": (
            priority_class("interactive", weight=700),
            priority_class("standard", weight=250),
            priority_class("batch", weight=50),
        ),
        "tenants": (),
        "counters": {**dict.fromkeys(COUNTERS, 0), **(counters or {})},
    }
    return Sample(**{**zeros(Sample), **usual, **values})
