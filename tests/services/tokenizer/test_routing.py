"""Several schedulers: who gets a request, and what becomes of it when one refuses or is lost."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.v1 import token_pb2
from services.chassis.errors import Overloaded, RemoteError, Unavailable
from services.scheduler.digest import prefix_digest
from services.tokenizer import routing
from services.tokenizer.block_hashes import block_hashes, salt_of
from services.tokenizer.domain import LoadReport, Scheduling
from services.tokenizer.routing import Router
from services.tokenizer.scheduler_load import REQUEST_TOKENS, SchedulerLoad
from tests.fakes.scheduler import FakeScheduler, Submission, default_limits
from tests.services.tokenizer.harness import NOTHING, eventually, link_options, work

BLOCK = 4


def limits(**changes: Any) -> token_pb2.ModelLimits:
    made = default_limits()
    made.block_size, made.model_digest, made.prefix_hash = BLOCK, "d1", "sha256"
    for name, value in changes.items():
        setattr(made, name, value)
    return made


async def report(
    fake: FakeScheduler,
    *,
    running: int = 0,
    waiting_tokens: int = 0,
    cached: Sequence[int] | None = None,
    scheduling: Scheduling | None = None,
) -> None:
    """Says how busy a scheduler is, and that the blocks of one prompt are cached there."""
    message = token_pb2.LoadReport(running=running, waiting_tokens=waiting_tokens)
    if cached is not None:
        salt = salt_of(scheduling or Scheduling())
        hashes = block_hashes(cached, block_size=BLOCK, model_digest="d1", salt=salt)
        digest = await prefix_digest(b"".join(hashes))
        message.prefixes.bloom, message.prefixes.items = digest.bloom, digest.items
    fake.session.send(load=message)


class Submissions:
    """Notes what a stream tells of its submissions."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int, str]] = []

    def submitted(self, scheduler: str, attempt: int, tokens: int, why: str) -> None:
        self.seen.append((scheduler, attempt, tokens, why))


@dataclass
class Several:
    """Fake schedulers, and one router with links to all."""

    fakes: list[FakeScheduler]
    router: Router
    serving: list[bool]

    async def goes_to(self, request_id: str = "r", **fields: Any) -> int:
        """Which scheduler a new request goes to; it is closed at once."""
        stream = self.router.open(work(request_id, **fields))
        got = await self.next_submission()
        stream.close()
        await got.fake.until(lambda: got.submission.stream_id in got.submission.session.aborts)
        return self.fakes.index(got.fake)

    async def next_submission(self) -> "Got":
        async with asyncio.timeout(20):
            while True:
                for fake in self.fakes:
                    if not fake.submissions.empty():
                        return Got(fake, fake.submissions.get_nowait())
                await asyncio.sleep(0.002)

    async def reported(self, *reports: dict[str, Any] | None) -> None:
        """Each scheduler's report, once it is known to the router."""
        links = self.router._links
        for fake, fields, link in zip(self.fakes, reports, links, strict=True):
            if fields is not None:
                before = link.load._reports
                await report(fake, **fields)
                await eventually(lambda link=link, before=before: link.load._reports > before)


@dataclass
class Got:
    fake: FakeScheduler
    submission: Submission


