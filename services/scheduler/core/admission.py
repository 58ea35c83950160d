"""What may enter: pure checks of a request against the limits of the attached workers."""

from services.scheduler.core.plan import AddRequest, Limits, Refusal, Refused, WorkerSpec


def limits_of(specs: list[WorkerSpec]) -> Limits | None:
    """The limits of a set of workers of one model, or None without workers."""
    if not specs:
        return None
    return Limits(
        vocab_size=specs[0].vocab_size,
        max_model_len=max(spec.max_model_len for spec in specs),
        kv_capacity_tokens=max(spec.num_blocks * spec.block_size for spec in specs),
        eos_token_ids=specs[0].eos_token_ids,
        num_workers=len(specs),
    )


def token_limit(request: AddRequest, limits: Limits) -> int:
    """The most tokens in all, prompt included, that the request may reach.

    The last token is sampled and never computed, so it needs no place in the KV cache.

    Raises:
        Refused: it can never fit; carries the true limit.
    """
    for field, ids in (("request.prompt", request.prompt), ("request.resumed", request.resumed)):
        if ids.size and int(ids.max()) >= limits.vocab_size:
            raise _refused(field, "VOCABULARY", limits.vocab_size - 1, int(ids.max()))
    prompt = int(request.prompt.size)
    kv_limit = limits.kv_capacity_tokens + 1
    if prompt >= limits.max_model_len:
        raise _refused("request.prompt", "CONTEXT_LENGTH", limits.max_model_len - 1, prompt)
    if prompt >= kv_limit:
        raise _refused("request.prompt", "EXCEEDS_KV_CAPACITY", kv_limit - 1, prompt)
    if request.max_tokens is None:
        return min(limits.max_model_len, kv_limit)
    total = prompt + request.max_tokens
    field = "request.stopping.max_tokens"
    if total > limits.max_model_len:
        raise _refused(field, "CONTEXT_LENGTH", limits.max_model_len - prompt, request.max_tokens)
    if total > kv_limit:
        raise _refused(field, "EXCEEDS_KV_CAPACITY", kv_limit - prompt, request.max_tokens)
    return total


def fits(limit: int, spec: WorkerSpec) -> bool:
    """True where a request of `limit` tokens in all can run to its end on this worker, alone."""
    return limit <= min(spec.max_model_len, spec.num_blocks * spec.block_size + 1)


def _refused(field: str, reason: str, limit: int, got: int) -> Refused:
    return Refused(Refusal(field=field, reason=reason, limit=limit, got=got))
