"""The settings of a whole set that its starters take, and which process each belongs to.

One table for the commands, which take them as flags, and for `LLM`, which takes them as keywords.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

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
        ),
        "scheduler": (
            ("--prefill-chunk-size", "N", "most tokens of one request in one step"),
            ("--enable-prefix-caching", "true|false", "reuse the KV blocks of equal prefixes"),
        ),
    }
)
"""Flag, kind of value and help, by the process that understands and checks them."""


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
        "--scheduling-policy": LaterSetting("other orders of the queue", ("fcfs",)),
        "--speculative-model": LaterSetting("speculative decoding"),
        "--num-speculative-tokens": LaterSetting("speculative decoding", (0,)),
        "--quantization": LaterSetting("computing with quantized weights"),
        "--trust-remote-code": LaterSetting("model code from the model's folder", (False,)),
        "--enable-metrics": LaterSetting("a metrics endpoint", (False,)),
        "--metrics-port": LaterSetting("a metrics endpoint"),
    }
)
"""Settings of later versions by flag; refused by name, never ignored."""


def keyword(flag: str) -> str:
    """The keyword that `flag` is in Python: `--max-model-len` is `max_model_len`."""
    return flag.removeprefix("--").replace("-", "_")
