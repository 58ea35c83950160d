"""The client over several scripted text doors."""

import asyncio
import contextlib
import inspect
from pathlib import Path
from typing import Any

import pytest
from google.rpc import error_details_pb2

from quire import AsyncClient, SamplingParams
from quire.course import Course, Cut
from quire.endpoints import Endpoint, Endpoints
from quire.errors import AlreadyExists, AnswerCut, InvalidRequest, Unavailable, Unreachable
from quire.v1 import text_pb2
from tests.fakes.text_service import FakeTextService, failure, serving, unavailable, words

NOBODY = "127.0.0.1:1"


def draining() -> Any:
    reason = error_details_pb2.ErrorInfo(reason="DRAINING")
    status = failure("UNAVAILABLE", "this tokenizer is going away", reason)
    status.details.append(unavailable().details[0])
    return status


@contextlib.asynccontextmanager
async def stoppable(service: FakeTextService, **options: Any) -> Any:
    """Serves until `stop` is awaited; yields the target and `stop`."""
    async with contextlib.AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(service, **options))
        yield target, stack.aclose


@pytest.mark.parametrize("target", ["", " ", ",", "a:1,", [], ["a:1", ""], [7], None, 5])
def test_a_target_that_names_no_server_is_refused(target: Any) -> None:
    with pytest.raises(InvalidRequest, match="target: must name one server or more"):
        AsyncClient(target)


