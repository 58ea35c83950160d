import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

from quire.v1 import generation_pb2, token_pb2
from services.chassis.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    Overloaded,
    RemoteError,
    Unavailable,
)
from services.tokenizer.domain import FinishReason, TokenEnd, Usage
from services.tokenizer.session import LinkCounts, SchedulerLink
from services.tokenizer.token_stream import TokenStream
from tests.fakes.scheduler import FakeScheduler, default_limits, packed
from tests.services.tokenizer.harness import NOTHING, eventually, link_options, running_link, work


@asynccontextmanager
async def linked(
    sockets: Path, *, options: dict[str, Any] | None = None, **scheduler: Any
) -> AsyncIterator[tuple[FakeScheduler, SchedulerLink]]:
    """A scheduler and a link with a session between them."""
    fake = FakeScheduler(f"unix://{sockets}/s.sock", **{"limits": default_limits(), **scheduler})
    await fake.start()
    try:
        async with running_link(link_options(fake.address, **(options or {}))) as link:
            await eventually(lambda: link.limits is not None)
            yield fake, link
    finally:
        if fake.runs:
            await fake.die()


async def tokens_of(stream: TokenStream, count: int) -> list[int]:
    """The next `count` tokens, in however many deltas they come."""
    ids: list[int] = []
    while len(ids) < count:
        delta = await stream.next()
        assert delta.end is None
        ids.extend(delta.ids)
    return ids


async def test_it_introduces_itself_and_learns_the_limits(sockets: Path) -> None:
    async with linked(sockets) as (scheduler, link):
        assert scheduler.session.hello.tokenizer_digest == "d1"
        assert scheduler.session.hello.protocol_major == 1
        assert scheduler.session.hello.instance_id
        await eventually(lambda: link.limits is not None)
        assert link.limits is not None
        assert (link.limits.max_model_len, link.limits.eos_token_ids) == (256, {2})
        changed = default_limits()
        changed.max_model_len = 99
        scheduler.session.send(limits=changed)
        await eventually(lambda: link.limits is not None and link.limits.max_model_len == 99)
        scheduler.session.send(limits=token_pb2.ModelLimits())
        await eventually(lambda: link.limits is None)


async def test_a_request_travels_whole_and_its_tokens_come_back(sockets: Path) -> None:
    async with linked(sockets) as (scheduler, link):
        trace = f"00-{'1' * 32}-{'2' * 16}-01"
        stream = link.open(work("abc", attempt=3, resumed=(8,), traceparent=trace))
        got = await scheduler.next_submission()
        assert (got.prompt, got.resumed) == ([5, 6, 7], [8])
        request = got.request
        assert (request.request_id, request.attempt, request.traceparent) == ("abc", 3, trace)
        assert request.sampling == generation_pb2.SamplingParams(
            temperature=0.0, top_p=1.0, top_k=0, seed=7
        )
        assert request.stopping == generation_pb2.StoppingCriteria(max_tokens=10)
        got.batch([10, 11], [12])
        assert await tokens_of(stream, 3) == [10, 11, 12]
        got.end(13, reason=generation_pb2.FINISH_REASON_STOP, stop_token_id=13, completion=5)
        delta = await stream.next()
        assert list(delta.ids) == [13]
        assert delta.end == TokenEnd(
            reason=FinishReason.STOP,
            stop_token_id=13,
            usage=Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=0),
        )
        stream.close()
        assert link.counts == NOTHING
        # Nothing to abort: it had ended.
        other = link.open(work("other"))
        await scheduler.next_submission()
        assert scheduler.session.aborts == []
        other.close()


async def test_workers_of_another_model_get_no_request(sockets: Path) -> None:
    other = default_limits()
    other.model = "other"
    both = "this tokenizer is for the model 'tiny', the workers serve 'other'"
    async with linked(sockets, limits=other) as (scheduler, link):
        stream = link.open(work("abc"))
        with pytest.raises(FailedPrecondition, match=both):
            await stream.next()
        stream.close()
        right = default_limits()
        right.max_model_len = 99
        scheduler.session.send(limits=right)
        await eventually(lambda: link.limits is not None and link.limits.max_model_len == 99)
        stream = link.open(work("good"))
        assert (await scheduler.next_submission()).request.request_id == "good"
        scheduler.session.send(limits=other)
        with pytest.raises(FailedPrecondition, match=both):
            await stream.next()
        stream.close()
        await eventually(lambda: scheduler.session.aborts == [1])


