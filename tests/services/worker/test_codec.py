import numpy as np
import pytest

from quire.v1 import token_pb2, worker_pb2
from services.worker import codec
from services.worker.plan import (
    Attachment,
    FailureKind,
    Goodbye,
    LinkProtocolError,
    Registration,
    SlotFailure,
    StepLimits,
    StepPlan,
    StepResult,
    StepTimings,
)
from tests.fakes.scheduler_link import ids, new_request, step, u32

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

LIMITS = StepLimits(
    block_size=4,
    num_blocks=16,
    max_num_seqs=3,
    max_num_batched_tokens=8,
    max_model_len=32,
    vocab_size=257,
    max_in_flight=2,
)


def decoded(message: worker_pb2.Step) -> StepPlan:
    wire = worker_pb2.AttachResponse(step=message).SerializeToString()
    plan = codec.from_response(worker_pb2.AttachResponse.FromString(wire))
    assert isinstance(plan, StepPlan)
    return plan


def test_register_says_everything():
    message = codec.to_register(
        Registration(
            worker_id="w-0",
            instance_id="abc",
            model="tiny",
            model_digest="d1",
            dtype="float32",
            device="cpu",
            limits=LIMITS,
            eos_token_ids=(2, 7),
        )
    ).register
    assert {field.name for field, _ in message.ListFields()} == {
        field.name for field in worker_pb2.Register.DESCRIPTOR.fields
    }
    assert (message.worker_id, message.instance_id, message.model) == ("w-0", "abc", "tiny")
    assert (message.model_digest, message.dtype, message.device) == ("d1", "float32", "cpu")
    assert (message.block_size, message.num_blocks, message.max_num_seqs) == (4, 16, 3)
    assert (message.max_num_batched_tokens, message.max_model_len) == (8, 32)
    assert (message.vocab_size, message.max_in_flight, message.protocol_major) == (257, 2, 1)
    assert list(message.eos_token_ids) == [2, 7]


def test_step_columns_and_new_requests():
    plan = decoded(
        step(
            epoch=3,
            step_id=9,
            released=[5],
            new=[
                new_request(
                    1,
                    [7, 2**32 - 1],
                    prompt_len=1,
                    num_computed=1,
                    temperature=0.5,
                    top_p=0.75,
                    top_k=3,
                    seed=2**64 - 1,
                    traceparent=SAMPLED,
                )
            ],
            rows=[(1, 1, [15, 3]), (0, 4, [])],
            digest=2**64 - 1,
            copies=[(4, 15), (4, 3)],
        )
    )
    assert plan.copied_from.tolist() == [4, 4]
    assert plan.copied_to.tolist() == [15, 3]
    assert (plan.epoch, plan.step_id, plan.block_table_digest) == (3, 9, 2**64 - 1)
    assert plan.released_slots.tolist() == [5]
    assert plan.slots.tolist() == [1, 0]
    assert plan.num_tokens.tolist() == [1, 4]
    assert plan.num_new_blocks.tolist() == [2, 0]
    assert plan.new_block_ids.tolist() == [15, 3]
    (row,) = plan.new_rows
    assert (row.slot, row.token_ids.tolist(), row.prompt_len) == (1, [7, 2**32 - 1], 1)
    assert (row.num_computed, row.temperature, row.top_p) == (1, 0.5, 0.75)
    assert (row.top_k, row.seed, row.traceparent) == (3, 2**64 - 1, SAMPLED)


def test_a_step_without_rows_and_without_digest():
    plan = decoded(step(step_id=1, released=[0]))
    assert plan.slots.size == plan.num_tokens.size == plan.new_block_ids.size == 0
    assert plan.copied_from.size == plan.copied_to.size == 0
    assert plan.block_table_digest is None


@pytest.mark.parametrize("context", ["", SAMPLED[:-1] + "0", "00-x", SAMPLED])
def test_only_the_context_of_a_sampled_trace_goes_further(context):
    kept = SAMPLED if context == SAMPLED else ""
    message = step(
        step_id=1,
        new=[new_request(0, [1], traceparent=context)],
        rows=[(0, 1, [1])],
        traceparent=context,
    )
    plan = decoded(message)
    assert (plan.traceparent, plan.new_rows[0].traceparent) == (kept, kept)


