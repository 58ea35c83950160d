import asyncio
import logging

import grpc
import pytest

from services.worker.plan import DeviceLost
from tests.fakes.scheduler_link import FakeScheduler, ids, new_request, step
from tests.services.worker.sum_worker import Worker, attached, continuation, eventually, running


async def test_a_scheduler_that_does_not_answer_is_dialled_again(address, caplog):
    worker = Worker(address, register_timeout_s=0.05)
    async with FakeScheduler.listening(address) as scheduler, running(worker):
        silent = await scheduler.next_link()
        await (await scheduler.next_link()).accept(epoch=1)
        assert await silent.received() is None
        assert "no answer to Register within 0.05 s" in caplog.text


async def test_dials_until_a_scheduler_is_there_and_says_so_once(address, caplog):
    caplog.set_level(logging.INFO)
    worker = Worker(address)
    async with running(worker):
        await eventually(lambda: "no scheduler at" in caplog.text)
        await asyncio.sleep(0.4)  # several more tries
        async with FakeScheduler.listening(address) as scheduler:
            link = await scheduler.next_link()
            await link.accept(epoch=1)
            await link.send(step(step_id=1))
            await link.result()
            worker.stopping.set()
            while await link.received() is not None:
                pass
            # Only then may the scheduler go: the answer to the goodbye is still on its way.
            await eventually(lambda: "detached: " in caplog.text)
    lines = [record.message for record in caplog.records if record.name.endswith("link")]
    assert [line.split(" ")[0] for line in lines] == ["no", "attached", "detached:"]
    assert lines[-1] == "detached: goodbye said and answered"


async def test_attaches_again_after_the_scheduler_vanished(address, caplog):
    async with FakeScheduler.listening(address) as scheduler:
        worker = Worker(address)
        async with running(worker):
            link = await scheduler.next_link()
            await link.accept(epoch=1)
            await link.send(step(step_id=1, new=[new_request(0, [1])], rows=[(0, 1, [2])]))
            await link.result()
            # The new listener takes the socket's path; the old server goes with the outer block.
            await link.refuse(grpc.StatusCode.UNAVAILABLE, "crashed")
            async with FakeScheduler.listening(address) as restarted:
                again = await restarted.next_link()
                await again.accept(epoch=2)
                await again.send(
                    step(epoch=2, step_id=1, new=[new_request(0, [1])], rows=[(0, 1, [2])])
                )
                assert ids((await again.result()).token_ids) == continuation([1], 1)
                assert worker.ready == [True, False, True]
                assert "link lost: UNAVAILABLE: crashed" in caplog.text
                worker.stopping.set()


async def test_the_end_of_the_stream_without_goodbye_is_a_loss(address, caplog):
    async with attached(address) as (_, scheduler, link):
        await link.close()
        await scheduler.next_link()
        assert "without goodbye" in caplog.text


async def test_a_goodbye_of_the_scheduler_is_no_error(address, caplog):
    caplog.set_level(logging.INFO)
    async with attached(address) as (_, scheduler, link):
        await link.bye("moving")
        await (await scheduler.next_link()).accept(epoch=2)
    assert "said goodbye: moving" in caplog.text
    assert all(record.levelno < logging.WARNING for record in caplog.records)


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.INVALID_ARGUMENT,
    ],
)
async def test_a_refusal_is_logged_with_its_reason(address, caplog, code):
    async with FakeScheduler.listening(address) as scheduler:
        worker = Worker(address)
        async with running(worker):
            link = await scheduler.next_link()
            await link.refuse(code, "another model is served")
            await eventually(lambda: "refused this worker" in caplog.text)
            assert f"{code.name}: another model is served" in caplog.text
            assert worker.ready == []


async def test_a_lost_device_ends_the_process(address):
    async with FakeScheduler.listening(address) as scheduler:
        worker = Worker(address)

        async def lose_the_device():
            async with running(worker):
                link = await scheduler.next_link()
                await link.accept(epoch=1)
                await eventually(lambda: worker.executors)
                worker.executors[0].fails[1] = DeviceLost("cuda:0: illegal address")
                await link.send(step(step_id=1))
                assert await link.received() is None

        # The group is that of `running`.
        with pytest.raises(ExceptionGroup) as caught:
            await lose_the_device()
        assert [type(error) for error in caught.value.exceptions] == [DeviceLost]
        assert await worker.thread.close(5)


@pytest.mark.parametrize("answer", ["nothing", "refusal"])
async def test_stops_at_once_where_it_is_not_attached(address, answer):
    async with FakeScheduler.listening(address) as scheduler:
        worker = Worker(address)
        async with running(worker) as task:
            link = await scheduler.next_link()
            if answer == "refusal":
                await link.refuse(grpc.StatusCode.FAILED_PRECONDITION, "no")
            worker.stopping.set()
            await task
    assert True not in worker.ready