async def test_absent_max_tokens_stays_absent(sockets: Path) -> None:
    async with linked(sockets) as (scheduler, link):
        stream = link.open(work(max_tokens=None, ignore_eos=True))
        got = await scheduler.next_submission()
        assert got.request.stopping == generation_pb2.StoppingCriteria(ignore_eos=True)
        assert not got.request.HasField("resumed")
        stream.close()


async def test_deltas_merge_while_nobody_reads(sockets: Path) -> None:
    async with linked(sockets) as (scheduler, link):
        stream = link.open(work())
        got = await scheduler.next_submission()
        other = link.open(work("other"))
        last = await scheduler.next_submission()
        for token in range(100, 150):
            got.emit(token)
        last.end(1)
        while (await other.next()).end is None:  # so all of the first one's were read
            pass
        assert list((await stream.next()).ids) == list(range(100, 150))
        stream.close()
        other.close()


async def test_tokens_come_before_the_error(sockets: Path) -> None:
    async with linked(sockets) as (scheduler, link):
        stream = link.open(work())
        got = await scheduler.next_submission()
        got.emit(10)
        got.fail(grpc.StatusCode.ALREADY_EXISTS, "r is live")
        assert await tokens_of(stream, 1) == [10]
        with pytest.raises(RemoteError) as caught:
            await stream.next()
        assert caught.value.status.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
        assert caught.value.message == "r is live"
        stream.close()
        assert link.counts == NOTHING
        assert scheduler.session.aborts == []


async def test_closing_aborts_what_runs(sockets: Path) -> None:
    async with linked(sockets) as (scheduler, link):
        stream = link.open(work())
        got = await scheduler.next_submission()
        stream.close()
        stream.close()
        assert link.counts == NOTHING
        await scheduler.until(lambda: scheduler.session.aborts == [got.stream_id])
        # What was under way meanwhile is dropped.
        got.emit(10)
        got.end(reason=generation_pb2.FINISH_REASON_ABORT)
        again = link.open(work())
        assert (await scheduler.next_submission()).stream_id == got.stream_id + 1
        again.close()


async def test_a_request_without_credit_waits_and_can_leave(sockets: Path) -> None:
    async with linked(sockets, credits=1, gives_credits=False) as (scheduler, link):
        first, left, second, third = (link.open(work(name)) for name in "abcd")
        got = await scheduler.next_submission()
        left.close()
        assert link.counts == LinkCounts(live=3, unsent=2, on_session=1)
        scheduler.session.send(batch=token_pb2.TokenBatch(credits=1))
        assert (await scheduler.next_submission()).request.request_id == "c"
        scheduler.session.send(batch=token_pb2.TokenBatch(credits=5))
        assert (await scheduler.next_submission()).request.request_id == "d"
        assert got.request.request_id == "a"
        for stream in (first, second, third):
            stream.close()
        await scheduler.until(lambda: scheduler.session.aborts == [1, 2, 3])


async def test_aborts_need_no_credit(sockets: Path) -> None:
    async with linked(sockets, credits=1, gives_credits=False) as (scheduler, link):
        first, second = link.open(work("a")), link.open(work("b"))
        await scheduler.next_submission()
        first.close()
        await scheduler.until(lambda: scheduler.session.aborts == [1])
        second.close()


async def test_too_many_waiting_requests_are_refused(sockets: Path) -> None:
    limited = {"max_unsent": 2}
    async with linked(sockets, options=limited, credits=0, gives_credits=False) as (_, link):
        streams = [link.open(work(name)) for name in "ab"]
        with pytest.raises(Overloaded) as caught:
            link.open(work("c"))
        assert caught.value.reason == "TOO_MANY_WAITING"
        streams.pop().close()
        streams.append(link.open(work("d")))
        for stream in streams:
            stream.close()


async def test_finishing_keeps_the_scheduler_informed(sockets: Path) -> None:
    async with linked(sockets) as (scheduler, link):
        stream = link.open(work())
        got = await scheduler.next_submission()
        got.batch([10, 11, 12])
        await tokens_of(stream, 3)
        stream.finish(2)
        await scheduler.until(lambda: scheduler.session.finishes == [(got.stream_id, 2)])
        got.end(13, reason=generation_pb2.FINISH_REASON_STOP, completion=2, cached=1)
        delta = await stream.next()
        assert (list(delta.ids), delta.end is not None) == ([], True)
        assert delta.end is not None
        assert delta.end.usage.cached_tokens == 1
        stream.close()
        assert (link.counts, scheduler.session.aborts) == (NOTHING, [])


