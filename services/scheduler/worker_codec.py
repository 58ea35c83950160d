"""Between the messages of the step link and the scheduler's own types.

Everything that a worker says is checked here, as far as one message tells.
"""

import numpy as np

from quire.v1 import token_pb2, worker_pb2
from services.chassis.errors import InvalidArgument
from services.chassis.unknown_fields import refuse_unknown_fields
from services.scheduler.codec import check_major, check_name, parse_column
from services.scheduler.core.plan import (
    WORKER_LIMITS,
    RowFailure,
    StepPlan,
    StepResult,
    TokenArray,
    WorkerSpec,
)
from services.scheduler.facts import WorkerKind
from services.scheduler.link_timings import StepTimings

_MAX_EOS_TOKENS = 4096


def parse_register(message: worker_pb2.Register) -> tuple[WorkerSpec, str]:
    """What a worker announces, and the name of its model.

    Raises:
        ServiceError: names the field at fault.
    """
    check_major(message.protocol_major)
    for field in ("worker_id", "instance_id", "model", "model_digest"):
        if not getattr(message, field):
            raise InvalidArgument(f"register.{field}", "must not be empty")
        check_name(getattr(message, field), f"register.{field}")
    for field, most in WORKER_LIMITS.items():
        got = getattr(message, field)
        if not 1 <= got <= most:
            raise InvalidArgument(f"register.{field}", f"must be from 1 to {most}, got {got}")
    if len(message.eos_token_ids) > _MAX_EOS_TOKENS:
        raise InvalidArgument(
            "register.eos_token_ids",
            f"must be at most {_MAX_EOS_TOKENS}, got {len(message.eos_token_ids)}",
        )
    for token in message.eos_token_ids:
        if token >= message.vocab_size:
            raise InvalidArgument("register.eos_token_ids", f"{token} is outside the vocabulary")
    spec = WorkerSpec(
        worker_id=message.worker_id,
        num_blocks=message.num_blocks,
        block_size=message.block_size,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        max_in_flight=message.max_in_flight,
        model_digest=message.model_digest.encode(),
    )
    return spec, message.model


def worker_kind(message: worker_pb2.Register) -> WorkerKind:
    """What the worker announces for people.

    Raises:
        ServiceError: names the field at fault.
    """
    for field in ("device", "dtype", "version"):
        check_name(getattr(message, field), f"register.{field}")
    return WorkerKind(device=message.device, dtype=message.dtype, version=message.version)


def registered(spec: WorkerSpec, epoch: int, check_block_tables: bool) -> worker_pb2.AttachResponse:
    """The answer to a registration."""
    return worker_pb2.AttachResponse(
        registered=worker_pb2.Registered(
            epoch=epoch,
            max_num_seqs=spec.max_num_seqs,
            num_slots=spec.num_slots,
            check_block_tables=check_block_tables,
        )
    )


def step_message(plan: StepPlan) -> worker_pb2.AttachResponse:
    """A step for the wire."""
    return worker_pb2.AttachResponse(
        step=worker_pb2.Step(
            epoch=plan.epoch,
            step_id=plan.step_id,
            released_slots=plan.released_slots.astype("<u4").tobytes(),
            new_requests=[
                worker_pb2.NewRequest(
                    slot=row.slot,
                    token_ids=_packed(row.token_ids),
                    prompt_len=row.prompt_len,
                    num_computed=row.num_computed,
                    temperature=row.sampling.temperature,
                    top_p=row.sampling.top_p,
                    top_k=row.sampling.top_k,
                    seed=row.sampling.seed,
                    traceparent=row.traceparent,
                )
                for row in plan.new_rows
            ],
            slots=plan.slots.astype("<u4").tobytes(),
            num_tokens=plan.num_tokens.astype("<u4").tobytes(),
            num_new_blocks=plan.num_new_blocks.astype("<u4").tobytes(),
            new_block_ids=plan.new_block_ids.astype("<u4").tobytes(),
            block_table_digest=plan.block_table_digest,
            copied_from=plan.copied_from.astype("<u4").tobytes(),
            copied_to=plan.copied_to.astype("<u4").tobytes(),
            traceparent=plan.traceparent,
        )
    )


def _packed(token_ids: TokenArray) -> bytes:
    """A column of tokens; the very bytes it came in with, where it is a view of all of them.

    Spares a copy of half a megabyte for a prompt of 131,072 tokens, while a step waits for it.
    """
    source: object = token_ids.base
    whole = isinstance(source, bytes) and len(source) == token_ids.nbytes
    if whole and token_ids.dtype == "<u4" and token_ids.flags.c_contiguous:
        assert isinstance(source, bytes)
        return source
    return token_ids.astype("<u4", copy=False).tobytes()


def parse_result(message: worker_pb2.StepResult) -> tuple[StepResult, StepTimings]:
    """A result from the wire, and where its time went.

    Raises:
        ServiceError: the columns are malformed.
    """
    refuse_unknown_fields(message)
    result = StepResult(
        epoch=message.epoch,
        step_id=message.step_id,
        counts=np.frombuffer(message.counts, np.uint8),
        token_ids=parse_column(message.token_ids, "result.token_ids"),
        failures=tuple(RowFailure(slot=e.slot, message=e.message) for e in message.errors),
        execute_us=message.timings.execute_us,
        idle_us=message.timings.idle_us,
    )
    timings = StepTimings(
        wait_us=message.timings.wait_us,
        execute_us=message.timings.execute_us,
        idle_us=message.timings.idle_us,
    )
    return result, timings


def goodbye(reason: str) -> worker_pb2.AttachResponse:
    """The last message of an attachment."""
    return worker_pb2.AttachResponse(bye=token_pb2.Bye(reason=reason))
