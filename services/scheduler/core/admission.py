"""What may enter: pure checks of a request against the limits of the attached workers."""

from collections.abc import Iterator
from dataclasses import replace

from services.scheduler.core.plan import AddRequest, Limits, Refusal, Refused, WorkerSpec


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


def token_limit(request: AddRequest, limits: Limits) -> int:
    """The most tokens in all, prompt included, that the request may reach.

    Raises:
        Refused: it can never fit; carries the true limit.
    """
    refusals = [*_outside_vocabulary(request, limits.vocab_size), *_too_long(request, limits)]
    if refusals:
        first, *others = refusals
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