async def test_a_finish_that_is_not_answered_ends_all_the_same(sockets: Path) -> None:
    async with linked(sockets, options={"finish_s": 0.05}) as (scheduler, link):
        stream = link.open(work())
        got = await scheduler.next_submission()
        got.emit(10)
        await tokens_of(stream, 1)
        stream.finish(1)
        delta = await stream.next()
        assert delta.end is not None
        assert delta.end.usage == Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=0)
        stream.close()
        assert link.counts == NOTHING


async def test_a_lost_session_is_only_a_pause(sockets: Path) -> None:
    async with linked(sockets) as (scheduler, link):
        first, second = link.open(work("a", attempt=4)), link.open(work("b"))
        got = [await scheduler.next_submission() for _ in range(2)]
        got[0].batch([10, 11])
        await tokens_of(first, 2)
        await scheduler.die()
        await eventually(lambda: link.counts.unsent == 2)
        third = link.open(work("c"))
        await scheduler.start()
        again = [await scheduler.next_submission() for _ in range(3)]
        assert [one.request.request_id for one in again] == ["a", "b", "c"]
        assert [one.request.attempt for one in again] == [5, 1, 0]
        assert [one.resumed for one in again] == [[10, 11], [], []]
        assert [one.prompt for one in again] == [[5, 6, 7]] * 3
        again[0].emit(12)
        again[1].emit(20)
        assert await tokens_of(first, 1) == [12]
        assert await tokens_of(second, 1) == [20]
        again[0].end(13)
        assert list((await first.next()).ids) == [13]
        for stream in (first, second, third):
            stream.close()
        assert link.counts == NOTHING


async def test_a_stream_cut_without_goodbye_is_a_loss_even_if_the_process_lives(
    sockets: Path,
) -> None:
    async with linked(sockets) as (scheduler, link):
        stream = link.open(work("a"))
        got = await scheduler.next_submission()
        got.emit(10)
        await tokens_of(stream, 1)
        got.session.drop()
        again = await scheduler.next_submission()
        assert again.session is not got.session
        assert (again.request.attempt, again.resumed, again.stream_id) == (1, [10], 1)
        # Tokens of the old session would be a second copy.
        got.emit(11)
        again.emit(12)
        assert await tokens_of(stream, 1) == [12]
        stream.close()


async def test_a_goodbye_is_answered_and_requests_go_to_the_next_session(sockets: Path) -> None:
    async with linked(sockets) as (scheduler, link):
        stream = link.open(work("a"))
        got = await scheduler.next_submission()
        got.session.send(bye=token_pb2.Bye(reason="restart"))
        again = await scheduler.next_submission()
        assert got.session.said_goodbye
        assert again.request.attempt == 1
        stream.close()


async def test_it_says_goodbye_when_it_stops(sockets: Path) -> None:
    async with linked(sockets) as (scheduler, _):
        session = scheduler.session
    assert session.said_goodbye


async def test_a_finished_request_is_not_submitted_again(sockets: Path) -> None:
    async with linked(sockets) as (scheduler, link):
        stream, other = link.open(work("a")), link.open(work("b"))
        got = await scheduler.next_submission()
        await scheduler.next_submission()
        got.batch([10, 11])
        await tokens_of(stream, 2)
        stream.finish(2)
        await scheduler.die()
        delta = await stream.next()
        assert delta.end is not None
        assert delta.end.usage.completion_tokens == 2
        await scheduler.start()
        assert (await scheduler.next_submission()).request.request_id == "b"
        stream.close()
        other.close()
        assert link.counts == NOTHING


async def test_a_stop_found_while_there_is_no_session_ends_at_once(sockets: Path) -> None:
    async with linked(sockets) as (scheduler, link):
        stream = link.open(work("a"))
        got = await scheduler.next_submission()
        got.emit(10)
        await tokens_of(stream, 1)
        await scheduler.die()
        await eventually(lambda: link.counts.unsent == 1)
        stream.finish(1)
        assert (await stream.next()).end is not None
        assert link.counts == LinkCounts(live=1, unsent=0, on_session=0)
        stream.close()


async def test_new_requests_wait_a_moment_for_a_scheduler(sockets: Path) -> None:
    fake = FakeScheduler(f"unix://{sockets}/s.sock", limits=default_limits())
    async with running_link(link_options(fake.address)) as link:
        stream = link.open(work())
        await asyncio.sleep(0.05)
        await fake.start()
        (await fake.next_submission()).end(10)
        assert list((await stream.next()).ids) == [10]
        stream.close()
    await fake.die()


