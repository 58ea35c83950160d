"""The way of one valid request from a door into the core: model check, hashing, posting.

Shared by both doors of the token service.
"""

from dataclasses import replace

from services.chassis.errors import NotFound, Unavailable
from services.scheduler import codec
from services.scheduler.core.plan import AddRequest
from services.scheduler.engine_loop import Caller, EngineLoop
from services.scheduler.prompt_hasher import PromptHasher


async def admit(
    loop: EngineLoop, hasher: PromptHasher, caller: Caller, stream: int, call: codec.TokenCall
) -> None:
    """Posts a request to the core; a refusal by the core comes through the caller's outbox.

    Args:
        loop: the engine loop.
        hasher: hashes its prompt.
        caller: whose request it is.
        stream: the caller's id for it.
        call: the request.

    Raises:
        ServiceError: it cannot be posted.
    """
    if loop.draining:
        raise Unavailable("the scheduler is stopping", reason="DRAINING")
    if call.model and loop.model and call.model != loop.model:
        raise NotFound(f"model: {call.model!r} is not served here; {loop.model!r} is")
    request = AddRequest(
        request_id=call.request_id,
        handle=caller.handle(stream),
        attempt=call.attempt,
        prompt=call.prompt,
        resumed=call.resumed,
        max_tokens=call.max_tokens,
        ignore_eos=call.ignore_eos,
        stop_token_ids=call.stop_token_ids,
        sampling=call.sampling,
        traceparent=call.traceparent,
        salt=call.scheduling.salt,
        read_prefix_cache=call.scheduling.read_prefix_cache,
        priority_class=call.scheduling.priority_class,
        tenant=call.scheduling.tenant,
        deadline=loop.deadline(call.scheduling.deadline_us),
        ttft_target_us=call.scheduling.ttft_target_us,
        tpot_target_us=call.scheduling.tpot_target_us,
        shed_late=call.scheduling.shed_late,
    )
    loop.check(request)  # before any work is put into a prompt that cannot be served
    # While no worker is attached, the next one is taken for one of the last kind: else the core
    # would hash all that queued up meanwhile when it plans. If it is not, the core forgets it.
    hashing = loop.last_hashing
    caching = loop.limits is None or loop.limits.prefix_hash
    hashes = b""
    if hashing is not None and caching:
        block_size, model_digest = hashing
        hashes = await hasher.chain(
            call.prompt,
            block_size=block_size,
            model_digest=model_digest,
            salt=request.salt,
            session_id=call.scheduling.session_id,
        )
        if loop.last_hashing != hashing:
            hashes = b""  # other workers came meanwhile; the core hashes by itself
    caller.add(replace(request, prompt_hashes=hashes))
