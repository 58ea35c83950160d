"""What the worker is told by flags and environment, read once. Touches no file and no device."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

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
        "--trust-remote-code": "model code from the model's folder",
    }
)

_UNITS = MappingProxyType(
    {"": 1, "B": 1}
    | {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", start=1)}
    | {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of a size such as `1048576`, `512MiB`, `1.5GiB` or `2GB`.

    Raises:
        ValueError: it is not one.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[2] or "").upper() not in _UNITS:
        raise ValueError(f"must be bytes or a size such as 512MiB or 4GiB, got {text!r}")
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


def _is_size(text: str) -> bool:
    try:
        return parse_size(text) > 0
    except ValueError:
        return False


def _one_of(*values: str) -> dict[str, Any]:
    return {"check": lambda value: value in values, "rule": f"must be one of {', '.join(values)}"}


def _between(least: int, most: int) -> dict[str, Any]:
    return {
        "check": lambda value: least <= value <= most,
        "rule": f"must be in {least}..{most}",
    }


def _at_least(least: int) -> dict[str, Any]:
    return {"check": lambda value: value >= least, "rule": f"must be >= {least}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(TelemetrySettings):
    """Loads a model and executes the steps a scheduler plans."""

    model: str = setting(help="model to load: an alias, a folder, or a hub id already pulled")
    scheduler: str = setting(
        help="scheduler to attach to, host:port or unix:///path",
        default="127.0.0.1:50052",
        check=is_target,
        rule=TARGET_RULE,
    )
    served_model_name: str | None = setting(
        help="name clients use for the model; default: its own", default=None
    )
    dtype: str = setting(
        help="data type of the computation; auto is float32 on a CPU, bfloat16 on a GPU",
        default="auto",
        **_one_of("auto", "float32", "bfloat16", "float16"),
    )
    device: str = setting(
        help="where to compute; auto is a GPU where there is one",
        default="auto",
        **_one_of("auto", "cpu", "cuda"),
    )
    max_model_len: int | None = setting(
        help="longest prompt + output, in tokens; default: what the model was made for",
        default=None,
        **_at_least(2),
    )
    block_size: int = setting(help="tokens per KV block", default=16, **_between(1, 4096))
    max_num_seqs: int = setting(help="most requests in one step", default=128, **_between(1, 16384))
    max_num_batched_tokens: int | None = setting(
        help="most tokens in one step; default: 256 on a CPU, 2048 on a GPU",
        default=None,
        **_between(1, 2**24),
    )
    kv_cache_memory: str | None = setting(
        help="memory for the KV cache, in bytes or as 512MiB, 4GiB; default: measured at start",
        default=None,
        check=_is_size,
        rule="must be bytes or a size such as 512MiB or 4GiB",
    )
    gpu_memory_utilization: float | None = setting(
        help="share of the device's memory to use, weights included; default: 0.9. On a CPU: share "
        "of the free memory for the KV cache; default: 0.5, at most 1 GiB",
        default=None,
        check=lambda value: 0 < value <= 1,
        rule="must be in (0, 1]",
    )
    worker_id: str | None = setting(
        help="name of this worker, the same after a restart; default: host name and a number",
        default=None,
        check=lambda value: 1 <= len(value) <= 128,
        rule="must be 1 to 128 characters",
    )
    num_threads: int | None = setting(
        help="threads of the computation on a CPU; default: its share of the processors",
        default=None,
        **_between(1, 1024),
    )
    local_workers: int = setting(
        help="workers that share this machine: its processors, and the memory measured for the KV "
        "cache on a CPU, are divided among so many",
        default=1,
        **_at_least(1),
    )
    step_timeout: float = setting(
        help="seconds that one step may take before health tells that the worker hangs",
        default=30.0,
        check=lambda value: value > 0,
        rule="must be > 0",
    )
    listen: tuple[str, ...] = setting(
        help="addresses for health checks, host:port or unix:///path; default: none", default=()
    )
    drain_timeout: float = setting(
        help="seconds that steps under way may take once the worker is asked to end",
        default=30.0,
        check=lambda value: value >= 0,
        rule="must be >= 0",
    )
    metrics_port: int = metrics_port_setting(9463)

    @property
    def kv_cache_bytes(self) -> int | None:
        """`kv_cache_memory` in bytes."""
        return None if self.kv_cache_memory is None else parse_size(self.kv_cache_memory)


def read_settings(argv: Sequence[str], env: Mapping[str, str]) -> WorkerSettings:
    """The settings in `argv` and `env`.

    Raises:
        SettingsError: all that is wrong with them, one problem a line.
    """
    return parse(WorkerSettings, prog="quire-worker", argv=argv, env=env, later=_LATER)