async def test_once_there_is_a_scheduler_a_request_has_all_the_time(sockets: Path) -> None:
    fake = FakeScheduler(f"unix://{sockets}/s.sock", limits=default_limits())
    async with running_link(link_options(fake.address, new_request_s=0.3)) as link:
        stream = link.open(work())
        async with asyncio.TaskGroup() as tasks:
            news = tasks.create_task(stream.next())
            await fake.start()
            got = await fake.next_submission()
            await asyncio.sleep(0.4)
            got.end(10)
        assert list(news.result().ids) == [10]
        stream.close()
    await fake.die()


async def test_without_a_scheduler_new_requests_are_unavailable(sockets: Path) -> None:
    options = link_options(f"unix://{sockets}/none.sock", new_request_s=0.05)
    async with running_link(options) as link:
        stream = link.open(work())
        with pytest.raises(Unavailable, match="no scheduler can be reached"):
            await stream.next()
        stream.close()
        assert link.counts == NOTHING


async def test_lost_requests_wait_longer_than_new_ones_but_not_for_ever(sockets: Path) -> None:
    options = {"new_request_s": 0.02, "lost_request_s": 0.3}
    async with linked(sockets, options=options) as (scheduler, link):
        lost = link.open(work("lost"))
        await scheduler.next_submission()
        await scheduler.die()
        await eventually(lambda: link.counts.unsent == 1)
        new = link.open(work("new"))
        with pytest.raises(Unavailable):
            await new.next()
        assert not lost.is_over
        with pytest.raises(Unavailable):
            await lost.next()
        for stream in (lost, new):
            stream.close()
        assert link.counts == NOTHING


async def test_a_request_that_ends_every_session_is_given_up(sockets: Path) -> None:
    async def drop(submission: Any) -> None:
        submission.session.drop()

    async with linked(sockets, autopilot=drop) as (scheduler, link):
        stream = link.open(work())
        with pytest.raises(Unavailable, match="lost 6 times in a row"):
            await stream.next()
        stream.close()
        scheduler.autopilot = None
        good = link.open(work("good"))
        (await scheduler.next_submission()).end(10)
        assert list((await good.next()).ids) == [10]
        good.close()


async def test_progress_between_losses_is_no_reason_to_give_up(sockets: Path) -> None:
    async with linked(sockets) as (scheduler, link):
        stream = link.open(work(max_tokens=100))
        for number in range(10):
            got = await scheduler.next_submission()
            assert got.resumed == list(range(number))
            got.emit(number)
            assert await tokens_of(stream, 1) == [number]
            got.session.drop()
        stream.close()


