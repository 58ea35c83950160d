"""From what a scheduler says to a sample."""

from quire.top.codec import sample_of
from quire.v1 import info_pb2


def test_what_is_said_is_read() -> None:
    message = info_pb2.GetLoadsResponse(
        running=3,
        waiting_tokens=77,
        uptime_us=5,
        version="0.1.0",
        workers=[
            info_pb2.WorkerLoad(
                worker_id="w", blocks_total=9, blocks_free=2, blocks_evictable=3, blocks_pinned=1
            ),
            info_pb2.WorkerLoad(worker_id="v", timings=info_pb2.LinkTimings(steps=4)),
        ],
        classes=[info_pb2.ClassLoad(name="batch", latencies=info_pb2.Latencies(requests=8))],
        tenants=[info_pb2.TenantLoad(name="acme", served_tokens=6)],
        counters=info_pb2.SchedulerCounters(preemptions=2),
        stall=info_pb2.Stall(reason="why"),
    )
    sample = sample_of(message)
    assert (sample.running, sample.waiting_tokens, sample.uptime_us) == (3, 77, 5)
    first, second = sample.workers
    assert (first.worker_id, first.blocks_held, first.timings) == ("w", 3, None)
    assert second.timings is not None
    assert second.timings.steps == 4
    (batch,) = sample.classes
    assert batch.latencies is not None
    assert (batch.name, batch.latencies.requests) == ("batch", 8)
    assert (sample.tenants[0].name, sample.tenants[0].served_tokens) == ("acme", 6)
    assert (sample.counters["preemptions"], sample.counters["steps"]) == (2, 0)
    assert sample.stall is not None
    assert sample.stall.reason == "why"
    assert sample.latencies is None


def test_names_cannot_tell_the_terminal_to_do_things() -> None:
    tenants = [info_pb2.TenantLoad(name="a\x1b[2J\nb\x9b31m")]
    (tenant,) = sample_of(info_pb2.GetLoadsResponse(tenants=tenants)).tenants
    assert tenant.name.isprintable()
    assert tenant.name == "a\ufffd[2J\ufffdb\ufffd31m"
