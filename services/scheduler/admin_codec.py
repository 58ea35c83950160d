"""Between the messages of the admin service and the scheduler's own types."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from quire.v1 import admin_pb2
from services.chassis.errors import (
    FailedPrecondition,
    InvalidArgument,
    ServiceError,
    Violations,
)
from services.scheduler import codec
from services.scheduler.audit import Change, Origin
from services.scheduler.core.chain import DIGEST_BYTES
from services.scheduler.core.config import Config, Eviction, Policy, PriorityClass, TenantPolicy
from services.scheduler.core.plan import Limits, Pin, Refusal, TokenArray
from services.scheduler.hashing import explicit_salt, tenant_salt
from services.scheduler.policy_rules import (
    MOST,
    MOST_SECONDS,
    MOST_TENANTS,
    class_problems,
    name_problem,
    tenant_name_problem,
    tenant_problems,
)

_MAX_ACTOR_BYTES = 128
_MAX_REASON_BYTES = 512

_POLICIES: Mapping[Policy, admin_pb2.SchedulingPolicy] = MappingProxyType(
    {
        Policy.FAIR: admin_pb2.SCHEDULING_POLICY_FAIR,
        Policy.PRIORITY: admin_pb2.SCHEDULING_POLICY_PRIORITY,
        Policy.FCFS: admin_pb2.SCHEDULING_POLICY_FCFS,
    }
)

_EVICTIONS: Mapping[Eviction, admin_pb2.EvictionPolicy] = MappingProxyType(
    {
        Eviction.LRU: admin_pb2.EVICTION_POLICY_LRU,
        Eviction.TIME_WHEEL: admin_pb2.EVICTION_POLICY_TIME_WHEEL,
    }
)


@dataclass(frozen=True, slots=True)
class _Number:
    """A number of the message, and of the configuration in units `scale` times as small.

    Attributes:
        field: of the message.
        name: of the configuration.
        least: smallest value.
        most: largest value.
        scale: units of the configuration in one of the message.
        can_be_none: 0 takes it away.
    """

    field: str
    name: str
    least: int = 1
    most: int = MOST
    scale: int = 1
    can_be_none: bool = False


_MOST_MS = MOST_SECONDS * 1000

_NUMBERS = (
    _Number("max_num_seqs", "max_num_seqs", can_be_none=True),
    _Number("max_num_batched_tokens", "max_num_batched_tokens", can_be_none=True),
    _Number("prefill_chunk_size", "prefill_chunk_size"),
    _Number("tpot_target_ms", "tpot_target_us", most=_MOST_MS, scale=1000, can_be_none=True),
    _Number("ageing_ms", "ageing_us", most=_MOST_MS, scale=1000),
    _Number("max_queued_requests", "max_queued_requests", can_be_none=True),
    _Number("max_queued_tokens", "max_queued_tokens", can_be_none=True),
    _Number("max_pinned_share", "max_pinned_share", least=0, most=1000),
    _Number("stall_timeout_ms", "stall_timeout_us", most=_MOST_MS, scale=1000),
)

_FIXED: Mapping[str, str] = MappingProxyType(
    {
        "enable_prefix_caching": "--enable-prefix-caching",
        "eviction": "--eviction-policy",
        "time_wheel_slots": "--time-wheel-slots",
        "partial_block_reuse": "--partial-block-reuse",
        "worker_grace_ms": "--worker-grace",
    }
)
"""Fields that cannot change at run time, with the flags that set them."""

_QUOTAS = ("max_queued_requests", "max_queued_tokens", "max_live_requests")


# The configuration


def config_message(config: Config) -> admin_pb2.SchedulerConfig:
    """A complete configuration; what is None is absent."""
    message = admin_pb2.SchedulerConfig(
        policy=_POLICIES[config.policy],
        default_class=config.default_class,
        other_tenants=_tenant_message("", config.other_tenants),
        classes=[_class_message(one) for one in config.classes],
        tenants=[_tenant_message(name, policy) for name, policy in config.tenants],
        enable_prefix_caching=config.enable_prefix_caching,
        eviction=_EVICTIONS[config.eviction],
        time_wheel_slots=config.time_wheel_slots,
        partial_block_reuse=config.partial_block_reuse,
        worker_grace_ms=config.worker_grace_us // 1000,
    )
    for number in _NUMBERS:
        value = getattr(config, number.name)
        if value is not None:
            setattr(message, number.field, value // number.scale)
    return message


def _class_message(one: PriorityClass) -> admin_pb2.PriorityClassConfig:
    target_us = one.ttft_target_us
    return admin_pb2.PriorityClassConfig(
        name=one.name,
        share=one.share,
        floor=one.floor,
        ttft_target_ms=None if target_us is None else target_us // 1000,
    )


def _tenant_message(name: str, policy: TenantPolicy) -> admin_pb2.TenantConfig:
    quotas = {quota: getattr(policy, quota) for quota in _QUOTAS}
    return admin_pb2.TenantConfig(name=name, weight=policy.weight, **quotas)


def changed(config: Config, change: admin_pb2.SchedulerConfig) -> Config:
    """The configuration with a change.

    Args:
        config: in force.
        change: its absent fields stay as they are.

    Raises:
        InvalidArgument: names each field that is wrong, or cannot change at run time.
    """
    wrong = Violations()
    if not change.ListFields():
        wrong.add("change", "must have at least one field")
    _refuse_fixed(config, change, wrong)
    values: dict[str, Any] = dict(_changed_numbers(change, wrong))
    if change.HasField("policy"):
        policies = {number: policy for policy, number in _POLICIES.items()}
        if change.policy in policies:
            values["policy"] = policies[change.policy]
        else:
            wrong.add("change.policy", f"must be one of the named ones, got {change.policy}")
    values["classes"] = _changed_classes(config.classes, change.classes, wrong)
    if change.HasField("default_class"):
        values["default_class"] = change.default_class
        known = [one.name for one in config.classes]
        if change.default_class not in known:
            wrong.add("change.default_class", f"must be one of {', '.join(known)}")
    if change.HasField("other_tenants"):
        others, field = change.other_tenants, "change.other_tenants"
        if others.name or others.remove:
            wrong.add(field, "must have neither a name nor remove")
        values["other_tenants"] = _changed_tenant(config.other_tenants, others, field, wrong)
    new = replace(config, **values)
    new = replace(new, tenants=_changed_tenants(new, change.tenants, wrong))
    wrong.raise_any()
    return new


def _refuse_fixed(config: Config, change: admin_pb2.SchedulerConfig, wrong: Violations) -> None:
    in_force = config_message(config)
    for field, flag in _FIXED.items():
        if change.HasField(field) and getattr(change, field) != getattr(in_force, field):
            wrong.add(
                f"change.{field}",
                f"cannot change while the scheduler runs; start it again with {flag}",
            )


def _changed_numbers(
    change: admin_pb2.SchedulerConfig, wrong: Violations
) -> list[tuple[str, int | None]]:
    values: list[tuple[str, int | None]] = []
    for number in _NUMBERS:
        if not change.HasField(number.field):
            continue
        value = getattr(change, number.field)
        if number.can_be_none and value == 0:
            values.append((number.name, None))
        elif number.least <= value <= number.most:
            values.append((number.name, value * number.scale))
        else:
            none = ", or 0 for none" if number.can_be_none else ""
            limits = f"must be from {number.least} to {number.most}{none}"
            wrong.add(f"change.{number.field}", f"{limits}, got {value}")
    return values


def _changed_classes(
    classes: tuple[PriorityClass, ...],
    changes: Sequence[admin_pb2.PriorityClassConfig],
    wrong: Violations,
) -> tuple[PriorityClass, ...]:
    by_name = {one.name: one for one in classes}
    seen: set[str] = set()
    for change in changes:
        name = change.name
        field = f"change.classes[{_shown(name)}]"
        if name not in by_name:
            wrong.add(field, f"is no class of this scheduler; they are {', '.join(by_name)}")
        elif name in seen:
            wrong.add(field, "is there twice")
        else:
            by_name[name] = one = _changed_class(by_name[name], change)
            for key, text in class_problems(one):
                wrong.add(f"{field}.{'ttft_target_ms' if key == 'ttft_target' else key}", text)
        seen.add(name)
    return tuple(by_name[one.name] for one in classes)


def _changed_class(one: PriorityClass, change: admin_pb2.PriorityClassConfig) -> PriorityClass:
    target_us = one.ttft_target_us
    if change.HasField("ttft_target_ms"):
        target_us = change.ttft_target_ms * 1000 or None
    return PriorityClass(
        name=one.name,
        share=change.share if change.HasField("share") else one.share,
        floor=change.floor if change.HasField("floor") else one.floor,
        ttft_target_us=target_us,
    )


def _changed_tenants(
    config: Config, changes: Sequence[admin_pb2.TenantConfig], wrong: Violations
) -> tuple[tuple[str, TenantPolicy], ...]:
    """The tenants with a policy of their own, new ones last."""
    tenants = dict(config.tenants)
    seen: set[str] = set()
    for change in changes:
        name = change.name
        field = f"change.tenants[{_shown(name)}]"
        if problem := tenant_name_problem(name):
            wrong.add(f"{field}.name", problem)
        elif name in seen:
            wrong.add(field, "is there twice")
        elif not change.remove:
            base = tenants.get(name, config.other_tenants)
            tenants[name] = _changed_tenant(base, change, field, wrong)
        elif change != admin_pb2.TenantConfig(name=name, remove=True):
            wrong.add(f"{field}.remove", "stands with no other field than the name")
        elif tenants.pop(name, None) is None:
            wrong.add(field, "has no policy of its own")
        seen.add(name)
    if len(tenants) > max(MOST_TENANTS, len(config.tenants)):
        wrong.add("change.tenants", f"must be at most {MOST_TENANTS} in all, got {len(tenants)}")
    return tuple(tenants.items())


def _changed_tenant(
    policy: TenantPolicy, change: admin_pb2.TenantConfig, field: str, wrong: Violations
) -> TenantPolicy:
    values: dict[str, int | None] = {
        quota: getattr(change, quota) or None for quota in _QUOTAS if change.HasField(quota)
    }
    if change.HasField("weight"):
        values["weight"] = change.weight
    changed_policy = replace(policy, **values)  # type: ignore[arg-type]  # a weight is never None
    for key, text in tenant_problems(changed_policy):
        wrong.add(f"{field}.{key}", text)
    return changed_policy


def _shown(name: str) -> str:
    """A name as part of a path, whatever it is made of."""
    return name if name.isprintable() and len(name) <= _MAX_ACTOR_BYTES else repr(name[:32])


# Who


def parse_origin(actor: str, reason: str, peer: str, wrong: Violations) -> Origin:
    """Who makes a change.

    Args:
        actor: as received.
        reason: as received.
        peer: where the call came from.
        wrong: takes what is wrong with them.
    """
    size = len(actor.encode())
    if not actor.isprintable() or not 1 <= size <= _MAX_ACTOR_BYTES:
        wrong.add(
            "actor", f"must be 1 to {_MAX_ACTOR_BYTES} bytes of printable text, got {size} bytes"
        )
    size = len(reason.encode())
    if not reason.isprintable() or size > _MAX_REASON_BYTES:
        wrong.add(
            "reason",
            f"must be at most {_MAX_REASON_BYTES} bytes of printable text, got {size} bytes",
        )
    return Origin(actor=actor, peer=peer, reason=reason)


def change_message(change: Change) -> admin_pb2.Change:
    """One entry of the list of changes."""
    message = admin_pb2.Change(
        actor=change.origin.actor,
        peer=change.origin.peer,
        reason=change.origin.reason,
        field=change.field,
        old_value=change.old,
        new_value=change.new,
        version=change.version,
    )
    message.time.FromMicroseconds(change.time_us)
    return message


# Pins


@dataclass(frozen=True, slots=True, kw_only=True)
class PinCall:
    """A valid wish to pin, before hashing; see PinPrefixRequest."""

    name: str
    tokens: TokenArray
    salt: bytes
    ttl_us: int | None


def parse_pin(
    message: admin_pb2.PinPrefixRequest, limits: Limits | None, wrong: Violations
) -> PinCall:
    """Reads a wish to pin.

    Args:
        message: as received.
        limits: of the attached workers; None: there are none.
        wrong: takes what is wrong with it.
    """
    if problem := name_problem(message.name):
        wrong.add("name", problem)
    if message.HasField("ttl_s") and not 1 <= message.ttl_s <= MOST_SECONDS:
        wrong.add("ttl_s", f"must be from 1 to {MOST_SECONDS}, got {message.ttl_s}")
    for field in ("tenant", "cache_salt"):
        if problem := tenant_name_problem(getattr(message, field)):
            wrong.add(field, problem)
    tokens = np.empty(0, np.uint32)
    with wrong.collected():
        tokens = codec.parse_token_ids(message.tokens, "tokens")
        if limits is not None:
            _check_tokens(tokens, limits)
    salted = message.HasField("cache_salt")
    return PinCall(
        name=message.name,
        tokens=tokens,
        salt=explicit_salt(message.cache_salt) if salted else tenant_salt(message.tenant),
        ttl_us=message.ttl_s * 1_000_000 if message.HasField("ttl_s") else None,
    )


def _check_tokens(tokens: TokenArray, limits: Limits) -> None:
    least, most = limits.block_size, limits.max_model_len
    if not least <= tokens.size <= most:
        raise InvalidArgument(
            "tokens", f"must be from {least} (one block) to {most} ids, got {tokens.size}"
        )
    largest = int(tokens.max())
    if largest >= limits.vocab_size:
        raise InvalidArgument(
            "tokens", f"the largest id of the vocabulary is {limits.vocab_size - 1}, got {largest}"
        )


def pin_error(refusal: Refusal) -> ServiceError:
    """The error for a pin that the core did not take."""
    if refusal.reason == "PIN_LIMIT":
        return FailedPrecondition(
            f"tokens: pins have room for {refusal.limit} blocks more, got {refusal.got}; unpin "
            "others, or raise max_pinned_share",
            reason=refusal.reason,
            metadata={"limit": str(refusal.limit), "got": str(refusal.got)},
        )
    return codec.refusal_error(refusal)


def pin_message(pin: Pin, cached: int, now: int) -> admin_pb2.PinnedPrefix:
    """One entry of the list of pins.

    Args:
        pin: in force.
        cached: blocks of it that some worker has.
        now: on the clock of the core, microseconds.
    """
    return admin_pb2.PinnedPrefix(
        name=pin.name,
        blocks=len(pin.hashes) // DIGEST_BYTES,
        blocks_cached=cached,
        expires_in_ms=None if pin.expires is None else max(0, pin.expires - now) // 1000,
    )
