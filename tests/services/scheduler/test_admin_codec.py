"""The configuration as a message, and changes to it: which are taken, what is said of others."""

from dataclasses import replace
from typing import Any

import pytest

from quire.v1 import admin_pb2
from services.chassis.errors import InvalidArgument
from services.scheduler.admin_codec import changed, config_message
from services.scheduler.core.config import (
    DEFAULT_CLASSES,
    Config,
    Eviction,
    Policy,
    PriorityClass,
    TenantPolicy,
)

FULL = Config(
    max_num_seqs=8,
    max_num_batched_tokens=256,
    prefill_chunk_size=64,
    policy=Policy.PRIORITY,
    classes=(
        PriorityClass(name="a", share=600, floor=300, ttft_target_us=200_000),
        PriorityClass(name="b", share=400, floor=40),
    ),
    default_class="b",
    tenants=(("acme", TenantPolicy(weight=3000, max_live_requests=5)), ("", TenantPolicy())),
    other_tenants=TenantPolicy(max_queued_requests=7, max_queued_tokens=700),
    tpot_target_us=50_000,
    ageing_us=5_000_000,
    max_queued_requests=100,
    max_queued_tokens=10_000,
    eviction=Eviction.TIME_WHEEL,
    time_wheel_slots=32,
    partial_block_reuse=True,
    max_pinned_share=100,
    stall_timeout_us=2_000_000,
)

Change = admin_pb2.SchedulerConfig
Class = admin_pb2.PriorityClassConfig
Tenant = admin_pb2.TenantConfig


def refused(config: Config, **change: Any) -> list[tuple[str, str]]:
    with pytest.raises(InvalidArgument) as caught:
        changed(config, Change(**change))
    return list(caught.value.violations)


@pytest.mark.parametrize("config", [Config(), FULL], ids=["default", "full"])
def test_a_whole_configuration_sent_back_changes_nothing(config: Config) -> None:
    assert changed(config, config_message(config)) == config


def test_what_is_none_is_absent() -> None:
    message = config_message(Config())
    for field in ("max_num_seqs", "tpot_target_ms", "max_queued_requests", "max_queued_tokens"):
        assert not message.HasField(field)
    assert not message.classes[0].HasField("ttft_target_ms")
    assert not message.other_tenants.HasField("max_live_requests")


def test_each_field_changes_alone() -> None:
    assert changed(FULL, Change(max_num_seqs=4)) == replace(FULL, max_num_seqs=4)
    assert changed(FULL, Change(tpot_target_ms=20)) == replace(FULL, tpot_target_us=20_000)
    assert changed(FULL, Change(ageing_ms=1)) == replace(FULL, ageing_us=1000)
    fcfs = Change(policy=admin_pb2.SCHEDULING_POLICY_FCFS)
    assert changed(FULL, fcfs) == replace(FULL, policy=Policy.FCFS)
    assert changed(FULL, Change(default_class="a")) == replace(FULL, default_class="a")
    assert changed(FULL, Change(max_pinned_share=0)) == replace(FULL, max_pinned_share=0)


def test_0_takes_a_bound_away() -> None:
    change = Change(
        max_num_seqs=0,
        max_num_batched_tokens=0,
        tpot_target_ms=0,
        max_queued_requests=0,
        max_queued_tokens=0,
    )
    assert changed(FULL, change) == replace(
        FULL,
        max_num_seqs=None,
        max_num_batched_tokens=None,
        tpot_target_us=None,
        max_queued_requests=None,
        max_queued_tokens=None,
    )


def test_classes_change_by_name_and_keep_their_order() -> None:
    change = Change(
        classes=[Class(name="b", share=100), Class(name="a", floor=1, ttft_target_ms=0)]
    )
    assert changed(FULL, change).classes == (
        PriorityClass(name="a", share=600, floor=1),
        PriorityClass(name="b", share=100, floor=40),
    )


def test_a_new_tenant_starts_with_what_the_others_have() -> None:
    change = Change(tenants=[Tenant(name="new", weight=500), Tenant(name="acme", weight=1)])
    assert changed(FULL, change).tenants == (
        ("acme", TenantPolicy(weight=1, max_live_requests=5)),
        ("", TenantPolicy()),
        ("new", TenantPolicy(weight=500, max_queued_requests=7, max_queued_tokens=700)),
    )


