import asyncio
import itertools
import logging
from dataclasses import replace

import pytest

from quire.v1 import token_pb2, worker_pb2
from services.worker.link import SchedulerLink
from services.worker.model_thread import ModelThread
from services.worker.stream import LinkOptions
from tests.fakes.scheduler_link import (
    FakeScheduler,
    block_table_digest,
    ids,
    new_request,
    step,
)
from tests.services.worker.sum_worker import (
    REGISTRATION,
    Worker,
    attached,
    continuation,
    eventually,
    running,
)


async def test_registers_with_what_it_is(address):
    async with attached(address) as (_, _, link):
        assert (link.register.worker_id, link.register.instance_id) == ("w-0", "i-1")
        assert (link.register.num_blocks, link.register.max_in_flight) == (16, 2)


async def test_steps_are_answered_in_order_and_rows_go_on_by_themselves(address):
    async with attached(address) as (worker, _, link):
        await link.send(
            step(step_id=1, new=[new_request(3, [5, 6, 7])], rows=[(3, 3, [2])]),
            step(step_id=2, rows=[(3, 1, [])]),
        )
        got = [await link.result(), await link.result()]
        for step_id in range(3, 9):
            blocks = [step_id] if step_id in (3, 7) else []
            await link.send(step(step_id=step_id, rows=[(3, 1, blocks)]))
            got.append(await link.result())
        assert [result.step_id for result in got] == list(range(1, 9))
        assert all(result.epoch == 1 and result.counts == b"\1" for result in got)
        tokens = [token for result in got for token in ids(result.token_ids)]
        assert tokens == continuation([5, 6, 7], 8)
        assert worker.ready == [True]


async def test_a_second_step_is_received_while_the_first_is_executed(address):
    async with attached(address) as (worker, _, link):
        await link.send(step(step_id=1, new=[new_request(0, [1])], rows=[(0, 1, [2])]))
        await link.result()
        (executor,) = worker.executors
        executor.gate.clear()
        await link.send(step(step_id=2, rows=[(0, 1, [])]), step(step_id=3, rows=[(0, 1, [])]))
        await eventually(lambda: executor.started == [1, 2])
        await worker.received(1)
        assert executor.started == [1, 2]
        executor.gate.set()
        second, third = await link.result(), await link.result()
        assert (second.step_id, third.step_id) == (2, 3)
        # It was there before the second had ended.
        assert third.timings.wait_us >= third.timings.idle_us


async def test_more_steps_than_max_in_flight_end_the_link(address, caplog):
    async with attached(address) as (worker, scheduler, link):
        await link.send(step(step_id=1))
        await link.result()
        (executor,) = worker.executors
        executor.gate.clear()
        await link.send(step(step_id=2))
        await eventually(lambda: executor.started == [1, 2])
        await link.send(step(step_id=3), step(step_id=4))
        again = await scheduler.next_link()
        assert "max_in_flight" in caplog.text
        executor.gate.set()
        await again.accept(epoch=2)
        await again.send(step(epoch=2, step_id=1))
        assert (await again.result()).epoch == 2
        # What had not begun when the link ended was not executed any more.
        assert executor.started == [1, 2]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (step(step_id=5), "step_id: 5, expected 2"),
        (step(epoch=9, step_id=2), "epoch: 9"),
        (step(step_id=2, rows=[(0, 1, [99])]), "block ids are below 16"),
        (worker_pb2.Step(epoch=1, step_id=2, slots=b"\1"), "slots: 1 bytes"),
    ],
)
async def test_a_violation_ends_the_link_and_the_next_one_starts_empty(address, caplog, bad, says):
    async with attached(address) as (worker, scheduler, link):
        await link.send(step(step_id=1, new=[new_request(0, [1])], rows=[(0, 1, [2])]))
        await link.result()
        await link.send(bad)
        again = await scheduler.next_link()
        assert await link.received() is None  # no goodbye: the scheduler must see a loss
        assert says in caplog.text
        await again.accept(epoch=2)
        # The same slot is free, the count of steps starts anew.
        await again.send(step(epoch=2, step_id=1, new=[new_request(0, [4])], rows=[(0, 1, [2])]))
        assert ids((await again.result()).token_ids) == continuation([4], 1)
        assert worker.ready == [True, False, True]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (worker_pb2.AttachResponse(), "message: empty"),
        (worker_pb2.AttachResponse(step=step(step_id=1)), "step: sent before registered"),
        (
            worker_pb2.AttachResponse(
                registered=worker_pb2.Registered(epoch=1, max_num_seqs=5, num_slots=12)
            ),
            "registered.max_num_seqs: 5, must be 1 to 4",
        ),
        (
            worker_pb2.AttachResponse(
                registered=worker_pb2.Registered(epoch=1, max_num_seqs=4, num_slots=13)
            ),
            "registered.num_slots: 13, must be 4 to 12",
        ),
    ],
)
async def test_a_wrong_first_answer_is_a_violation(address, caplog, message, says):
    async with FakeScheduler.listening(address) as scheduler, running(Worker(address)):
        link = await scheduler.next_link()
        await link.send_raw(message)
        await (await scheduler.next_link()).accept(epoch=2)
        assert says in caplog.text