@pytest.mark.parametrize(
    "target", ["localhost", "hello", "http://a:1", "http://a", "a:0", "a:65536", ":1", "a:1/b"]
)
def test_what_is_no_address_is_refused(target: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        AsyncClient(["b:2", target])
    assert str(caught.value) == f"target: must be HOST:PORT or unix:///PATH, got {target!r}"


@pytest.mark.parametrize("target", ["[::1]:5", "dns:///a.b:65535", "unix:///tmp/x", "unix:x"])
def test_other_forms_of_addresses(target: str) -> None:
    assert AsyncClient(target).target == target


@pytest.mark.parametrize("target", ["a:1, b:2", ["a:1", "b:2"], "a:1,b:2,a:1"])
def test_targets_are_named_together(target: Any) -> None:
    assert AsyncClient(target).target == "a:1,b:2"


async def test_calls_go_to_each_server_in_turn() -> None:
    services = [FakeTextService(length=1) for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(serving(service)) for service in services]
        async with AsyncClient(targets) as client:
            for _ in range(6):
                await client.complete("Hi")
            for _ in range(3):
                assert (await client.info()).model == "fake"
    assert [len(service.requests) for service in services] == [2, 2, 2]


async def test_a_name_with_several_addresses_is_used_whole() -> None:
    first, second = FakeTextService(length=1), FakeTextService(length=1)
    async with serving(first) as target:
        port = target.rpartition(":")[2]
        # What a resolver makes of such a name, without one.
        name = f"ipv4:127.0.0.1:{port},127.0.0.2:{port}"
        async with serving(second, address=f"127.0.0.2:{port}"):
            endpoint = Endpoint(name)
            try:
                async with asyncio.timeout(10):
                    while not (first.requests and second.requests):
                        await endpoint.text.Generate(text_pb2.GenerateRequest(text="Hi")).read()
                        await asyncio.sleep(0.01)
            finally:
                await endpoint.channel.close()


async def test_a_server_that_is_down_is_passed_over() -> None:
    service = FakeTextService(length=2)
    async with serving(service) as target, AsyncClient(f"{NOBODY},{target}") as client:
        for number in range(4):
            assert (await client.complete("Hi")).text == "".join(words(2))
            assert await client.tokenize("a") == (1, 97)
            # Known to be down after the first time, so that it costs no attempt any more.
            assert service.requests[-1].attempt == 0 or number < 2
        assert await client.is_ready()


async def test_a_server_that_comes_back_is_used_again() -> None:
    first, second, again = (FakeTextService(length=1) for _ in range(3))
    async with (
        serving(second) as other,
        stoppable(first) as (target, stop),
        AsyncClient([target, other]) as client,
    ):
        await client.complete("Hi")
        await client.complete("Hi")
        await stop()
        for _ in range(3):
            await client.complete("Hi")
        async with serving(again, address=target), asyncio.timeout(20):
            while not again.requests:
                await client.complete("Hi")
                await asyncio.sleep(0.05)
    assert len(first.requests) == 1


async def test_all_servers_down_are_all_named() -> None:
    async with AsyncClient([NOBODY, "127.0.0.1:2"]) as client:
        for call in (client.complete("Hi"), client.info()):
            with pytest.raises(Unreachable) as caught:
                await call
            assert "cannot reach 127.0.0.1:1 (Connection refused" in caught.value.message
            assert "cannot reach 127.0.0.1:2 (Connection refused" in caught.value.message


async def test_a_server_that_goes_away_in_mid_answer_is_replaced_by_another() -> None:
    first, second = FakeTextService(length=6, pause=3), FakeTextService(length=6)
    texts: list[str] = []
    ids: list[int] = []
    async with (
        serving(second) as other,
        stoppable(first) as (target, stop),
        AsyncClient([target, other]) as client,
    ):
        while not first.requests:
            second.requests.clear()
            texts, ids = [], []
            async for delta in client.generate("Hi", SamplingParams(seed=9), request_id="r"):
                texts.append(delta.text)
                ids += delta.token_ids
                if first.requests and len(ids) == 3:
                    await first.paused.wait()
                    await stop()
    assert "".join(texts) == "".join(words(6))
    assert ids == list(range(6))
    (begun,), (resumed,) = first.requests, second.requests
    assert (begun.attempt, resumed.attempt) == (0, 1)
    assert resumed.request_id == begun.request_id == "r"
    assert resumed.sampling.seed == begun.sampling.seed == 9
    assert resumed.resume.token_ids.packed == b"\0\0\0\0\x01\0\0\0\x02\0\0\0"


async def test_a_server_that_goes_away_before_the_first_token_is_replaced() -> None:
    first, second = FakeTextService(length=2, pause=0), FakeTextService(length=2, pause=0)
    async with (
        stoppable(first) as (one, stop_first),
        stoppable(second) as (two, stop_second),
        AsyncClient([one, two]) as client,
        asyncio.TaskGroup() as tasks,
    ):
        answer = tasks.create_task(client.complete("Hi"))
        waiting = [tasks.create_task(service.paused.wait()) for service in (first, second)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        begun, other, stop = (first, second, stop_first)
        if not first.paused.is_set():
            begun, other, stop = (second, first, stop_second)
        other.go_on.set()
        await stop()
        assert (await answer).text == "".join(words(2))
        for task in waiting:
            task.cancel()
    (before,), (after,) = begun.requests, other.requests
    assert (before.attempt, after.attempt) == (0, 1)
    assert before.request_id == after.request_id
    assert not after.HasField("resume")


async def test_the_only_server_comes_back_before_the_first_token() -> None:
    first, second = FakeTextService(length=2, pause=0), FakeTextService(length=2)
    async with (
        stoppable(first) as (target, stop),
        AsyncClient(target) as client,
        asyncio.TaskGroup() as tasks,
    ):
        answer = tasks.create_task(client.complete("Hi"))
        await first.paused.wait()
        await stop()
        async with serving(second, address=target):
            assert (await answer).text == "".join(words(2))
    (after,) = second.requests
    assert after.attempt >= 1
    assert after.request_id == first.requests[0].request_id


async def test_a_server_that_is_draining_hands_over() -> None:
    first, second = FakeTextService(refusal=draining()), FakeTextService(length=2)
    async with (
        serving(first) as one,
        serving(second) as two,
        AsyncClient([one, two]) as client,
    ):
        for _ in range(3):
            assert (await client.complete("Hi")).token_ids == (0, 1)
        for _ in range(3):
            assert (await client.info()).model == "fake"
    assert first.requests


async def test_what_all_servers_say_is_not_asked_for_ever() -> None:
    services = [FakeTextService(refusal=draining()) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(serving(service)) for service in services]
        async with AsyncClient(targets) as client:
            with pytest.raises(Unavailable, match="going away"):
                await client.complete("Hi")
    assert [len(service.requests) for service in services] == [1, 1]


async def test_an_answer_cut_everywhere_is_not_taken_up_for_ever() -> None:
    services = [FakeTextService(length=9, cuts=[1] * 9) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(serving(service)) for service in services]
        async with AsyncClient(targets, resume_tries=3) as client:
            with pytest.raises(Unavailable, match="going away"):
                await client.complete("Hi")
    assert sum(len(service.requests) for service in services) == 4


async def test_an_earlier_attempt_that_is_still_cleared_away_is_waited_for() -> None:
    service = FakeTextService(length=4, cuts=[2])
    async with serving(service) as target, AsyncClient(target) as client:
        answer = client.generate("Hi")
        assert (await anext(answer)).text == " w0"
        service.refusals = [failure("ALREADY_EXISTS", "it is live")]
        rest = [delta.text async for delta in answer]
        assert "".join(rest) == "".join(words(4)[1:])
        assert [request.attempt for request in service.requests] == [0, 1, 2]

        service.refusals = [failure("ALREADY_EXISTS", "it is live")]
        with pytest.raises(AlreadyExists):
            await client.complete("Hi")


async def test_one_ready_server_is_enough() -> None:
    async with (
        serving(FakeTextService(), ready=False) as one,
        serving(FakeTextService()) as two,
        AsyncClient([one, NOBODY, two]) as client,
    ):
        for _ in range(3):
            await client.wait_ready(5.0)
            assert await client.is_ready()


async def test_no_ready_server() -> None:
    async with serving(FakeTextService(), ready=False) as one, AsyncClient([one, NOBODY]) as client:
        assert not await client.is_ready()
        with pytest.raises(Unavailable, match=r"not ready within 0\.2 s"):
            await client.wait_ready(0.2)


async def test_unix_sockets(tmp_path: Path) -> None:
    targets = [f"unix://{tmp_path}/{name}.sock" for name in "ab"]
    services = [FakeTextService(length=1), FakeTextService(length=1)]
    async with (
        serving(services[0], address=targets[0]),
        serving(services[1], address=targets[1]),
        AsyncClient(",".join(targets)) as client,
    ):
        for _ in range(4):
            assert (await client.complete("Hi")).text == " w0"
    assert [len(service.requests) for service in services] == [2, 2]


async def test_the_only_server_has_time_to_be_started_again() -> None:
    tries = inspect.signature(AsyncClient).parameters["resume_tries"].default
    endpoints = Endpoints([NOBODY])
    course, gone = Course(endpoints, tries), Unreachable("gone")
    cut = Cut(endpoints.choose(()), connected=True, progressed=True, attempt=0)
    pauses = [course.after(gone, cut, cause=gone) for _ in range(tries)]
    assert 25 <= sum(pauses) <= 30
    with pytest.raises(AnswerCut, match="gone"):
        course.after(gone, cut, cause=gone)
    await endpoints.close()
