"""A worker end of the step link that a test plays by hand: it computes nothing.

It registers, records the steps as they arrive, and answers when told to; `token` says what each
sampling row gives.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc
import numpy as np

from quire.v1 import token_pb2, worker_pb2, worker_pb2_grpc

REGISTER = {
    "worker_id": "scripted",
    "instance_id": "1",
    "protocol_major": 1,
    "model": "scripted-model",
    "model_digest": "d1",
    "dtype": "float32",
    "device": "none",
    "block_size": 4,
    "num_blocks": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "max_model_len": 64,
    "vocab_size": 100,
    "eos_token_ids": [2],
    "max_in_flight": 2,
}


class ScriptedWorker:
    """One attachment. Use `attached()`."""

    def __init__(
        self, call, registered: worker_pb2.Registered, token: Callable[[int], int]
    ) -> None:
        self._call = call
        self._token = token
        self.registered = registered
        # Read by a task of its own: to cancel a read would cancel the call.
        self._inbox: asyncio.Queue = asyncio.Queue()
        self._known: dict[int, int] = {}
        self._computed: dict[int, int] = {}
        self.steps: list[worker_pb2.Step] = []

    async def step(self) -> worker_pb2.Step:
        """The next step, not answered yet."""
        message = await self._inbox.get()
        assert message is not None, "the scheduler ended the stream"
        assert message.WhichOneof("message") == "step", message
        self.steps.append(message.step)
        return message.step

    async def read(self) -> None:
        """Moves messages from the stream to the inbox; None marks its end."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._inbox.put_nowait(message)
        self._inbox.put_nowait(None)

    async def no_step(self, seconds: float = 0.05) -> None:
        """Asserts that no step is waiting."""
        await asyncio.sleep(seconds)
        assert self._inbox.empty(), "unexpected message"

    def samples(self, step: worker_pb2.Step) -> list[int]:
        """Slots that sample in this step, in row order."""
        for new in step.new_requests:
            self._known[new.slot] = len(new.token_ids) // 4
            self._computed[new.slot] = new.num_computed
        sampling = []
        for slot, count in zip(column(step.slots), column(step.num_tokens), strict=True):
            self._computed[slot] += count
            if self._computed[slot] == self._known[slot]:
                self._known[slot] += 1
                sampling.append(slot)
        return sampling

    async def answer(self, step: worker_pb2.Step, **changes: object) -> None:
        """Answers a step as a worker would."""
        sampling = self.samples(step)
        slots = column(step.slots)
        result = worker_pb2.StepResult(
            epoch=step.epoch,
            step_id=step.step_id,
            counts=bytes(slot in sampling for slot in slots),
            token_ids=np.array([self._token(slot) for slot in sampling], "<u4").tobytes(),
            timings=worker_pb2.StepTimings(wait_us=100, execute_us=900, idle_us=10),
        )
        for name, value in changes.items():
            setattr(result, name, value)
        await self._call.write(worker_pb2.AttachRequest(result=result))

    async def serve(self) -> None:
        """Answers everything, for ever."""
        while True:
            await self.answer(await self.step())

    async def bye(self) -> None:
        await self._call.write(worker_pb2.AttachRequest(bye=token_pb2.Bye(reason="test")))
        await self._call.done_writing()

    async def end(self) -> tuple[str, grpc.StatusCode]:
        """Reads to the end of the stream: the reason of Bye ("" without) and the status."""
        reason = ""
        while (message := await self._inbox.get()) is not None:
            if message.WhichOneof("message") == "bye":
                reason = message.bye.reason
        return reason, await self._call.code()


def column(data: bytes) -> list[int]:
    return np.frombuffer(data, "<u4").tolist()


@contextlib.asynccontextmanager
async def attached(
    target: str, *, token: Callable[[int], int] = lambda slot: 7, **register: object
) -> AsyncIterator[ScriptedWorker]:
    """Registers a worker; leaving cuts the stream without Bye."""
    async with grpc.aio.insecure_channel(target) as channel:
        call = worker_pb2_grpc.WorkerLinkServiceStub(channel).Attach()
        await call.write(
            worker_pb2.AttachRequest(register=worker_pb2.Register(**{**REGISTER, **register}))
        )
        message = await call.read()
        if message is grpc.aio.EOF:
            raise AssertionError(f"refused: {await call.code()} {await call.details()}")
        worker = ScriptedWorker(call, message.registered, token)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(worker.read())
            try:
                yield worker
            finally:
                call.cancel()