async def test_what_is_too_large_to_pass_on_ends_alone(
    sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.tokenizer.session_call.MAX_MESSAGE_BYTES", 10_000)
    async with linked(sockets) as (scheduler, link):
        large, small = link.open(work("large", prompt=(1,) * 3000)), link.open(work("small"))
        with pytest.raises(InvalidArgument, match=r"^prompt: is too large to pass on: 120"):
            await large.next()
        got = await scheduler.next_submission()
        assert (got.request.request_id, got.stream_id) == ("small", 1)
        large.close()
        small.close()


async def test_a_scheduler_of_another_protocol_is_no_scheduler(
    sockets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeScheduler(f"unix://{sockets}/s.sock", limits=default_limits())
    fake.protocol_major = 2
    await fake.start()
    async with running_link(link_options(fake.address, new_request_s=0.2)) as link:
        stream = link.open(work())
        with pytest.raises(Unavailable):
            await stream.next()
        stream.close()
    assert "it speaks protocol 2, we speak 1" in caplog.text
    await fake.die()


async def test_a_scheduler_that_never_welcomes_is_dialled_again(
    sockets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked(sockets, options={"welcome_s": 0.05}) as (scheduler, link):
        scheduler.welcomes = False
        scheduler.session.drop()
        await eventually(lambda: "did not accept the session" in caplog.text)
        scheduler.welcomes = True
        stream = link.open(work())
        (await scheduler.next_submission()).end(10)
        assert list((await stream.next()).ids) == [10]
        stream.close()


@pytest.mark.parametrize(
    "message",
    [
        {"batch": token_pb2.TokenBatch(stream_ids=packed([1]), counts=packed([2]))},
        {"batch": token_pb2.TokenBatch(stream_ids=packed([1, 2]), counts=packed([0]))},
        {"batch": token_pb2.TokenBatch(stream_ids=b"123")},
        {"welcome": token_pb2.Welcome(protocol_major=1)},
        {},
    ],
)
async def test_what_breaks_the_contract_ends_the_session_and_loses_nothing(
    sockets: Path, message: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with linked(sockets) as (scheduler, link):
        stream = link.open(work())
        got = await scheduler.next_submission()
        got.session.send(**message)
        again = await scheduler.next_submission()
        assert "protocol violation" in caplog.text
        again.end(10)
        assert list((await stream.next()).ids) == [10]
        stream.close()
        assert link.counts == NOTHING


@pytest.mark.parametrize(
    "end",
    [
        {},
        {"finished": token_pb2.TokenFinished()},
        {"finished": token_pb2.TokenFinished(reason=77)},
        {"status": status_pb2.Status()},
        {"status": status_pb2.Status(code=99)},
        {"status": status_pb2.Status(code=-5)},
    ],
)
async def test_an_end_that_is_not_known_is_an_end(sockets: Path, end: dict[str, Any]) -> None:
    async with linked(sockets) as (scheduler, link):
        stream, other = link.open(work()), link.open(work("other"))
        got, good = await scheduler.next_submission(), await scheduler.next_submission()
        got.emit(10)
        got.session.send(
            batch=token_pb2.TokenBatch(ends=[token_pb2.StreamEnd(stream_id=got.stream_id, **end)])
        )
        good.end(11)
        assert list((await other.next()).ids) == [11]
        assert list((await stream.next()).ids) == [10]
        with pytest.raises(Internal, match="did not say how"):
            await stream.next()
        stream.close()
        other.close()
        assert len(scheduler.sessions) == 1
        assert link.counts == NOTHING


async def test_what_another_process_says_stays_on_one_short_line(
    sockets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked(sockets) as (scheduler, _):
        scheduler.session.say_goodbye("x\nforged line " + "y" * 100_000)
        await eventually(lambda: "said goodbye" in caplog.text)
    (line,) = [r.getMessage() for r in caplog.records if "said goodbye" in r.getMessage()]
    assert "x\\nforged line" in line
    assert len(line) < 500


async def test_rows_of_unknown_streams_are_passed_over(sockets: Path) -> None:
    async with linked(sockets) as (scheduler, link):
        stream = link.open(work())
        got = await scheduler.next_submission()
        scheduler.session.send(
            batch=token_pb2.TokenBatch(
                stream_ids=packed([77, got.stream_id, 78]),
                counts=packed([2, 1, 1]),
                token_ids=packed([1, 2, 3, 4]),
                ends=[got.finished(), token_pb2.StreamEnd(stream_id=99)],
            )
        )
        delta = await stream.next()
        assert (list(delta.ids), delta.end is not None) == ([3], True)
        stream.close()


async def test_a_scheduler_of_another_model_is_told_in_the_log(
    sockets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked(sockets, options={"model": "other"}):
        await eventually(lambda: "'tiny', this tokenizer is for 'other'" in caplog.text)


async def test_one_line_tells_that_the_scheduler_stays_away(
    sockets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    options = link_options(f"unix://{sockets}/none.sock", new_request_s=0.3)
    async with running_link(options) as link:
        stream = link.open(work())
        with pytest.raises(Unavailable):
            await stream.next()
        stream.close()
    lines = [record for record in caplog.records if "no session" in record.getMessage()]
    assert len(lines) == 1


async def test_everything_can_be_ended_at_once(sockets: Path) -> None:
    async with linked(sockets) as (scheduler, link):
        streams = [link.open(work(name)) for name in "ab"]
        for _ in streams:
            await scheduler.next_submission()
        link.fail_all(Unavailable("going away"))
        for stream in streams:
            with pytest.raises(Unavailable, match="going away"):
                await stream.next()
            stream.close()
        assert link.counts == NOTHING
        await scheduler.until(lambda: scheduler.session.aborts == [1, 2])


async def test_many_opens_and_closes_leave_nothing(sockets: Path) -> None:
    async with linked(sockets, credits=4) as (scheduler, link):
        for number in range(500):
            stream = link.open(work(str(number)))
            if number % 3:
                await asyncio.sleep(0)
            stream.close()
        assert link.counts == NOTHING
        good = link.open(work("good"))
        while (got := await scheduler.next_submission()).request.request_id != "good":
            pass
        got.end(10)
        assert list((await good.next()).ids) == [10]
        good.close()
