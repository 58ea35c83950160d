"""The scheduler's flags."""

import pytest

from services.chassis.settings import SettingsError, parse
from services.scheduler.core.config import (
    DEFAULT_CLASSES,
    Config,
    Eviction,
    Policy,
    PriorityClass,
    TenantPolicy,
)
from services.scheduler.settings import LATER_FLAGS, Settings


def settings(*argv: str) -> Settings:
    return parse(Settings, prog="quire-scheduler", argv=argv, env={}, later=LATER_FLAGS)


def test_defaults() -> None:
    assert settings() == Settings()
    assert settings().core_config().worker_grace_us == 60_000_000


def test_flags_reach_the_core() -> None:
    config = settings("--prefill-chunk-size", "64", "--enable-prefix-caching=false").core_config()
    assert config.prefill_chunk_size == 64
    assert not config.enable_prefix_caching


@pytest.mark.parametrize("flag", sorted(LATER_FLAGS))
def test_flags_of_later_versions_are_refused_by_name(flag: str) -> None:
    with pytest.raises(SettingsError, match=flag):
        settings(flag, "2")


def test_the_hash_of_the_prefix_cache_is_chosen_by_name() -> None:
    assert settings().prefix_caching_hash_algo == "sha256"
    assert settings().hash_key() == b""
    with pytest.raises(SettingsError, match="hash-algo must be sha256 or blake2b, got md5"):
        settings("--prefix-caching-hash-algo", "md5")


def test_a_keyed_hash_gets_a_fresh_key_or_the_given_one() -> None:
    fresh = settings("--prefix-caching-hash-algo", "blake2b")
    assert len(fresh.hash_key()) == 32
    assert fresh.hash_key() != fresh.hash_key()
    digits = "0A" * 32
    given = settings("--prefix-caching-hash-algo", "blake2b", "--prefix-caching-hash-key", digits)
    assert given.hash_key() == b"\n" * 32


@pytest.mark.parametrize("digits", ["0a", "zz" * 32, "0a" * 33, " 0a" * 21 + "0"])
def test_what_is_no_key_is_refused_and_not_told(digits: str) -> None:
    with pytest.raises(SettingsError, match="hash-key must be 64 hexadecimal digits") as refused:
        settings("--prefix-caching-hash-algo", "blake2b", "--prefix-caching-hash-key", digits)
    assert digits not in str(refused.value)


def test_a_key_without_a_hash_that_takes_one_is_refused() -> None:
    with pytest.raises(SettingsError, match="--prefix-caching-hash-algo blake2b"):
        settings("--prefix-caching-hash-key", "0a" * 32)


def problem(*argv: str) -> str:
    with pytest.raises(SettingsError) as caught:
        settings(*argv)
    return str(caught.value)


def test_without_flags_the_core_decides_by_its_own_defaults_with_a_bounded_queue() -> None:
    bounded = Config(max_queued_requests=8192, max_queued_tokens=1 << 24)
    assert settings().core_config() == bounded


def test_every_flag_of_scheduling_reaches_the_core() -> None:
    config = settings(
        "--scheduling-policy=priority",
        "--priority-class=gold:share=900:floor=450:ttft-target=200",
        "--priority-class",
        "silver:share=90,bronze:share=10:floor=1",
        "--default-class=silver",
        "--tenant=acme:weight=2.5:max-live-requests=4,beta:max-queued-tokens=9",
        "--tenant=gamma:weight=0.001",
        "--other-tenants=weight=0.5,max-queued-requests=3",
        "--tpot-target=50",
        "--ageing=1.5",
        "--max-queued-requests=100",
        "--max-queued-tokens=1000",
        "--eviction-policy=time-wheel",
        "--time-wheel-slots=8",
        "--partial-block-reuse",
        "--max-pinned-share=0",
        "--stall-timeout=0.5",
    ).core_config()
    assert config == Config(
        policy=Policy.PRIORITY,
        classes=(
            PriorityClass(name="gold", share=900, floor=450, ttft_target_us=200_000),
            PriorityClass(name="silver", share=90, floor=90),
            PriorityClass(name="bronze", share=10, floor=1),
        ),
        default_class="silver",
        tenants=(
            ("acme", TenantPolicy(weight=2500, max_queued_requests=3, max_live_requests=4)),
            ("beta", TenantPolicy(weight=500, max_queued_requests=3, max_queued_tokens=9)),
            ("gamma", TenantPolicy(weight=1, max_queued_requests=3)),
        ),
        other_tenants=TenantPolicy(weight=500, max_queued_requests=3),
        tpot_target_us=50_000,
        ageing_us=1_500_000,
        max_queued_requests=100,
        max_queued_tokens=1000,
        eviction=Eviction.TIME_WHEEL,
        time_wheel_slots=8,
        partial_block_reuse=True,
        max_pinned_share=0,
        stall_timeout_us=500_000,
    )


