"""Between the wire messages of the step link and the worker's own types.

The only file of the worker that reads or makes protobuf. Checks the shape of what arrives (columns
of whole numbers, of equal length, that fit together); what the numbers mean is checked by `rows`.
"""

import numpy as np

from quire.v1 import token_pb2, worker_pb2
from quire.version import VERSION
from services.chassis.errors import Unimplemented
from services.chassis.logs import told
from services.chassis.tracing import is_sampled
from services.chassis.unknown_fields import refuse_unknown_fields
from services.worker.plan import (
    Attachment,
    Column,
    Goodbye,
    LinkProtocolError,
    NewRow,
    Registration,
    StepPlan,
    StepResult,
    StepTimings,
)

PROTOCOL_MAJOR = 1
"""Major version of the step link this worker speaks."""


def to_register(registration: Registration) -> worker_pb2.AttachRequest:
    """The first message of an attachment."""
    limits = registration.limits
    return worker_pb2.AttachRequest(
        register=worker_pb2.Register(
            worker_id=registration.worker_id,
            instance_id=registration.instance_id,
            protocol_major=PROTOCOL_MAJOR,
            model=registration.model,
            model_digest=registration.model_digest,
            dtype=registration.dtype,
            device=registration.device,
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            eos_token_ids=registration.eos_token_ids,
            max_in_flight=limits.max_in_flight,
            version=VERSION,
        )
    )


def to_result(result: StepResult, timings: StepTimings) -> worker_pb2.AttachRequest:
    """The answer to one step."""
    return worker_pb2.AttachRequest(
        result=worker_pb2.StepResult(
            epoch=result.epoch,
            step_id=result.step_id,
            counts=result.counts.tobytes(),
            token_ids=result.token_ids.astype("<u4", copy=False).tobytes(),
            errors=[
                worker_pb2.SlotError(slot=failure.slot, message=failure.message)
                for failure in result.failures
            ],
            timings=worker_pb2.StepTimings(
                wait_us=timings.wait_us, execute_us=timings.execute_us, idle_us=timings.idle_us
            ),
        )
    )


def to_bye(reason: str) -> worker_pb2.AttachRequest:
    """The last message of an orderly end."""
    return worker_pb2.AttachRequest(bye=token_pb2.Bye(reason=reason))


def from_response(response: worker_pb2.AttachResponse) -> Attachment | StepPlan | Goodbye:
    """What the scheduler sent.

    Raises:
        LinkProtocolError: the message is empty, has fields this version does not know, or columns
            that do not fit together.
    """
    try:
        refuse_unknown_fields(response)
    except Unimplemented as error:
        raise LinkProtocolError(error.message) from error
    kind = response.WhichOneof("message")
    if kind == "step":
        return _from_step(response.step)
    if kind == "registered":
        registered = response.registered
        return Attachment(
            epoch=registered.epoch,
            max_num_seqs=registered.max_num_seqs,
            num_slots=registered.num_slots,
            check_block_tables=registered.check_block_tables,
        )
    if kind == "bye":
        return Goodbye(reason=told(response.bye.reason))
    raise LinkProtocolError("message: empty; expected registered, step or bye")


def _from_step(step: worker_pb2.Step) -> StepPlan:
    slots = _column("slots", step.slots)
    rows = len(slots)
    num_tokens = _column("num_tokens", step.num_tokens)
    num_new_blocks = _column("num_new_blocks", step.num_new_blocks)
    new_block_ids = _column("new_block_ids", step.new_block_ids)
    if len(num_tokens) != rows or len(num_new_blocks) != rows:
        raise LinkProtocolError(
            f"step {step.step_id}: slots has {rows} rows, num_tokens {len(num_tokens)}, "
            f"num_new_blocks {len(num_new_blocks)}; they must be equal"
        )
    appended = int(num_new_blocks.sum())
    if appended != len(new_block_ids):
        raise LinkProtocolError(
            f"step {step.step_id}: num_new_blocks adds up to {appended}, "
            f"new_block_ids has {len(new_block_ids)}"
        )
    copied_from = _column("copied_from", step.copied_from)
    copied_to = _column("copied_to", step.copied_to)
    if len(copied_from) != len(copied_to):
        raise LinkProtocolError(
            f"step {step.step_id}: copied_from has {len(copied_from)} blocks, "
            f"copied_to {len(copied_to)}; they must be equal"
        )
    return StepPlan(
        epoch=step.epoch,
        step_id=step.step_id,
        released_slots=_column("released_slots", step.released_slots),
        new_rows=tuple(_new_row(request) for request in step.new_requests),
        slots=slots,
        num_tokens=num_tokens,
        num_new_blocks=num_new_blocks,
        new_block_ids=new_block_ids,
        block_table_digest=(
            step.block_table_digest if step.HasField("block_table_digest") else None
        ),
        copied_from=copied_from,
        copied_to=copied_to,
        traceparent=_kept(step.traceparent),
    )


def _new_row(request: worker_pb2.NewRequest) -> NewRow:
    packed = request.token_ids
    _check_packed("new_requests.token_ids", packed)
    return NewRow(
        slot=request.slot,
        token_ids=np.frombuffer(packed, dtype="<u4"),
        prompt_len=request.prompt_len,
        num_computed=request.num_computed,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        traceparent=_kept(request.traceparent),
    )


def _kept(traceparent: str) -> str:
    """The context of a trace whose spans are kept, "" for any other: it goes no further."""
    return traceparent if traceparent and is_sampled(traceparent) else ""


def _column(name: str, packed: bytes) -> Column:
    if not packed:  # most steps release and append nothing
        return np.zeros(0, dtype=np.int64)
    _check_packed(name, packed)
    return np.frombuffer(packed, dtype="<u4").astype(np.int64)


def _check_packed(name: str, packed: bytes) -> None:
    if len(packed) % 4:
        raise LinkProtocolError(f"{name}: {len(packed)} bytes, must be a multiple of 4")
