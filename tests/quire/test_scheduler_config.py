"""The configuration of a scheduler as text, both ways."""

import pytest

from quire.errors import InvalidRequest
from quire.scheduler_config import config_lines, difference, parse_change
from quire.v1 import admin_pb2

Change = admin_pb2.SchedulerConfig
Class = admin_pb2.PriorityClassConfig
Tenant = admin_pb2.TenantConfig

COMPLETE = Change(
    max_num_seqs=8,
    prefill_chunk_size=512,
    policy=admin_pb2.SCHEDULING_POLICY_FAIR,
    classes=[Class(name="a", share=600, floor=300, ttft_target_ms=200)],
    default_class="a",
    tenants=[Tenant(name="acme.eu", weight=2500, max_live_requests=5)],
    other_tenants=Tenant(weight=1000, max_queued_tokens=9),
    ageing_ms=30_000,
    max_pinned_share=250,
    stall_timeout_ms=1500,
    enable_prefix_caching=True,
    eviction=admin_pb2.EVICTION_POLICY_TIME_WHEEL,
    time_wheel_slots=64,
    partial_block_reuse=False,
    worker_grace_ms=60_000,
)

LINES = {
    "max-num-seqs": "8",
    "max-num-batched-tokens": "none",
    "prefill-chunk-size": "512",
    "tpot-target": "none",
    "scheduling-policy": "fair",
    "default-class": "a",
    "ageing": "30",
    "max-queued-requests": "none",
    "max-queued-tokens": "none",
    "max-pinned-share": "250",
    "stall-timeout": "1.5",
    "class.a.share": "600",
    "class.a.floor": "300",
    "class.a.ttft-target": "200",
    "tenant.acme.eu.weight": "2.5",
    "tenant.acme.eu.max-queued-requests": "none",
    "tenant.acme.eu.max-queued-tokens": "none",
    "tenant.acme.eu.max-live-requests": "5",
    "other-tenants.weight": "1",
    "other-tenants.max-queued-requests": "none",
    "other-tenants.max-queued-tokens": "9",
    "other-tenants.max-live-requests": "none",
    "enable-prefix-caching": "true",
    "eviction-policy": "time-wheel",
    "time-wheel-slots": "64",
    "partial-block-reuse": "false",
    "worker-grace": "60",
}


def test_a_configuration_by_name() -> None:
    assert config_lines(COMPLETE) == LINES


def test_what_can_change_is_read_as_it_is_written() -> None:
    fixed = list(LINES)[-5:]
    change = parse_change([f"{name}={text}" for name, text in LINES.items() if name not in fixed])
    for field in ("max_num_batched_tokens", "tpot_target_ms", "max_queued_requests"):
        assert change.HasField(field)
        assert getattr(change, field) == 0  # none
    lines = config_lines(change)
    assert {name: "none" if text == "0" else text for name, text in lines.items()} == {
        name: text for name, text in LINES.items() if name not in fixed
    }


def test_short_and_special_names() -> None:
    assert parse_change(["policy=priority", "tenant.acme.eu=none", "tenant.b=c.weight=0.0014"]) == (
        Change(
            policy=admin_pb2.SCHEDULING_POLICY_PRIORITY,
            tenants=[Tenant(name="acme.eu", remove=True), Tenant(name="b=c", weight=1)],
        )
    )
    quota = parse_change(["tenant.acme.max-live-requests=none"])
    assert quota == Change(tenants=[Tenant(name="acme", max_live_requests=0)])


def test_the_difference_names_what_came_and_went() -> None:
    new = Change()
    new.CopyFrom(COMPLETE)
    new.max_num_seqs = 4
    new.tenants[0].name = "b"
    assert difference(COMPLETE, COMPLETE) == []
    assert difference(COMPLETE, new) == [
        ("max-num-seqs", "8", "4"),
        ("tenant.acme.eu.weight", "2.5", "none"),
        ("tenant.acme.eu.max-live-requests", "5", "none"),
        ("tenant.b.weight", "none", "2.5"),
        ("tenant.b.max-live-requests", "none", "5"),
    ]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("max-num-seqs", "max-num-seqs: must be NAME=VALUE"),
        ("=5", ": is no setting"),
        ("max-num-seq=5", "max-num-seq: is no setting; did you mean max-num-seqs?"),
        ("max-num-seqs=", "max-num-seqs: needs a value"),
        ("max-num-seqs=1.5", "must be a whole number from 0 to 4294967295, got '1.5'"),
        ("max-num-seqs=-1", "must be a whole number from 0 to 4294967295, got '-1'"),
        ("max-num-seqs=4294967296", "must be a whole number from 0 to 4294967295"),
        ("prefill-chunk-size=none", "must be a whole number"),
        ("ageing=1e3", "must be a number from 0 to 4294967, got '1e3'"),
        ("policy=lifo", "scheduling-policy: must be one of fair, priority, fcfs, got 'lifo'"),
        ("class.batch=5", "class.batch: must end with one of .share, .floor, .ttft-target"),
        ("class.batch.weight=5", "must end with one of .share, .floor, .ttft-target"),
        ("tenant.acme=5", "tenant.acme: must end with one of .weight, .max-queued-requests"),
        ("other-tenants=none", "must end with one of .weight"),
        ("eviction-policy=lru", "eviction-policy: cannot change while the scheduler runs"),
        ("prefix-caching-hash-algo=blake2b", "cannot change while the scheduler runs"),
        ("--listen=x", "cannot change while the scheduler runs"),
    ],
)
def test_what_cannot_be_read_is_named(assignment: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_change([assignment])
    assert message.lstrip(": ") in str(caught.value)


def test_all_that_cannot_be_read_is_told_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_change(["a=1", "max-num-seqs=1", "b=2", "max-num-seqs=2"])
    assert str(caught.value) == ("a: is no setting; b: is no setting; max-num-seqs: is given twice")
