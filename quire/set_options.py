"""The settings of a whole set that its starters take, and which process each belongs to.

One table for the commands, which take them as flags, and for `LLM`, which takes them as keywords.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.errors import InvalidRequest, NotSupported, UnknownSetting

OF_THE_SET = ("model", "target", "workers", "tokenizers", "log_dir")
"""Keywords of the set itself, which no single process takes."""

PASSED: Mapping[str, tuple[tuple[str, str, str], ...]] = MappingProxyType(
    {
        "worker": (
            ("--dtype", "NAME", "auto, float32, bfloat16 or float16"),
            ("--device", "NAME", "auto, cpu or cuda"),
            ("--max-model-len", "N", "longest prompt + output, in tokens"),
            ("--max-num-seqs", "N", "most requests in one step"),
            ("--max-num-batched-tokens", "N", "most tokens in one step"),
            ("--block-size", "N", "tokens per KV block"),
            ("--kv-cache-memory", "BYTES", "memory for the KV cache, e.g. 2GiB"),
            ("--gpu-memory-utilization", "X", "share of the device's memory to use"),
            ("--num-threads", "N", "threads of each worker on a CPU; by default its share"),
        ),
        "scheduler": (
            ("--prefill-chunk-size", "N", "most tokens of one request in one step"),
            ("--scheduling-policy", "NAME", "order of the queue: fair, priority or fcfs"),
            ("--priority-class", "CLASS,...", "NAME:share=N:floor=N:ttft-target=MS, repeatable"),
            ("--default-class", "NAME", "class of requests that name none"),
            ("--tenant", "TENANT,...", "NAME:weight=X:max-live-requests=N and so on, repeatable"),
            (
                "--other-tenants",
                "KEY=VALUE,...",
                "the same for all other tenants",
            ),
            ("--tpot-target", "MS", "wanted time between tokens; cuts prefills"),
            ("--ageing", "SECONDS", "that count as one class more important under priority"),
            ("--max-queued-requests", "N", "most requests that wait for their first admission"),
            ("--max-queued-tokens", "N", "most prompt tokens of those requests"),
            ("--enable-prefix-caching", "true|false", "reuse the KV blocks of equal prefixes"),
            ("--prefix-caching-hash-algo", "NAME", "hash of the prefix cache: sha256 or blake2b"),
            ("--prefix-caching-hash-key", "HEX", "secret key of blake2b; by default a fresh one"),
            ("--eviction-policy", "NAME", "which cached blocks go first: lru or time-wheel"),
            ("--time-wheel-slots", "N", "slots of the time wheel"),
            ("--partial-block-reuse", "true|false", "copy the equal beginning of a block"),
            ("--max-pinned-share", "N", "most blocks that pinned prefixes may keep, per mille"),
            ("--stall-timeout", "SECONDS", "without a step, while work waits, that are a stall"),
            ("--admin-listen", "ADDRESS,...", "where quire admin finds the scheduler, repeatable"),
            ("--info-listen", "ADDRESS,...", "where quire top finds the scheduler, repeatable"),
            ("--record", "FILE", "record what the scheduler is given, for quire replay"),
            ("--record-hash-only", "true|false", "leave token ids out of the recording"),
        ),
        "tokenizer": (("--trace-content", "true|false", "put prompts and answers into spans"),),
    }
)
"""Flag, kind of value and help, by the process that understands and checks them.

A kind with `|` is a switch, one with `,` a list, whose flag may be repeated.
"""


SHARED: tuple[tuple[str, str, str], ...] = (
    ("--log-level", "NAME", "least severe log line: debug, info, warning or error"),
    ("--log-format", "NAME", "form of the logs: text or json"),
    ("--enable-metrics", "true|false", "serve metrics of each process in Prometheus' format"),
    ("--metrics-host", "HOST", "where to serve them"),
    ("--metrics-port", "N", "port of the scheduler's metrics; the others follow; 0: any free ones"),
    ("--otlp-metrics-endpoint", "URL", "OTLP receiver (gRPC) to push metrics to"),
    ("--otlp-traces-endpoint", "URL", "OTLP receiver (gRPC) to send traces to"),
    ("--trace-sample-ratio", "X", "share of the traces that are kept, 0 to 1; by default all"),
)
"""The same for what every process understands."""


@dataclass(frozen=True, slots=True)
class LaterSetting:
    """A setting of a later version.

    Attributes:
        what: it would bring.
        neutral: values of its keyword, beside None, that ask for nothing.
    """

    what: str
    neutral: tuple[object, ...] = ()


LATER: Mapping[str, LaterSetting] = MappingProxyType(
    {
        "--tensor-parallel-size": LaterSetting("one model over several devices", (1,)),
        "--pipeline-parallel-size": LaterSetting("one model over several stages", (1,)),
        "--speculative-model": LaterSetting("speculative decoding"),
        "--num-speculative-tokens": LaterSetting("speculative decoding", (0,)),
        "--quantization": LaterSetting("computing with quantized weights"),
        "--trust-remote-code": LaterSetting("model code from the model's folder", (False,)),
    }
)
"""Settings of later versions by flag; refused by name, never ignored."""


def flags_by_process() -> dict[str, tuple[tuple[str, str, str], ...]]:
    """PASSED, with what every process understands."""
    return {process: (*flags, *SHARED) for process, flags in PASSED.items()}


def all_flags() -> tuple[tuple[str, str, str], ...]:
    """Each flag once."""
    return (*(one for flags in PASSED.values() for one in flags), *SHARED)


_FLAG = re.compile(r"--[a-z]+(?:-[a-z]+)*")


def keyword(flag: str) -> str:
    """The keyword that `flag` is in Python: `--max-model-len` is `max_model_len`."""
    return flag.removeprefix("--").replace("-", "_")


def in_keywords(text: str) -> str:
    """`text` with the settings of a set named as in Python, where it names flags."""
    flags = {flag for flag, *_ in all_flags()}
    flags |= {f"--{name.replace('_', '-')}" for name in OF_THE_SET}
    return _FLAG.sub(lambda found: keyword(found[0]) if found[0] in flags else found[0], text)


def flags_of(settings: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """Keywords as flags, by the process that understands and checks them; None is left out.

    Raises:
        NotSupported: one asks for something of a later version; names it.
        UnknownSetting: there is none of that name.
        InvalidRequest: a value is neither text, nor a number, nor true or false.
    """
    later = {keyword(flag): setting for flag, setting in LATER.items()}
    passed = {keyword(flag): flag for flag, *_ in all_flags()}
    for name, value in settings.items():
        if name in later:
            _refuse_later(name, value, later[name])
        elif name not in passed:
            near = difflib.get_close_matches(name, [*passed, *OF_THE_SET], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UnknownSetting(f"{name} is not known{hint}")
        elif value is not None and not isinstance(value, str | int | float):
            raise InvalidRequest(
                name, f"must be text, a number, or true or false, got {type(value).__name__}"
            )
    return {
        process: tuple(
            f"{flag}={_as_text(settings[keyword(flag)])}"
            for flag, *_ in flags
            if settings.get(keyword(flag)) is not None
        )
        for process, flags in flags_by_process().items()
    }


def _refuse_later(name: str, value: object, later: LaterSetting) -> None:
    # True is 1 to Python, and does not ask for nothing here.
    neutral = [(type(one), one) for one in later.neutral]
    if value is not None and (type(value), value) not in neutral:
        raise NotSupported(f"{name}={value!r} ({later.what}) is not available in this version")


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
