"""What the tokenizer is told by flags and environment, read once. Touches no files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from services.chassis.addresses import TARGET_RULE, is_target
from services.chassis.settings import parse, setting
from services.chassis.telemetry_settings import TelemetrySettings, metrics_port_setting

_LATER = MappingProxyType(
    {
        "--tensor-parallel-size": "one model over several devices",
        "--pipeline-parallel-size": "one model over several stages",
        "--speculative-model": "speculative decoding",
        "--num-speculative-tokens": "speculative decoding",
        "--quantization": "computing with quantized weights",
        "--trust-remote-code": "code from the model's folder",
    }
)


def _are_targets(addresses: tuple[str, ...]) -> bool:
    distinct = len(set(addresses)) == len(addresses)
    return bool(addresses) and distinct and all(is_target(address) for address in addresses)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings(TelemetrySettings):
    """Serves text in and text out in front of a scheduler."""

    model: str = setting(
        help="model whose tokenizer to load: an alias, a folder, or a hub id already pulled"
    )
    listen: tuple[str, ...] = setting(
        help="addresses to serve on, host:port or unix:///path", default=("127.0.0.1:50051",)
    )
    scheduler: tuple[str, ...] = setting(
        help="schedulers to send requests to, host:port or unix:///path",
        default=("127.0.0.1:50052",),
        check=_are_targets,
        rule=f"{TARGET_RULE}; several stand with commas between them, each once",
    )
    served_model_name: str | None = setting(
        help="name clients use for the model; default: its own", default=None
    )
    drain_timeout: float = setting(
        help="seconds that running requests may take once the tokenizer is asked to end",
        default=30.0,
        check=lambda value: value >= 0,
        rule="must be >= 0",
    )
    metrics_port: int = metrics_port_setting(9461)
    trace_content: bool = setting(help="put prompts and answers into spans", default=False)


def read_settings(argv: Sequence[str], env: Mapping[str, str]) -> TokenizerSettings:
    """The settings in `argv` and `env`.

    Raises:
        SettingsError: all that is wrong with them, one problem a line.
    """
    return parse(TokenizerSettings, prog="quire-tokenizer", argv=argv, env=env, later=_LATER)