@asynccontextmanager
async def several(
    sockets: Path,
    *all_limits: token_pb2.ModelLimits | None,
    options: dict[str, Any] | None = None,
    **fields: Any,
) -> AsyncIterator[Several]:
    fakes = [
        FakeScheduler(f"unix://{sockets}/s{number}.sock", limits=one, **fields)
        for number, one in enumerate(all_limits)
    ]
    serving: list[bool] = []

    async def on_serving(value: bool) -> None:
        serving.append(value)

    async with AsyncExitStack() as stack:
        for fake in fakes:
            await fake.start()
            stack.push_async_callback(_end, fake)
        router = Router(
            [link_options(fake.address, **(options or {})) for fake in fakes], on_serving
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(router.run())
            try:
                await eventually(lambda: all(link.serves for link in router._links))
                yield Several(fakes, router, serving)
            finally:
                router.stop()


async def _end(fake: FakeScheduler) -> None:
    if fake.runs:
        await fake.die()


async def test_one_scheduler_is_not_asked_for_reports_and_nothing_is_hashed(
    sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(routing, "block_hashes")
    async with several(sockets, limits()) as one:
        assert not one.fakes[0].session.hello.wants_load
        assert await one.goes_to(scheduling=Scheduling(session_id="s")) == 0
        assert one.router.limits is not None
        assert one.router.counts == NOTHING


async def test_several_are_asked_for_reports(sockets: Path) -> None:
    async with several(sockets, limits(), limits()) as two:
        assert [fake.session.hello.wants_load for fake in two.fakes] == [True, True]


async def test_load_decides_and_equals_go_by_order(sockets: Path) -> None:
    async with several(sockets, limits(), limits(), limits()) as three:
        assert await three.goes_to() == 0
        await three.reported({"waiting_tokens": 300}, {"running": 2}, {"waiting_tokens": 257})
        assert await three.goes_to() == 1
        await three.reported(None, {"running": 3}, None)
        assert await three.goes_to() == 2


async def test_a_burst_between_two_reports_is_spread(sockets: Path) -> None:
    async with several(sockets, limits(), limits()) as two:
        streams = [two.router.open(work(f"r{number}")) for number in range(10)]
        got = [await two.next_submission() for _ in streams]
        assert sorted(two.fakes.index(one.fake) for one in got) == [0] * 5 + [1] * 5
        # The report tells of those too: nothing counts twice.
        await two.reported({"running": 5}, {"running": 4})
        assert await two.goes_to() == 1
        for stream in streams:
            stream.close()
        assert two.router.counts == NOTHING


async def test_a_session_stays_where_it_was_however_busy_that_is(sockets: Path) -> None:
    async with several(sockets, limits(), limits()) as two:
        await two.reported({"waiting_tokens": 10}, {})
        mine = Scheduling(session_id="chat")
        assert await two.goes_to(scheduling=mine) == 1
        await two.reported({}, {"waiting_tokens": 1_000_000})
        assert await two.goes_to(scheduling=mine) == 1
        assert await two.goes_to(scheduling=Scheduling(session_id="chat", tenant="other")) == 0
        assert await two.goes_to() == 0


async def test_the_sessions_used_longest_ago_are_forgotten(
    sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "MOST_SESSIONS", 2)
    async with several(sockets, limits(), limits()) as two:
        await two.reported({"waiting_tokens": 10}, {})
        for name in "abac":  # b is the one used longest ago
            assert await two.goes_to(scheduling=Scheduling(session_id=name)) == 1
        await two.reported({}, {"waiting_tokens": 10})
        assert await two.goes_to(scheduling=Scheduling(session_id="a")) == 1
        assert await two.goes_to(scheduling=Scheduling(session_id="c")) == 1
        assert await two.goes_to(scheduling=Scheduling(session_id="b")) == 0


async def test_the_longest_cached_prefix_wins(sockets: Path) -> None:
    prompt = tuple(range(5, 45))
    async with several(sockets, limits(), limits(), limits()) as three:
        await three.reported({}, {"cached": prompt[:20]}, {"cached": prompt[:12]})
        assert await three.goes_to(prompt=prompt) == 1
        assert await three.goes_to(prompt=prompt[:15]) == 1, "equal prefixes: by order"
        assert await three.goes_to(prompt=(1, *prompt)) == 0
        # Of equal prefixes the less busy one's.
        await three.reported(None, {"running": 1}, None)
        assert await three.goes_to(prompt=prompt[:15]) == 2
        # What is not sent again is as it was; what is sent replaces it.
        assert await three.goes_to(prompt=prompt) == 1
        await three.reported(None, {"cached": ()}, None)
        assert await three.goes_to(prompt=prompt) == 2


@pytest.mark.parametrize(("excess", "wanted"), [(0, 1), (1, 0)])
async def test_a_holder_may_be_as_much_busier_as_its_prefix_and_the_slack(
    sockets: Path, excess: int, wanted: int
) -> None:
    prompt = tuple(range(5, 45))
    busy = routing.SLACK_TOKENS + 40 + 100 + excess
    async with several(sockets, limits(), limits()) as two:
        await two.reported({"waiting_tokens": 100}, {"cached": prompt, "waiting_tokens": busy})
        assert await two.goes_to(prompt=prompt) == wanted


async def test_content_counts_only_for_those_who_may_read_it(sockets: Path) -> None:
    prompt = tuple(range(5, 45))
    acme = Scheduling(tenant="acme")
    async with several(sockets, limits(), limits()) as two:
        await two.reported({}, {"cached": prompt, "scheduling": acme})
        assert await two.goes_to(prompt=prompt, scheduling=acme) == 1
        assert await two.goes_to(prompt=prompt) == 0
        shared = Scheduling(tenant="acme", cache_salt="acme")
        assert await two.goes_to(prompt=prompt, scheduling=shared) == 0
        skipping = Scheduling(tenant="acme", skip_reading_prefix_cache=True)
        assert await two.goes_to(prompt=prompt, scheduling=skipping) == 0


@pytest.mark.parametrize("prefix_hash", ["blake2b", ""])
async def test_content_does_not_count_where_the_hash_cannot_be_computed(
    sockets: Path, prefix_hash: str
) -> None:
    prompt = tuple(range(5, 45))
    other = limits(prefix_hash=prefix_hash)
    async with several(sockets, other, other) as two:
        await two.reported({}, {"cached": prompt})
        assert await two.goes_to(prompt=prompt) == 0


async def test_a_request_goes_where_it_fits_and_the_door_asks_the_widest(sockets: Path) -> None:
    small, large = limits(max_model_len=16), limits(max_model_len=64, kv_capacity_tokens=48)
    async with several(sockets, small, large) as two:
        known = two.router.limits
        assert known is not None
        assert (known.max_model_len, known.kv_capacity_tokens, known.num_workers) == (64, 4096, 2)
        assert await two.goes_to(prompt=(5,) * 6, max_tokens=10) == 0
        assert await two.goes_to(prompt=(5,) * 7, max_tokens=10) == 1
        assert await two.goes_to(prompt=(5,) * 16, max_tokens=None) == 1
        mine = Scheduling(session_id="s")
        assert await two.goes_to(prompt=(5,) * 6, scheduling=mine) == 0
        assert await two.goes_to(prompt=(5,) * 20, scheduling=mine) == 1


async def test_one_without_workers_or_of_another_model_gets_nothing(sockets: Path) -> None:
    async with several(sockets, None, limits()) as two:
        assert await two.goes_to() == 1
        two.fakes[0].session.send(limits=limits(model="other"))
        await eventually(lambda: not two.router._links[0].matches)
        assert two.router.limits is not None
        assert two.router.limits.model == "tiny"
        assert two.serving[-1]
        assert await two.goes_to() == 1
        two.fakes[0].session.send(limits=limits())
        await eventually(lambda: two.router._links[0].serves)
        assert await two.goes_to() == 0


async def test_a_refused_request_is_offered_once_more(sockets: Path) -> None:
    async with several(sockets, limits(), limits(), limits()) as three:
        mine = Scheduling(session_id="s")
        stream = three.router.open(work(scheduling=mine))
        observer = stream.observer = Submissions()
        first = await three.next_submission()
        first.submission.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        second = await three.next_submission()
        assert [three.fakes.index(one.fake) for one in (first, second)] == [0, 1]
        assert second.submission.request.attempt == 0, "its bounds are checked there too"
        addresses = [fake.address for fake in three.fakes[:2]]
        assert observer.seen == [(addresses[0], 0, 0, "new"), (addresses[1], 0, 0, "refused")]
        second.submission.end(7)
        delta = await stream.next()
        assert list(delta.ids) == [7]
        stream.close()
        assert await three.goes_to(scheduling=mine) == 1, "the session went along"

        stream = three.router.open(work())
        for _ in range(2):
            refusing = await three.next_submission()
            refusing.submission.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full too")
        with pytest.raises(RemoteError, match="full too"):
            await stream.next()
        stream.close()
        assert three.router.counts == NOTHING


async def test_a_request_that_would_rather_be_shed_is_not_offered_again(sockets: Path) -> None:
    async with several(sockets, limits(), limits()) as two:
        late = Scheduling(shed_late=True, ttft_target_ms=100)
        stream = two.router.open(work(scheduling=late))
        got = await two.next_submission()
        got.submission.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "too late")
        with pytest.raises(RemoteError, match="too late"):
            await stream.next()
        stream.close()
        assert two.router.counts == NOTHING


async def test_other_errors_are_the_callers(sockets: Path) -> None:
    async with several(sockets, limits(), limits()) as two:
        stream = two.router.open(work())
        got = await two.next_submission()
        got.submission.fail(grpc.StatusCode.INVALID_ARGUMENT, "wrong")
        with pytest.raises(RemoteError, match="wrong"):
            await stream.next()
        stream.close()
        assert two.fakes[1].submissions.empty()


async def test_requests_of_a_lost_scheduler_go_on_at_another(sockets: Path) -> None:
    async with several(sockets, limits(), limits()) as two:
        streams = [two.router.open(work(f"r{number}")) for number in range(4)]
        got = [await two.next_submission() for _ in streams]
        lost = [one for one in got if one.fake is two.fakes[0]]
        assert len(lost) == 2
        for one in got:
            one.submission.emit(20, 21)
        for stream in streams:
            assert list((await stream.next()).ids)[:1] == [20]
        await two.fakes[0].die()
        again = [await two.next_submission() for _ in lost]
        assert [one.submission.request.request_id for one in again] == [
            one.submission.request.request_id for one in lost
        ]
        for one in again:
            assert one.fake is two.fakes[1]
            assert (one.submission.resumed, one.submission.request.attempt) == ([20, 21], 1)
        assert two.serving[-1], "the other one serves all along"
        assert await two.goes_to() == 1
        for one in [*again, *(one for one in got if one not in lost)]:
            one.submission.end(22)
        for stream in streams:
            ids: list[int] = [20]
            while (delta := await stream.next()).end is None:
                ids.extend(delta.ids)
            assert [*ids, *delta.ids][-1] == 22
            stream.close()
        assert two.router.counts == NOTHING
        # Back, it gets requests again.
        await two.fakes[0].start()
        await eventually(lambda: two.router._links[0].serves)
        await two.reported({}, {"running": 1})
        assert await two.goes_to() == 0


async def test_what_waits_for_a_credit_goes_elsewhere_when_its_scheduler_stops_serving(
    sockets: Path,
) -> None:
    async with several(sockets, limits(), limits(), credits=1, gives_credits=False) as two:
        streams = [two.router.open(work(f"r{number}")) for number in range(4)]
        for _ in range(2):
            await two.next_submission()
        two.fakes[0].session.send(readiness=token_pb2.Readiness(serving=False))
        await eventually(lambda: two.router._links[1].counts.unsent == 2)
        assert two.router._links[0].counts.unsent == 0
        assert two.router._links[0].counts.live == 1, "what it has taken it keeps"
        for stream in streams:
            stream.close()


async def test_all_are_lost_and_the_first_to_return_takes_over(sockets: Path) -> None:
    async with several(sockets, limits(), limits()) as two:
        streams = [two.router.open(work(f"r{number}")) for number in range(2)]
        for _ in streams:
            await two.next_submission()
        for fake in two.fakes:
            await fake.die()
        await eventually(lambda: two.serving[-1] is False)
        assert two.router.limits is None
        while not two.fakes[1].submissions.empty():  # what the first one's loss sent it
            two.fakes[1].submissions.get_nowait()
        streams.append(two.router.open(work("new")))
        await two.fakes[1].start()
        again = [await two.next_submission() for _ in streams]
        assert {one.submission.request.request_id for one in again} == {"r0", "r1", "new"}
        assert all(one.fake is two.fakes[1] for one in again)
        await eventually(lambda: two.serving[-1])
        for stream in streams:
            stream.close()


async def test_nobody_returns(sockets: Path) -> None:
    options = {"new_request_s": 0.05, "lost_request_s": 0.05}
    async with several(sockets, limits(), limits(), options=options) as two:
        stream = two.router.open(work())
        await two.next_submission()
        for fake in two.fakes:
            await fake.die()
        with pytest.raises(Unavailable, match="no scheduler can be reached"):
            await stream.next()
        stream.close()


async def test_too_many_wait_everywhere(sockets: Path) -> None:
    none = {"credits": 0, "gives_credits": False}
    async with several(sockets, limits(), limits(), options={"max_unsent": 2}, **none) as two:
        streams = [two.router.open(work(f"r{number}")) for number in range(4)]
        assert [link.counts.unsent for link in two.router._links] == [2, 2]
        with pytest.raises(Overloaded, match="2 requests wait for the scheduler"):
            two.router.open(work("more"))
        for stream in streams:
            stream.close()
        assert two.router.counts == NOTHING


async def test_a_digest_that_is_none_ends_the_session(sockets: Path) -> None:
    async with several(sockets, limits(), limits()) as two:
        before = len(two.fakes[0].sessions)
        broken = token_pb2.LoadReport(prefixes=token_pb2.PrefixDigest(bloom=b"\xff" * 12))
        two.fakes[0].session.send(load=broken)
        await two.fakes[0].until(lambda: len(two.fakes[0].sessions) > before)


def test_own_requests_count_until_a_report_tells_of_them() -> None:
    load = SchedulerLoad()
    first = load.opened(100)
    assert load.outstanding_tokens == 100 + REQUEST_TOKENS
    second = load.opened(50)
    load.ended(second, 50)
    assert load.outstanding_tokens == 100 + REQUEST_TOKENS
    load.report(LoadReport(running=2, waiting=1, waiting_tokens=10, prefixes=None))
    assert load.outstanding_tokens == 10 + 3 * REQUEST_TOKENS
    load.ended(first, 100)
    assert load.outstanding_tokens == 10 + 2 * REQUEST_TOKENS
    load.forget()
    assert load.outstanding_tokens == 0
