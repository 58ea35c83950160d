"""What may enter: checks against the limits of the attached workers, and bounds of the queue."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from services.scheduler.core.config import Config
from services.scheduler.core.plan import AddRequest, Limits, Refusal, Refused, WorkerSpec

RETURNING_FACTOR = 2
"""Bounds are so many times as wide for requests that return: both what waited at a scheduler that
died and what waits here find room, and who only says that it returns is bounded all the same."""

_TOO_LONG = frozenset({"CONTEXT_LENGTH", "EXCEEDS_KV_CAPACITY"})


@dataclass(slots=True)
class _Count:
    live: int = 0
    requests: int = 0
    tokens: int = 0


class Backlog:
    """Counts live requests, and those that wait for their first admission; holds them in bounds.

    Preempted and requeued requests were admitted once, so nothing is ever refused to them.

    Args:
        config: the bounds.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._all = _Count()
        self._by_tenant: dict[str, _Count] = {}

    @property
    def tokens(self) -> int:
        """Prompt tokens of requests that wait for their first admission."""
        return self._all.tokens

    def tenants(self, most: int) -> list[tuple[str, int]]:
        """The tenants with most live requests, and how many those are."""
        counts = sorted(self._by_tenant.items(), key=lambda item: (-item[1].live, item[0]))
        return [(name, count.live) for name, count in counts[:most]]

    def refusal(self, spec: AddRequest, workers: Collection[WorkerSpec]) -> Refusal | None:
        """The bound that the request would break, without a time to try again; None: none.

        A request that returns (its attempt is above 0) was accepted once, here or by a scheduler
        that died. Its bounds are wider, by RETURNING_FACTOR and by what ran and did not wait: the
        seats and tokens of the workers. Without workers it has none.

        Args:
            spec: the request; no request of its id is live.
            workers: attached ones.
        """
        config, factor, seats, tokens = self.config, 1, 0, 0
        if spec.attempt:
            if not workers:
                return None
            factor = RETURNING_FACTOR
            seats = sum(worker.max_num_seqs for worker in workers)
            tokens = sum(worker.num_blocks * worker.block_size for worker in workers)
        policy = dict(config.tenants).get(spec.tenant, config.other_tenants)
        own, size = self._by_tenant.get(spec.tenant, _Count()), int(spec.prompt.size)
        bounds = (
            ("TENANT_LIVE", policy.max_live_requests, 0, own.live + 1),
            ("TENANT_REQUESTS", policy.max_queued_requests, seats, own.requests + 1),
            ("TENANT_TOKENS", policy.max_queued_tokens, tokens, own.tokens + size),
            ("QUEUE_REQUESTS", config.max_queued_requests, seats, self._all.requests + 1),
            ("QUEUE_TOKENS", config.max_queued_tokens, tokens, self._all.tokens + size),
        )
        for reason, bound, more, count in bounds:
            if bound is None:
                continue
            most = factor * bound + more
            if reason.endswith("TOKENS") and size > most:
                return Refusal(field="request.prompt", reason="EXCEEDS_QUEUE", limit=most, got=size)
            if count > most:
                of_tenant = reason.startswith("TENANT")
                field = "request.scheduling.tenant" if of_tenant else "request"
                return Refusal(field=field, reason=reason, limit=most, got=count)
        return None

    def accepted(self, spec: AddRequest) -> None:
        """Counts a request that waits for its first admission."""
        own = self._by_tenant.setdefault(spec.tenant, _Count())
        own.live += 1
        self._all.live += 1
        self._queue(spec, 1)

    def admitted(self, spec: AddRequest) -> None:
        """A request had its first admission."""
        self._queue(spec, -1)

    def ended(self, spec: AddRequest, *, fresh: bool) -> None:
        """Counts out a request; `fresh`: it was never admitted."""
        if fresh:
            self._queue(spec, -1)
        own = self._by_tenant[spec.tenant]
        own.live -= 1
        self._all.live -= 1
        if not own.live:
            del self._by_tenant[spec.tenant]

    def _queue(self, spec: AddRequest, sign: int) -> None:
        for count in (self._all, self._by_tenant[spec.tenant]):
            count.requests += sign
            count.tokens += sign * int(spec.prompt.size)


def limits_of(specs: list[WorkerSpec], prefix_hash: str) -> Limits | None:
    """The limits of a set of workers of one model, or None without workers."""
    if not specs:
        return None
    # Both limits of one worker: a request must fit somewhere as a whole.
    roomiest = max(specs, key=lambda spec: (tokens_held(spec), spec.max_model_len))
    return Limits(
        vocab_size=specs[0].vocab_size,
        max_model_len=roomiest.max_model_len,
        kv_capacity_tokens=roomiest.num_blocks * roomiest.block_size,
        eos_token_ids=specs[0].eos_token_ids,
        num_workers=len(specs),
        block_size=specs[0].block_size,
        model_digest=specs[0].model_digest,
        prefix_hash=prefix_hash,
    )


def tokens_held(spec: WorkerSpec) -> int:
    """The most tokens in all that a request alone on this worker may reach.

    The last token is sampled and never computed, so it needs no place in the KV cache.
    """
    return min(spec.max_model_len, spec.num_blocks * spec.block_size + 1)


def token_limit(request: AddRequest, limits: Limits) -> int | None:
    """The most tokens in all, prompt included, that the request may reach.

    Returns:
        None where it is too long for these workers but returns, so that some worker has held it:
        that one may attach next.

    Raises:
        Refused: it can never fit; carries the true limit.
    """
    refusals = [*_outside_vocabulary(request, limits.vocab_size), *_too_long(request, limits)]
    if refusals:
        first, *others = refusals
        if request.attempt and first.reason in _TOO_LONG:
            return None
        raise Refused(replace(first, others=tuple(others)))
    limit = min(limits.max_model_len, limits.kv_capacity_tokens + 1)
    if request.max_tokens is None:
        return limit
    return int(request.prompt.size) + request.max_tokens


def fits(limit: int, spec: WorkerSpec) -> bool:
    """True where a request of `limit` tokens in all can run to its end on this worker, alone."""
    return limit <= tokens_held(spec)


def _outside_vocabulary(request: AddRequest, size: int) -> Iterator[Refusal]:
    for field, ids in (("request.prompt", request.prompt), ("request.resumed", request.resumed)):
        if ids.size and int(ids.max()) >= size:
            yield Refusal(field=field, reason="VOCABULARY", limit=size - 1, got=int(ids.max()))
    for index, token in enumerate(request.stop_token_ids):
        if token >= size:
            field = f"request.stopping.stop_token_ids[{index}]"
            yield Refusal(field=field, reason="VOCABULARY", limit=size - 1, got=token)


def _too_long(request: AddRequest, limits: Limits) -> Iterator[Refusal]:
    prompt = int(request.prompt.size)
    bounds = (
        ("CONTEXT_LENGTH", limits.max_model_len),
        ("EXCEEDS_KV_CAPACITY", limits.kv_capacity_tokens + 1),
    )
    for reason, most in bounds:
        if prompt >= most:
            yield Refusal(field="request.prompt", reason=reason, limit=most - 1, got=prompt)
            return
    for reason, most in bounds:
        if request.max_tokens is not None and prompt + request.max_tokens > most:
            field, got = "request.stopping.max_tokens", request.max_tokens
            yield Refusal(field=field, reason=reason, limit=most - prompt, got=got)
            return
    resumed = int(request.resumed.size)
    for reason, most in bounds:
        if prompt + resumed > most:
            field = "request.resumed"
            yield Refusal(field=field, reason=reason, limit=most - prompt, got=resumed)
            return