def test_the_default_class_is_standard_or_the_least_important() -> None:
    assert settings().core_config().default_class == "standard"
    assert settings().core_config().classes == DEFAULT_CLASSES
    given = settings("--priority-class=a:share=2,b:share=1").core_config()
    assert given.default_class == "b"
    given = settings("--priority-class=standard:share=2,b:share=1").core_config()
    assert given.default_class == "standard"


@pytest.mark.parametrize(
    ("flag", "rule"),
    [
        ("--scheduling-policy=fair-ish", "must be one of fair, priority, fcfs, got fair-ish"),
        ("--eviction-policy=fifo", "must be one of lru, time-wheel, got fifo"),
        ("--tpot-target=0", "must be from 1 to 4000000000, got 0"),
        ("--max-queued-requests=0", "must be from 1 to 4294967295, got 0"),
        ("--max-num-seqs=4294967296", "must be from 1 to 4294967295, got 4294967296"),
        ("--ageing=0", "must be from 0.001 to 4000000, got 0"),
        ("--time-wheel-slots=0", "must be from 1 to 65536, got 0"),
        ("--max-pinned-share=1001", "must be from 0 to 1000, got 1001"),
        ("--stall-timeout=inf", "must be a finite number, got 'inf'"),
        ("--default-class=gold", "must be one of interactive, standard, batch, got 'gold'"),
        ("--priority-class=a", "'a': needs share=1..1000"),
        (
            "--priority-class=:share=1",
            "':share=1': the name must be 1 to 128 bytes of printable text",
        ),
        ("--priority-class=a:share=0", "'a:share=0': share must be from 1 to 1000, got 0"),
        ("--priority-class=a:share=-1", "share must be a whole number, got '-1'"),
        ("--priority-class=a:share=9:floor=10", "floor must be from 1 to the share, which is 9"),
        ("--priority-class=a:share=9:ttft-target=0", "ttft-target must be from 1 to"),
        ("--priority-class=a:share=1:share=2", "share is given twice"),
        ("--priority-class=a:share=1,a:share=2", "'a:share=2': 'a' is given twice"),
        ("--priority-class=a:weight=1", "must be KEY=VALUE with one of share, floor, ttft-target"),
        ("--tenant=a:share=1", "must be KEY=VALUE with one of weight, max-queued-requests"),
        ("--tenant=a:weight=0", "weight must be from 0.001 to 1000 times an ordinary tenant's"),
        ("--tenant=a:weight=x", "weight must be a number, got 'x'"),
        ("--tenant=a:max-live-requests=0", "max-live-requests must be from 1 to 4294967295, got 0"),
        ("--tenant=a,b,a", "'a': 'a' is given twice"),
        ("--other-tenants=a:weight=1", "must be KEY=VALUE with one of weight"),
    ],
)
def test_a_wrong_value_is_told_with_its_flag_and_the_rule(flag: str, rule: str) -> None:
    told = problem(flag)
    assert told.startswith(f"quire-scheduler: {flag.partition('=')[0]} ")
    assert rule in told
    assert "\n" not in told


def test_wrong_values_are_told_together() -> None:
    told = problem("--tenant=a:x=1", "--priority-class=a", "--tpot-target=0")
    assert [line.split()[1] for line in told.splitlines()] == [
        "--priority-class",
        "--tenant",
        "--tpot-target",
    ]


def test_recording_is_off_unless_a_file_is_named() -> None:
    assert settings().record is None
    given = settings("--record=/x/y", "--record-hash-only")
    assert (given.record, given.record_hash_only) == ("/x/y", True)


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (["--record-hash-only"], "--record-hash-only needs --record FILE"),
        (
            ["--record=x", "--record-hash-only", "--partial-block-reuse"],
            "--record-hash-only does not go with --partial-block-reuse, which compares token ids",
        ),
    ],
)
def test_what_cannot_be_recorded_is_told(flags: list[str], rule: str) -> None:
    with pytest.raises(SettingsError, match=rule):
        settings(*flags)
