"""Settings of the scheduler process."""

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.chassis.settings import SettingsError, setting
from services.chassis.telemetry_settings import TelemetrySettings, metrics_port_setting
from services.scheduler.core.config import (
    DEFAULT_CLASSES,
    Config,
    Eviction,
    Policy,
    PriorityClass,
    TenantPolicy,
)
from services.scheduler.hashing import ALGORITHMS, KEY_BYTES, KEYED
from services.scheduler.policy_flags import read_classes, read_tenant_policy, read_tenants
from services.scheduler.policy_rules import MOST, MOST_SECONDS, MOST_TIME_WHEEL_SLOTS

LATER_FLAGS = {
    "--pipeline-parallel-size": "pipeline parallelism",
    "--speculative-model": "speculative decoding",
    "--num-speculative-tokens": "speculative decoding",
    "--tensor-parallel-size": "tensor parallelism",
}
"""Flags of later versions; refused by name."""

_POLICIES = tuple(policy.value for policy in Policy)
_EVICTIONS = tuple(eviction.value for eviction in Eviction)


def _count(*, help: str, default: int | None = None, most: int = MOST) -> Any:
    return setting(
        help=help,
        default=default,
        check=lambda n: 1 <= n <= most,
        rule=f"must be from 1 to {most}",
    )


def _seconds(*, help: str, default: float) -> Any:
    return setting(
        help=help,
        default=default,
        check=lambda s: 0.001 <= s <= MOST_SECONDS,
        rule=f"must be from 0.001 to {MOST_SECONDS}",
    )