def test_a_digest_of_zero_is_a_digest():
    assert decoded(step(step_id=1, digest=0)).block_table_digest == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"slots": b"\1\0\0"}, "slots: 3 bytes"),
        ({"num_tokens": b"\1\0\0\0\0"}, "num_tokens: 5 bytes"),
        ({"num_new_blocks": b"\1"}, "num_new_blocks: 1 bytes"),
        ({"new_block_ids": b"\1\1"}, "new_block_ids: 2 bytes"),
        ({"released_slots": b"\1\1"}, "released_slots: 2 bytes"),
        ({"slots": u32([1, 2]), "num_tokens": u32([1])}, "slots has 2 rows, num_tokens 1"),
        (
            {"slots": u32([1]), "num_tokens": u32([1]), "num_new_blocks": u32([0, 0])},
            "num_new_blocks 2; they must be equal",
        ),
        (
            {
                "slots": u32([1]),
                "num_tokens": u32([1]),
                "num_new_blocks": u32([2]),
                "new_block_ids": u32([4]),
            },
            "num_new_blocks adds up to 2, new_block_ids has 1",
        ),
        ({"copied_from": b"\1\1"}, "copied_from: 2 bytes"),
        ({"copied_to": b"\1\1"}, "copied_to: 2 bytes"),
        (
            {"copied_from": u32([1, 2]), "copied_to": u32([3])},
            "copied_from has 2 blocks, copied_to 1; they must be equal",
        ),
        (
            {"new_requests": [worker_pb2.NewRequest(slot=1, token_ids=b"\1\2\3")]},
            "new_requests.token_ids: 3 bytes",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_name(fields, says):
    with pytest.raises(LinkProtocolError, match=says):
        decoded(worker_pb2.Step(epoch=1, step_id=4, **fields))


def test_registered_and_bye():
    registered = worker_pb2.Registered(
        epoch=4, max_num_seqs=2, num_slots=6, check_block_tables=True
    )
    assert codec.from_response(worker_pb2.AttachResponse(registered=registered)) == Attachment(
        epoch=4, max_num_seqs=2, num_slots=6, check_block_tables=True
    )
    bye = worker_pb2.AttachResponse(bye=token_pb2.Bye(reason="drain"))
    assert codec.from_response(bye) == Goodbye(reason="drain")


def test_an_empty_message_is_refused():
    with pytest.raises(LinkProtocolError, match="empty"):
        codec.from_response(worker_pb2.AttachResponse())


def test_fields_of_a_later_version_are_refused_with_their_number():
    # Field 1000, wire type varint, value 1.
    for message in (
        worker_pb2.AttachResponse(step=worker_pb2.Step.FromString(b"\xc0\x3e\x01")),
        worker_pb2.AttachResponse(
            step=worker_pb2.Step(new_requests=[worker_pb2.NewRequest.FromString(b"\xc0\x3e\x01")])
        ),
        worker_pb2.AttachResponse(registered=worker_pb2.Registered.FromString(b"\xc0\x3e\x01")),
    ):
        with pytest.raises(LinkProtocolError, match="field 1000"):
            codec.from_response(message)


def test_result_on_the_wire():
    message = codec.to_result(
        StepResult(
            epoch=2,
            step_id=11,
            counts=np.array([1, 0, 1], np.uint8),
            token_ids=np.array([70_000, 5], np.uint32),
            failures=(SlotFailure(slot=8, kind=FailureKind.NOT_FINITE, message="not finite"),),
        ),
        StepTimings(wait_us=1, execute_us=2, idle_us=3),
    ).result
    assert (message.epoch, message.step_id) == (2, 11)
    assert message.counts == b"\1\0\1"
    assert ids(message.token_ids) == [70_000, 5]
    assert [(error.slot, error.message) for error in message.errors] == [(8, "not finite")]
    timings = message.timings
    assert (timings.wait_us, timings.execute_us, timings.idle_us) == (1, 2, 3)


def test_bye_carries_its_reason():
    assert codec.to_bye("worker stops").bye.reason == "worker stops"
