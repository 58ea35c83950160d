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
