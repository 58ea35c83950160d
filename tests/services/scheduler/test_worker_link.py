"""The step link on the wire, against a worker played by hand."""

import asyncio

import grpc
import pytest

from quire.v1 import generation_pb2, token_pb2, worker_pb2
from tests.fakes.scripted_worker import attached, column
from tests.services.scheduler.conftest import Running, running_scheduler


def generate(scheduler: Running, prompt: list[int], max_tokens: int | None = 8, **fields):
    request = token_pb2.TokenRequest(
        prompt=generation_pb2.TokenIds(ids=prompt),
        stopping=generation_pb2.StoppingCriteria(max_tokens=max_tokens),
        **fields,
    )
    return scheduler.tokens.Generate(token_pb2.TokenServiceGenerateRequest(request=request))


async def collect(call) -> tuple[list[int], token_pb2.TokenFinished]:
    tokens: list[int] = []
    finished = None
    async for response in call:
        assert finished is None, "a message after the last"
        tokens.extend(response.token_ids)
        if response.HasField("finished"):
            finished = response.finished
    assert finished is not None
    return tokens, finished


async def test_two_steps_are_in_flight(scheduler: Running) -> None:
    """Step k + 1 arrives while the result of step k is withheld."""
    async with attached(scheduler.target) as worker:
        call = generate(scheduler, [5, 6, 7], max_tokens=4)
        first = await worker.step()
        second = await worker.step()
        assert (first.step_id, second.step_id) == (1, 2)
        assert column(first.num_tokens) == [3]
        assert column(second.num_tokens) == [1], "the decode step does not wait for the token"
        await worker.no_step()
        loads = await scheduler.loads()
        assert loads.workers[0].steps_in_flight == 2
        await worker.answer(first)
        third = await worker.step()
        assert third.step_id == 3
        await worker.answer(second)
        await worker.answer(third)
        await worker.answer(await worker.step())
        tokens, finished = await collect(call)
        assert tokens == [7, 7, 7, 7]
        assert finished.reason == generation_pb2.FINISH_REASON_LENGTH
        assert finished.usage.completion_tokens == 4
        released = await worker.step()
        assert column(released.released_slots) == [column(first.slots)[0]]
        assert not released.slots, "a step by length costs no extra row"
        loads = await scheduler.quiesced()
        timings = loads.workers[0].timings
        assert timings.steps == 4
        assert timings.link_us_p99 >= timings.link_us_p50 > 0
        assert timings.execute_us_p50 == 900


async def test_rows_planned_before_a_stop_was_known_are_discarded(scheduler: Running) -> None:
    async with attached(scheduler.target, token=lambda slot: 2) as worker:
        call = generate(scheduler, [5, 6, 7])
        first, second = await worker.step(), await worker.step()
        await worker.answer(first)
        tokens, finished = await collect(call)
        assert tokens == [2]
        assert finished.reason == generation_pb2.FINISH_REASON_STOP
        assert finished.stop_token_id == 2
        await worker.answer(second)
        loads = await scheduler.quiesced()
        assert loads.counters.generation_tokens == 1
        async with asyncio.timeout(5):
            while (await scheduler.loads()).counters.discarded_rows != 1:
                await asyncio.sleep(0.01)


async def test_a_lost_worker_loses_no_request(scheduler: Running) -> None:
    """Cut without Bye in mid-stream: another worker goes on from the tokens delivered."""
    async with attached(scheduler.target, worker_id="a") as worker:
        call = generate(scheduler, [5, 6, 7], max_tokens=6)
        await worker.answer(await worker.step())
        await worker.answer(await worker.step())
        await worker.step()
        async with asyncio.timeout(5):
            while (await scheduler.loads()).counters.generation_tokens < 2:
                await asyncio.sleep(0.01)
    async with attached(scheduler.target, worker_id="b", token=lambda slot: 9) as worker:
        step = await worker.step()
        (new,) = step.new_requests
        assert column(new.token_ids) == [5, 6, 7, 7, 7]
        assert new.prompt_len == 3
        async with asyncio.TaskGroup() as tasks:
            await worker.answer(step)
            serving = tasks.create_task(worker.serve())
            tokens, finished = await collect(call)
            serving.cancel()
        assert tokens == [7, 7, 9, 9, 9, 9]
        assert finished.usage.completion_tokens == 6
        loads = await scheduler.quiesced()
        assert loads.counters.requeues == 1


async def test_an_instance_that_dials_again_takes_its_own_place(scheduler: Running) -> None:
    async with attached(scheduler.target) as old, attached(scheduler.target) as new:
        reason, code = await old.end()
        assert "dialled again" in reason
        assert code is grpc.StatusCode.OK
        assert new.registered.epoch > old.registered.epoch
        assert len((await scheduler.loads()).workers) == 1


async def test_another_instance_of_a_live_name_is_refused(scheduler: Running) -> None:
    async with attached(scheduler.target) as worker:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async with attached(scheduler.target, instance_id="2"):
                pass
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert "'scripted'" in refused.value.details()
        call = generate(scheduler, [5, 6, 7], max_tokens=1)
        await worker.answer(await worker.step())
        assert (await collect(call))[0] == [7]


