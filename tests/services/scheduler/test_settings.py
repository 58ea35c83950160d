"""The scheduler's flags."""

import pytest

from services.chassis.settings import SettingsError, parse
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
