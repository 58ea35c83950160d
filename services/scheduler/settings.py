"""Settings of the scheduler process."""

from dataclasses import dataclass

from services.chassis.settings import setting
from services.scheduler.core.config import Config

LATER_FLAGS = {
    "--enable-metrics": "Prometheus metrics",
    "--metrics-port": "Prometheus metrics",
    "--pipeline-parallel-size": "pipeline parallelism",
    "--record": "recording of schedules",
    "--scheduling-policy": "other policies than order of arrival",
    "--speculative-model": "speculative decoding",
    "--num-speculative-tokens": "speculative decoding",
    "--tensor-parallel-size": "tensor parallelism",
}
"""Flags of later versions; refused by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The scheduler: holds the queues, the token budget and the block tables."""

    listen: tuple[str, ...] = setting(
        help="addresses to serve on, host:port or unix:///path", default=("127.0.0.1:50052",)
    )
    max_num_seqs: int | None = setting(
        help="most requests in one step; may only lower what the worker announces",
        default=None,
        check=lambda n: n >= 1,
        rule="must be >= 1",
    )
    max_num_batched_tokens: int | None = setting(
        help="token budget of one step; may only lower what the worker announces",
        default=None,
        check=lambda n: n >= 1,
        rule="must be >= 1",
    )
    prefill_chunk_size: int = setting(
        help="most tokens of one request in one step",
        default=512,
        check=lambda n: n >= 1,
        rule="must be >= 1",
    )
    enable_prefix_caching: bool = setting(
        help="reuse the KV blocks of equal prefixes", default=True
    )
    worker_grace: float = setting(
        help="seconds that requests queue while no worker is attached",
        default=60.0,
        check=lambda s: 0 <= s < 1e9,
        rule="must be >= 0",
    )
    step_timeout: float = setting(
        help="seconds that every worker may owe an answer before the service tells that it hangs",
        default=30.0,
        check=lambda s: 0 < s < 1e9,
        rule="must be > 0",
    )
    check_block_tables: bool = setting(
        help="send a digest of the block tables with every step, for workers to compare",
        default=False,
    )
    drain_timeout: float = setting(
        help="seconds that running requests get after SIGTERM",
        default=30.0,
        check=lambda s: 0 <= s < 1e9,
        rule="must be >= 0",
    )
    log_level: str = setting(
        help="debug, info, warning or error",
        default="info",
        check=lambda level: level in ("debug", "info", "warning", "error"),
        rule="must be debug, info, warning or error",
    )

    def core_config(self) -> Config:
        """The part of the settings that the core decides by."""
        return Config(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefill_chunk_size=self.prefill_chunk_size,
            enable_prefix_caching=self.enable_prefix_caching,
            worker_grace_us=int(self.worker_grace * 1e6),
            check_block_tables=self.check_block_tables,
        )