def test_a_new_tenant_starts_with_what_the_others_have_after_the_same_change() -> None:
    change = Change(
        tenants=[Tenant(name="new")], other_tenants=Tenant(max_queued_requests=0, weight=10)
    )
    others = TenantPolicy(weight=10, max_queued_tokens=700)
    assert changed(FULL, change).other_tenants == others
    assert changed(FULL, change).tenants[-1] == ("new", others)


def test_a_tenant_is_removed() -> None:
    change = Change(tenants=[Tenant(name="acme", remove=True)])
    assert changed(FULL, change).tenants == (("", TenantPolicy()),)


def test_everything_wrong_is_told_at_once() -> None:
    assert refused(
        Config(),
        prefill_chunk_size=0,
        max_pinned_share=1001,
        ageing_ms=0,
        max_queued_tokens=2**32,
        policy=9,
        default_class="x",
        classes=[
            Class(name="x"),
            Class(name="batch", share=1001),
            Class(name="standard", floor=251),
        ],
        tenants=[Tenant(name="t", weight=0), Tenant(name="t"), Tenant(name="u", remove=True)],
        other_tenants=Tenant(name="o"),
    ) == [
        ("change.prefill_chunk_size", "must be from 1 to 4294967295, got 0"),
        ("change.ageing_ms", "must be from 1 to 4000000000, got 0"),
        ("change.max_queued_tokens", "must be from 1 to 4294967295, or 0 for none, got 4294967296"),
        ("change.max_pinned_share", "must be from 0 to 1000, got 1001"),
        ("change.policy", "must be one of the named ones, got 9"),
        (
            "change.classes[x]",
            "is no class of this scheduler; they are interactive, standard, batch",
        ),
        ("change.classes[batch].share", "must be from 1 to 1000, got 1001"),
        ("change.classes[standard].floor", "must be from 1 to the share, which is 250, got 251"),
        ("change.default_class", "must be one of interactive, standard, batch"),
        ("change.other_tenants", "must have neither a name nor remove"),
        (
            "change.tenants[t].weight",
            "must be from 0.001 to 1000 times an ordinary tenant's, got 0",
        ),
        ("change.tenants[t]", "is there twice"),
        ("change.tenants[u]", "has no policy of its own"),
    ]


def test_an_empty_change_is_refused() -> None:
    assert refused(Config()) == [("change", "must have at least one field")]


def test_a_class_with_less_share_than_its_floor_is_refused() -> None:
    assert refused(Config(), classes=[Class(name="interactive", share=100)]) == [
        ("change.classes[interactive].floor", "must be from 1 to the share, which is 100, got 700")
    ]


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("enable_prefix_caching", False, "--enable-prefix-caching"),
        ("eviction", admin_pb2.EVICTION_POLICY_TIME_WHEEL, "--eviction-policy"),
        ("time_wheel_slots", 5, "--time-wheel-slots"),
        ("partial_block_reuse", True, "--partial-block-reuse"),
        ("worker_grace_ms", 5, "--worker-grace"),
    ],
)
def test_what_cannot_change_is_refused_by_name(field: str, value: Any, flag: str) -> None:
    assert refused(Config(), **{field: value}) == [
        (f"change.{field}", f"cannot change while the scheduler runs; start it again with {flag}")
    ]


def test_the_number_of_tenants_is_bounded() -> None:
    many = [Tenant(name=str(number)) for number in range(1025)]
    assert len(changed(Config(), Change(tenants=many[1:])).tenants) == 1024
    assert refused(Config(), tenants=many) == [
        ("change.tenants", "must be at most 1024 in all, got 1025")
    ]


def test_names_of_tenants_are_bounded() -> None:
    assert refused(Config(), tenants=[Tenant(name="x" * 129)]) == [
        (
            f"change.tenants['{'x' * 32}'].name",
            "must be at most 128 bytes of printable text, got 129 bytes",
        )
    ]


def test_the_default_classes_are_within_the_rules() -> None:
    classes = [Class(name=one.name, share=one.share) for one in DEFAULT_CLASSES]
    assert changed(Config(), Change(classes=classes)) == Config()
