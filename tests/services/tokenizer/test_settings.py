import pytest

from services.chassis.settings import SettingsError
from services.tokenizer.settings import TokenizerSettings, read_settings


def test_defaults() -> None:
    assert read_settings(["--model", "m"], {}) == TokenizerSettings(
        model="m",
        listen=("127.0.0.1:50051",),
        scheduler=("127.0.0.1:50052",),
        served_model_name=None,
        drain_timeout=30.0,
        log_level="info",
    )


def test_flags_and_variables() -> None:
    env = {
        "QUIRE_MODEL": "m",
        "QUIRE_SCHEDULER": "unix:///s.sock, 127.0.0.1:9",
        "QUIRE_LOG_LEVEL": "debug",
    }
    read = read_settings(
        [
            "--listen=127.0.0.1:1,unix:///t.sock",
            "--served-model-name=n",
            "--drain-timeout=0",
            "--log-level=error",
        ],
        env,
    )
    assert read == TokenizerSettings(
        model="m",
        listen=("127.0.0.1:1", "unix:///t.sock"),
        scheduler=("unix:///s.sock", "127.0.0.1:9"),
        served_model_name="n",
        drain_timeout=0.0,
        log_level="error",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model is required"),
        (["--model=m", "--drain-timeout=-1"], "--drain-timeout must be >= 0, got -1"),
        (
            ["--model=m", "--scheduler=a:1,b"],
            "--scheduler must be host:port with a port .*, got a:1,b",
        ),
        (["--model=m", "--scheduler=a:1,a:1"], "with commas between them, each once, got a:1,a:1"),
        (["--model=m", "--scheduler=,"], "--scheduler must be host:port"),
        (["--model=m", "--log-level=loud"], "--log-level must be one of debug, info"),
        (["--model=m", "--trust-remote-code"], r"--trust-remote-code \(code from the model's"),
        (["--model=m", "--tensor-parallel-size=2"], "is not available in this version"),
        (["--model=m", "--metrics-port=x"], "--metrics-port must be a whole number"),
        (["--model=m", "--otlp-traces-endpoint=h:1"], "must begin with http:// or https://, got h"),
        (["--model=m", "--trace-sample-ratio=1.5"], r"must be in \[0, 1\], got 1.5"),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_settings(arguments, {})