@pytest.mark.parametrize(
    "changes",
    [
        {"step_id": 2},
        {"epoch": 99},
        {"counts": b""},
        {"counts": b"\x00"},
        {"token_ids": b""},
        {"token_ids": (100).to_bytes(4, "little")},
    ],
)
async def test_a_wrong_result_ends_the_link_and_no_request(
    scheduler: Running, changes: dict[str, object]
) -> None:
    async with attached(scheduler.target) as worker:
        call = generate(scheduler, [5, 6, 7], max_tokens=2)
        await worker.answer(await worker.step(), **changes)
        reason, _ = await worker.end()
        assert "protocol fault" in reason
    async with attached(scheduler.target) as worker, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(worker.serve())
        assert (await collect(call))[0] == [7, 7]
        serving.cancel()


async def test_a_failed_row_ends_its_request_alone(scheduler: Running) -> None:
    async with attached(scheduler.target) as worker:
        good = generate(scheduler, [5, 6, 7], max_tokens=30)
        bad = generate(scheduler, [8, 9], max_tokens=30)
        step = await worker.step()
        while len(step.slots) < 8:
            await worker.answer(step)
            step = await worker.step()
        slots = column(step.slots)
        sampling = worker.samples(step)
        victim = next(
            new.slot
            for earlier in worker.steps
            for new in earlier.new_requests
            if column(new.token_ids)[0] == 8
        )
        result = worker_pb2.StepResult(
            epoch=step.epoch,
            step_id=step.step_id,
            counts=bytes(slot in sampling and slot != victim for slot in slots),
            token_ids=(7).to_bytes(4, "little") * (len(sampling) - 1),
            errors=[worker_pb2.SlotError(slot=victim, message="logits are not finite")],
        )
        await worker._call.write(worker_pb2.AttachRequest(result=result))
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(worker.serve())
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await collect(bad)
            assert error.value.code() is grpc.StatusCode.INTERNAL
            assert (await collect(good))[0] == [7] * 30
            serving.cancel()
        await scheduler.quiesced()


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("protocol_major", 9, grpc.StatusCode.FAILED_PRECONDITION),
        ("worker_id", "", grpc.StatusCode.INVALID_ARGUMENT),
        ("block_size", 0, grpc.StatusCode.INVALID_ARGUMENT),
        ("eos_token_ids", [100], grpc.StatusCode.INVALID_ARGUMENT),
        ("eos_token_ids", [2] * 5000, grpc.StatusCode.INVALID_ARGUMENT),
        ("worker_id", "w" * 300, grpc.StatusCode.INVALID_ARGUMENT),
        ("instance_id", "a\nb", grpc.StatusCode.INVALID_ARGUMENT),
        ("num_blocks", 2**31 - 1, grpc.StatusCode.INVALID_ARGUMENT),
        ("max_num_seqs", 2**31 - 1, grpc.StatusCode.INVALID_ARGUMENT),
        ("max_in_flight", 17, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_bad_registrations_are_refused_by_name(
    scheduler: Running, field: str, value: object, code: grpc.StatusCode
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async with attached(scheduler.target, **{field: value}):
            pass
    assert error.value.code() is code
    assert field in error.value.details()


async def test_a_worker_whose_tables_do_not_fit_is_refused(scheduler: Running) -> None:
    """Each value is within its bounds; all together need more memory than any machine has."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async with attached(
            scheduler.target,
            max_num_seqs=1 << 14,
            max_model_len=1 << 24,
            max_in_flight=16,
            max_num_batched_tokens=1 << 20,
        ):
            pass
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "max_num_seqs" in error.value.details()
    async with attached(scheduler.target):
        assert len((await scheduler.loads()).workers) == 1


async def test_workers_of_another_model_are_refused(scheduler: Running) -> None:
    async with attached(scheduler.target):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async with attached(scheduler.target, worker_id="b", model_digest="d2"):
                pass
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_requests_queue_until_a_worker_comes(scheduler: Running) -> None:
    call = generate(scheduler, [5], max_tokens=1)
    async with asyncio.timeout(5):
        while not (await scheduler.loads()).waiting:
            await asyncio.sleep(0.01)
    async with attached(scheduler.target) as worker:
        await worker.answer(await worker.step())
        assert (await collect(call))[0] == [7]


async def test_without_a_worker_requests_end_after_the_grace_time(tmp_path) -> None:
    async with running_scheduler(tmp_path, worker_grace=0.1) as scheduler:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(generate(scheduler, [5]))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        await scheduler.quiesced()


async def test_what_cannot_fit_the_first_worker_ends_before_its_first_token(
    scheduler: Running,
) -> None:
    call = generate(scheduler, [5], max_tokens=100)
    async with asyncio.timeout(5):
        while not (await scheduler.loads()).waiting:
            await asyncio.sleep(0.01)
    async with attached(scheduler.target):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(call)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "63" in error.value.details()
        await scheduler.quiesced()