async def test_registered_twice_is_a_violation(address, caplog):
    async with attached(address) as (_, scheduler, link):
        await link.accept(epoch=2)
        await scheduler.next_link()
        assert "registered: sent twice" in caplog.text


async def test_a_failed_step_ends_the_link_with_its_cause_in_the_log(address, caplog):
    async with attached(address) as (worker, scheduler, link):
        await eventually(lambda: worker.executors)
        worker.executors[0].fails[2] = MemoryError("no room for 7 GiB")
        await link.send(step(step_id=1), step(step_id=2))
        assert (await link.result()).step_id == 1
        again = await scheduler.next_link()
        assert await link.received() is None
        assert "no room for 7 GiB" in caplog.text
        assert "a step failed: MemoryError" in caplog.text
        await again.accept(epoch=2)
        await again.send(step(epoch=2, step_id=1))
        assert (await again.result()).epoch == 2


async def test_stopping_answers_what_was_received_and_says_goodbye(address):
    async with attached(address) as (worker, _, link):
        await link.send(step(step_id=1))
        await link.result()
        (executor,) = worker.executors
        executor.gate.clear()
        await link.send(step(step_id=2), step(step_id=3))
        await eventually(lambda: executor.started == [1, 2])
        await worker.received(1)
        worker.stopping.set()
        await eventually(lambda: worker.ready == [True, False])  # before the steps have ended
        executor.gate.set()
        assert (await link.result()).step_id == 2
        assert (await link.result()).step_id == 3
        last = await link.received()
        assert last == worker_pb2.AttachRequest(bye=token_pb2.Bye(reason="worker stops"))
        assert await link.received() is None
    assert worker.ready == [True, False]


async def test_a_step_that_arrives_while_stopping_is_left_to_the_scheduler(address):
    async with attached(address) as (worker, _, link):
        await link.send(step(step_id=1))
        await link.result()
        (executor,) = worker.executors
        executor.gate.clear()
        await link.send(step(step_id=2))
        await eventually(lambda: executor.started == [1, 2])
        worker.stopping.set()
        await asyncio.sleep(0.05)
        await link.send(step(step_id=3))
        await asyncio.sleep(0.05)
        executor.gate.set()
        assert (await link.result()).step_id == 2
        assert (await link.received()).WhichOneof("message") == "bye"
        assert executor.started == [1, 2]


async def test_a_step_that_hangs_does_not_keep_the_worker_from_ending(address, caplog):
    caplog.set_level(logging.INFO)
    async with FakeScheduler.listening(address) as scheduler:
        worker = Worker(address, drain_timeout_s=0.1)
        async with running(worker) as task:
            link = await scheduler.next_link()
            await link.accept(epoch=1)
            await eventually(lambda: worker.executors)
            worker.executors[0].gate.clear()
            await link.send(step(step_id=1))
            await eventually(lambda: worker.executors[0].started)
            worker.stopping.set()
            await task
            assert await link.received() is None
            assert not await worker.thread.close(0.05)  # still busy, as the caller is told
    assert "1 steps unanswered at the drain timeout" in caplog.text


async def test_a_real_model_is_served_over_the_link(address, bench, limits):
    """Two requests, two steps in flight, digests compared; the tokens are those of the runner."""
    thread = ModelThread(asyncio.get_running_loop())
    link_options = LinkOptions(
        target=address,
        registration=replace(REGISTRATION, limits=limits),
        drain_timeout_s=5.0,
    )
    stopping = asyncio.Event()
    worker = SchedulerLink(
        link_options, make_executor=bench.runner, thread=thread, on_ready=_ignore
    )
    async with FakeScheduler.listening(address) as scheduler, asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run(stopping))
        link = await scheduler.next_link()
        await link.accept(epoch=1, check_block_tables=True)
        prompts = {0: [11, 12, 13], 7: [20, 21, 22, 23, 24]}
        tables = {0: [9], 7: [4, 5]}
        got = {0: [], 7: []}
        blocks = itertools.count(10)

        def plan(step_id):
            """Slot 7 enters with step 2; both grow by a block now and then."""
            rows, new = [], []
            for slot, first in ((0, 1), (7, 2)):
                if step_id < first:
                    continue
                known = len(prompts[slot]) + step_id - first
                fresh = tables[slot] if step_id == first else []
                if step_id != first and known > 4 * len(tables[slot]):
                    fresh = [next(blocks)]
                    tables[slot] = tables[slot] + fresh
                if step_id == first:
                    new.append(new_request(slot, prompts[slot]))
                rows.append((slot, len(prompts[slot]) if step_id == first else 1, fresh))
            held = {slot: tables[slot] for slot, _, _ in rows}
            return step(step_id=step_id, rows=rows, new=new, digest=block_table_digest(held))

        last = 16
        await link.send(plan(1))
        for step_id in range(2, last + 1):
            await link.send(plan(step_id))  # before the one before is answered
            result = await link.result()
            assert result.step_id == step_id - 1
            for slot, token in zip(got if step_id > 2 else [0], ids(result.token_ids), strict=True):
                got[slot].append(token)
        await link.result()
        stopping.set()
    assert await thread.close(5)
    for slot, first in prompts.items():
        assert got[slot] == bench.alone(first, len(got[slot]))


async def _ignore(ready):
    del ready