def _read_by(read: Callable[[Sequence[str]], object]) -> Callable[[Sequence[str]], bool]:
    """A check that is passed by what `read` can read."""

    def check(entries: Sequence[str]) -> bool:
        read(entries)
        return True

    return check


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(TelemetrySettings):
    """The scheduler: holds the queues, the token budget and the block tables."""

    listen: tuple[str, ...] = setting(
        help="addresses to serve on, host:port or unix:///path", default=("127.0.0.1:50052",)
    )
    admin_listen: tuple[str, ...] = setting(
        help="addresses of the admin service, and of facts; absent: it is served with the others",
        default=(),
    )
    info_listen: tuple[str, ...] = setting(
        help="more addresses for the info service, alone: facts to read, for quire top", default=()
    )
    tokenizer: str | None = setting(
        help="model whose tokenizer OpenAI gateways are given: an alias, a folder or a hub id",
        default=None,
    )
    max_num_seqs: int | None = _count(
        help="most requests in one step; may only lower what the worker announces"
    )
    max_num_batched_tokens: int | None = _count(
        help="token budget of one step; may only lower what the worker announces"
    )
    prefill_chunk_size: int = _count(help="most tokens of one request in one step", default=512)
    scheduling_policy: str = setting(
        help="order of the queue: fair, priority or fcfs",
        default=Policy.FAIR.value,
        check=lambda name: name in _POLICIES,
        rule=f"must be one of {', '.join(_POLICIES)}",
    )
    priority_class: tuple[str, ...] = setting(
        help="classes, the most important first: NAME:share=N:floor=N:ttft-target=MS",
        default=(),
        check=_read_by(read_classes),
    )
    default_class: str | None = setting(help="class of requests that name none", default=None)
    tenant: tuple[str, ...] = setting(
        help="tenants: NAME:weight=X:max-queued-requests=N:max-queued-tokens=N:max-live-requests=N",
        default=(),
        check=_read_by(lambda entries: read_tenants(entries, TenantPolicy())),
    )
    other_tenants: tuple[str, ...] = setting(
        help="what the other tenants get, the same without a name: weight=X,max-live-requests=N",
        default=(),
        check=_read_by(read_tenant_policy),
    )
    tpot_target: int | None = _count(
        help="wanted time between tokens, milliseconds; cuts prefills", most=MOST_SECONDS * 1000
    )
    ageing: float = _seconds(
        help="seconds that make a request one class more important under the policy priority",
        default=30.0,
    )
    max_queued_requests: int | None = _count(
        help="most requests waiting for their first admission", default=8192
    )
    max_queued_tokens: int | None = _count(
        help="most prompt tokens of those requests", default=16_777_216
    )
    eviction_policy: str = setting(
        help="which cached blocks are given up first: lru or time-wheel",
        default=Eviction.LRU.value,
        check=lambda name: name in _EVICTIONS,
        rule=f"must be one of {', '.join(_EVICTIONS)}",
    )
    time_wheel_slots: int = _count(
        help="slots of the time wheel", default=64, most=MOST_TIME_WHEEL_SLOTS
    )
    partial_block_reuse: bool = setting(
        help="copy the equal beginning of a block of which no whole block is equal", default=False
    )
    max_pinned_share: int = setting(
        help="most blocks of a worker that pinned prefixes may keep, per mille",
        default=250,
        check=lambda n: 0 <= n <= 1000,
        rule="must be from 0 to 1000",
    )
    stall_timeout: float = _seconds(
        help="seconds that work may wait without any step completing before that is a stall",
        default=30.0,
    )
    enable_prefix_caching: bool = setting(
        help="reuse the KV blocks of equal prefixes", default=True
    )
    prefix_caching_hash_algo: str = setting(
        help="hash of the prefix cache: sha256, or blake2b, keyed and a third faster",
        default=ALGORITHMS[0],
        check=lambda name: name in ALGORITHMS,
        rule=f"must be {' or '.join(ALGORITHMS)}",
    )
    prefix_caching_hash_key: str = setting(
        help=f"secret key of blake2b, {2 * KEY_BYTES} hexadecimal digits; made at start if absent",
        default="",
    )
    worker_grace: float = setting(
        help="seconds that requests queue while no worker is attached",
        default=60.0,
        check=lambda s: 0 <= s < 1e9,
        rule="must be >= 0",
    )
    check_block_tables: bool = setting(
        help="send a digest of the block tables with every step, for workers to compare",
        default=False,
    )
    record: str | None = setting(
        help="file that every input of the core is recorded to, for `quire replay`", default=None
    )
    record_hash_only: bool = setting(
        help="record lengths and block hashes in place of token ids", default=False
    )
    drain_timeout: float = setting(
        help="seconds that running requests get after SIGTERM",
        default=30.0,
        check=lambda s: 0 <= s < 1e9,
        rule="must be >= 0",
    )
    metrics_port: int = metrics_port_setting(9462)

    def __post_init__(self) -> None:
        names = [one.name for one in self._classes()]
        if self.default_class is not None and self.default_class not in names:
            raise SettingsError(
                f"quire-scheduler: --default-class must be one of {', '.join(names)}, "
                f"got {self.default_class!r}"
            )
        self._check_hash_key()
        if self.record_hash_only and self.record is None:
            raise SettingsError("quire-scheduler: --record-hash-only needs --record FILE")
        if self.record_hash_only and self.partial_block_reuse:
            raise SettingsError(
                "quire-scheduler: --record-hash-only does not go with --partial-block-reuse, "
                "which compares token ids"
            )

    def _classes(self) -> tuple[PriorityClass, ...]:
        return read_classes(self.priority_class) or DEFAULT_CLASSES

    def _default_class(self) -> str:
        """As given, else "standard" where there is one, else the least important."""
        names = [one.name for one in self._classes()]
        usual = Config().default_class
        if self.default_class is None:
            return usual if usual in names else names[-1]
        return self.default_class

    def hash_key(self) -> bytes:
        """The key of the hash of the prefix cache: b"" for one that takes none, else the given one,
        or a fresh one at each call.
        """
        if self.prefix_caching_hash_algo not in KEYED:
            return b""
        if not self.prefix_caching_hash_key:
            return secrets.token_bytes(KEY_BYTES)
        return bytes.fromhex(self.prefix_caching_hash_key)

    def _check_hash_key(self) -> None:
        """Refuses what is no key without telling it: it may be most of one."""
        digits = self.prefix_caching_hash_key
        if not digits:
            return
        flag = "--prefix-caching-hash-key"
        if self.prefix_caching_hash_algo not in KEYED:
            raise SettingsError(
                f"quire-scheduler: {flag} is given, but {self.prefix_caching_hash_algo} takes "
                f"none; --prefix-caching-hash-algo {' or '.join(sorted(KEYED))} does"
            )
        if len(digits) != 2 * KEY_BYTES or not set(digits) <= set(string.hexdigits):
            raise SettingsError(
                f"quire-scheduler: {flag} must be {2 * KEY_BYTES} hexadecimal digits, "
                f"got {len(digits)} characters"
            )

    def core_config(self) -> Config:
        """The part of the settings that the core decides by."""
        others = read_tenant_policy(self.other_tenants)
        return Config(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefill_chunk_size=self.prefill_chunk_size,
            enable_prefix_caching=self.enable_prefix_caching,
            worker_grace_us=int(self.worker_grace * 1e6),
            check_block_tables=self.check_block_tables,
            policy=Policy(self.scheduling_policy),
            classes=self._classes(),
            default_class=self._default_class(),
            tenants=read_tenants(self.tenant, others),
            other_tenants=others,
            tpot_target_us=None if self.tpot_target is None else self.tpot_target * 1000,
            ageing_us=round(self.ageing * 1000) * 1000,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            eviction=Eviction(self.eviction_policy),
            time_wheel_slots=self.time_wheel_slots,
            partial_block_reuse=self.partial_block_reuse,
            max_pinned_share=self.max_pinned_share,
            stall_timeout_us=round(self.stall_timeout * 1000) * 1000,
        )
