import asyncio
import contextlib
import logging
import threading

import grpc
import numpy as np
import pytest

from quire.v1 import token_pb2, worker_pb2
from services.worker.link import LinkOptions, SchedulerLink
from services.worker.model_thread import ModelThread
from services.worker.plan import DeviceLost, Registration, StepLimits, StepPlan, StepResult
from services.worker.rows import RequestRows
from tests.fakes.scheduler_link import FakeScheduler, ids, new_request, step

LIMITS = StepLimits(
    block_size=4,
    num_blocks=16,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=32,
    vocab_size=97,
    max_in_flight=2,
)
REGISTRATION = Registration(
    worker_id="w-0",
    instance_id="i-1",
    model="sums",
    model_digest="d",
    dtype="float32",
    device="cpu",
    limits=LIMITS,
    eos_token_ids=(0,),
)


def next_token(tokens):
    """What the executor below "samples" after `tokens`."""
    return (int(np.sum(tokens)) * 31 + len(tokens)) % LIMITS.vocab_size


def continuation(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


async def eventually(condition):
    """Waits for what another thread or the network is about to do."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    pytest.fail("it did not happen")


class SumExecutor:
    """Real rows; the model is a sum over the row. Steps wait for `gate`, and fail as told."""

    def __init__(self, attachment):
        self.rows = RequestRows(attachment, LIMITS)
        self.gate = threading.Event()
        self.gate.set()
        self.started: list[int] = []
        self.fails: dict[int, Exception] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self.started.append(plan.step_id)
        assert self.gate.wait(10)
        if plan.step_id in self.fails:
            raise self.fails[plan.step_id]
        rows = self.rows
        rows.apply(plan)
        rows.advance(plan.slots, plan.num_tokens)
        sampled = plan.slots[rows.computed[plan.slots] == rows.known[plan.slots]]
        tokens = np.array(
            [next_token(rows.tokens[slot, : rows.known[slot]]) for slot in sampled], np.int64
        )
        rows.append_tokens(sampled, tokens)
        return StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            counts=np.isin(plan.slots, sampled).astype(np.uint8),
            token_ids=tokens.astype(np.uint32),
            failures=(),
        )


class Worker:
    """The link under test, and what it did."""

    def __init__(self, address, drain_timeout_s=5.0, register_timeout_s=10.0):
        self.stopping = asyncio.Event()
        self.executors: list[SumExecutor] = []
        self.attached: list[bool] = []
        self.thread = ModelThread(asyncio.get_running_loop())
        self.link = SchedulerLink(
            LinkOptions(
                target=address,
                registration=REGISTRATION,
                drain_timeout_s=drain_timeout_s,
                register_timeout_s=register_timeout_s,
            ),
            make_executor=self._make,
            thread=self.thread,
            on_attached=self._on_attached,
        )

    def _make(self, attachment):
        self.executors.append(SumExecutor(attachment))
        return self.executors[-1]

    async def _on_attached(self, attached):
        self.attached.append(attached)

    async def received(self, steps):
        """Waits until so many steps have been received and not begun."""
        await eventually(lambda: self.thread._jobs.qsize() == steps)


@contextlib.asynccontextmanager
async def running(worker):
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(worker.link.run(worker.stopping))
        try:
            yield task
        finally:
            for executor in worker.executors:
                executor.gate.set()
            worker.stopping.set()
    assert await worker.thread.close(5)


@pytest.fixture
def address(tmp_path):
    return f"unix://{tmp_path}/s.sock"


@contextlib.asynccontextmanager
async def attached(address, **options):
    """A worker, its scheduler, and their link at epoch 1."""
    async with FakeScheduler.listening(address) as scheduler:
        worker = Worker(address, **options)
        async with running(worker):
            link = await scheduler.next_link()
            await link.accept(epoch=1)
            yield worker, scheduler, link


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
        assert worker.attached == [True]


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
        assert worker.attached == [True, False, True]


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


async def test_a_scheduler_that_does_not_answer_is_dialled_again(address, caplog):
    worker = Worker(address, register_timeout_s=0.05)
    async with FakeScheduler.listening(address) as scheduler, running(worker):
        silent = await scheduler.next_link()
        await (await scheduler.next_link()).accept(epoch=1)
        assert await silent.received() is None
        assert "no answer to Register within 0.05 s" in caplog.text


async def test_registered_twice_is_a_violation(address, caplog):
    async with attached(address) as (_, scheduler, link):
        await link.accept(epoch=2)
        await scheduler.next_link()
        assert "registered: sent twice" in caplog.text


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
                assert worker.attached == [True, False, True]
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
            assert worker.attached == [False]


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
        await asyncio.sleep(0.05)
        executor.gate.set()
        assert (await link.result()).step_id == 2
        assert (await link.result()).step_id == 3
        last = await link.received()
        assert last == worker_pb2.AttachRequest(bye=token_pb2.Bye(reason="worker stops"))
        assert await link.received() is None
    assert worker.attached == [True, False]


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
    assert True not in worker.attached
