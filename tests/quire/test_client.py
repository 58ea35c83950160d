"""The client against a scripted text door."""

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from quire import AsyncClient, ChatMessage, Delta, SamplingParams, Scheduling, Usage
from quire.errors import (
    AnswerCut,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    NotSupported,
    Overloaded,
    QuireError,
    ServerFault,
    Unavailable,
    Unreachable,
)
from quire.v1 import generation_pb2
from tests.fakes.text_service import (
    FakeTextService,
    failure,
    full,
    serving,
    unavailable,
    words,
)


async def read(answer: Any) -> list[Delta]:
    return [delta async for delta in answer]


async def read_into(received: list[str], answer: Any) -> None:
    async for delta in answer:
        received += [delta.text]


async def test_an_answer_comes_in_pieces_and_says_how_it_ended() -> None:
    service = FakeTextService(length=3)
    async with serving(service) as target, AsyncClient(target) as client:
        deltas = await read(client.generate("Hi"))
    assert [delta.text for delta in deltas] == [*words(3), ""]
    assert [delta.token_ids for delta in deltas] == [(0,), (1,), (2,), ()]
    assert [delta.finished for delta in deltas[:-1]] == [None] * 3
    end = deltas[-1].finished
    assert end is not None
    assert (end.reason, end.stop) == ("stop", 2)
    assert end.usage == Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=1)
    (request,) = service.requests
    assert (end.request_id, end.seed) == (request.request_id, request.sampling.seed)


async def test_what_is_asked_for_is_what_is_sent() -> None:
    params = SamplingParams(
        temperature=0,
        top_p=0.5,
        top_k=0,
        seed=7,
        max_tokens=2,
        ignore_eos=True,
        stop="END",
        stop_token_ids=[0, 9],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    service = FakeTextService()
    async with serving(service) as target, AsyncClient(target) as client:
        await read(client.generate([5, 6], params, request_id="r", traceparent="00-a-b-01"))
    (request,) = service.requests
    assert request.request_id == "r"
    assert request.token_ids.packed == b"\x05\0\0\0\x06\0\0\0"
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("top_k")
    assert (request.sampling.temperature, request.sampling.top_p) == (0, 0.5)
    assert (request.sampling.top_k, request.sampling.seed) == (0, 7)
    assert (request.stopping.max_tokens, request.stopping.ignore_eos) == (2, True)
    assert list(request.stop_strings) == ["END"]
    assert list(request.stopping.stop_token_ids) == [0, 9]
    assert request.output.include_stop_str_in_output
    assert request.output.HasField("skip_special_tokens")
    assert not request.output.skip_special_tokens
    assert (request.attempt, request.HasField("resume")) == (0, False)
    assert service.metadata[0]["traceparent"] == "00-a-b-01"


async def test_what_is_left_open_is_not_sent() -> None:
    service = FakeTextService()
    async with serving(service) as target, AsyncClient(target) as client:
        await read(client.generate("Hi"))
        await read(client.generate("Hi"))
    first, second = service.requests
    sent = [field.name for field, _ in first.sampling.ListFields()]
    assert sent == ["seed"]
    assert not first.stopping.HasField("max_tokens")
    assert first.request_id != second.request_id
    assert first.sampling.seed != second.sampling.seed
    assert "traceparent" not in service.metadata[0]


async def test_a_cut_answer_goes_on_where_it_ended() -> None:
    service = FakeTextService(length=6, cuts=[2, 5])
    async with serving(service) as target, AsyncClient(target) as client:
        answer = await client.complete("Hi", SamplingParams(temperature=1.0))
    assert answer.text == "".join(words(6))
    assert answer.token_ids == tuple(range(6))
    assert (answer.finish_reason, answer.stop) == ("stop", 2)
    first, second, third = service.requests
    assert [r.attempt for r in service.requests] == [0, 1, 2]
    assert second.resume.token_ids.packed == b"\0\0\0\0\x01\0\0\0"
    assert len(third.resume.token_ids.packed) == 5 * 4
    for request in (second, third):
        assert request.request_id == first.request_id == answer.request_id
        assert request.sampling.seed == first.sampling.seed == answer.seed
        assert request.text == "Hi"


async def test_an_answer_cut_after_its_last_token_only_gets_its_end() -> None:
    service = FakeTextService(length=3, cuts=[3])
    async with serving(service) as target, AsyncClient(target) as client:
        answer = await client.complete("Hi")
    assert answer.token_ids == (0, 1, 2)
    assert len(service.requests) == 2


async def test_an_answer_is_not_taken_up_again_for_ever() -> None:
    service = FakeTextService(length=9, cuts=[1, 1, 1, 1])
    async with serving(service) as target, AsyncClient(target, resume_tries=2) as client:
        received: list[str] = []
        with pytest.raises(Unavailable, match="going away"):
            await read_into(received, client.generate("Hi"))
    assert received == words(1)
    assert len(service.requests) == 3


async def test_nothing_is_repeated_before_the_first_token() -> None:
    service = FakeTextService(cuts=[0])
    async with serving(service) as target, AsyncClient(target) as client:
        with pytest.raises(Unavailable):
            await client.complete("Hi")
    assert len(service.requests) == 1


async def test_other_failures_end_an_answer() -> None:
    service = FakeTextService(cuts=[2], failure=failure("INTERNAL", "a fault"))
    async with serving(service) as target, AsyncClient(target) as client:
        with pytest.raises(ServerFault, match="a fault"):
            await client.complete("Hi")
    assert len(service.requests) == 1


async def test_an_answer_without_an_end_is_a_fault() -> None:
    async with serving(FakeTextService(silent_end=True)) as target, AsyncClient(target) as client:
        with pytest.raises(ServerFault, match="without saying how it ended"):
            await client.complete("Hi")


async def test_closing_the_iterator_ends_the_request() -> None:
    service = FakeTextService(pause=1)
    async with serving(service) as target, AsyncClient(target) as client:
        answer = client.generate("Hi")
        assert (await anext(answer)).text == " w0"
        await answer.aclose()
        async with asyncio.timeout(10):
            await service.ended_early.wait()


async def test_cancelling_the_task_ends_the_request() -> None:
    service = FakeTextService(pause=1)
    async with serving(service) as target, AsyncClient(target) as client:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(client.complete("Hi"))
            await service.paused.wait()
            task.cancel()
        assert task.cancelled()
        async with asyncio.timeout(10):
            await service.ended_early.wait()


async def test_a_deadline_ends_the_request_on_both_sides() -> None:
    service = FakeTextService(pause=1)
    async with serving(service) as target, AsyncClient(target) as client:
        with pytest.raises(DeadlineExceeded, match="within the time given"):
            await client.complete("Hi", deadline_s=0.2)
        async with asyncio.timeout(10):
            await service.ended_early.wait()


async def test_a_pause_that_is_longer_than_the_deadline_is_not_waited_for() -> None:
    slow = unavailable(retry_after_ms=60_000)
    service = FakeTextService(length=9, cuts=[1], failure=slow)
    async with serving(service) as target, AsyncClient(target) as client:
        with pytest.raises(DeadlineExceeded, match=r"cannot finish .* \(going away\)"):
            await client.complete("Hi", deadline_s=1.9)
    assert len(service.requests) == 1


async def test_a_deadline_holds_over_all_attempts() -> None:
    service = FakeTextService(length=9, cuts=[1, 2], pause=2)
    async with serving(service) as target, AsyncClient(target) as client:
        with pytest.raises(DeadlineExceeded):
            await client.complete("Hi", deadline_s=1.0)
    assert len(service.requests) <= 3


async def test_a_conversation() -> None:
    service = FakeTextService()
    async with serving(service) as target, AsyncClient(target) as client:
        answer = await client.complete_chat(
            [ChatMessage(role="system", content="be brief"), {"role": "user", "content": "Hi"}],
            SamplingParams(max_tokens=2),
        )
    assert (answer.text, answer.finish_reason, answer.stop) == (" w0 w1", "length", None)
    (request,) = service.requests
    sent = [(message.role, message.content) for message in request.messages]
    assert sent == [("system", "be brief"), ("user", "Hi")]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": "Hi", "name": "x"}], "messages[0].name"),
        ([{"role": "user", "content": "\udc80"}], "messages[0].content"),
    ],
)
async def test_a_wrong_message_is_named(messages: Any, field: str) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest) as caught:
            client.chat(messages)
    assert caught.value.field == field


@pytest.mark.parametrize("prompt", [[1, -1], [2**32], ["a"], [1.5], None, "a\ud800"])
async def test_a_wrong_prompt_is_named(prompt: Any) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest) as caught:
            client.generate(prompt)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("deadline", [0, -1, float("nan")])
async def test_a_deadline_must_lie_ahead(deadline: float) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match="deadline_s: must be > 0"):
            client.generate("Hi", deadline_s=deadline)


async def test_tokens_there_and_back() -> None:
    async with serving(FakeTextService()) as target, AsyncClient(target) as client:
        assert await client.tokenize("ab") == (1, 97, 98)
        assert await client.tokenize("ab", add_special_tokens=False) == (97, 98)
        assert await client.detokenize([1, 97, 98]) == "ab"
        assert await client.detokenize([1, 97], skip_special_tokens=False) == "<s>a"


async def test_a_rendered_conversation() -> None:
    async with serving(FakeTextService()) as target, AsyncClient(target) as client:
        rendered = await client.render_chat([{"role": "user", "content": "é"}])
        bare = await client.render_chat(
            [{"role": "user", "content": "é"}], add_generation_prompt=False
        )
    assert rendered.text == "user: é\nassistant:"
    assert "".join(map(chr, rendered.token_ids)) == rendered.text
    assert bare.text == "user: é\n"


async def test_facts_about_the_server() -> None:
    async with serving(FakeTextService()) as target, AsyncClient(target) as client:
        info = await client.info()
    assert (info.model, info.vocab_size, info.max_model_len) == ("fake", 1000, 512)
    assert info.kv_capacity_tokens is None
    assert info.eos_token_ids == (2,)


async def test_waiting_until_it_is_ready() -> None:
    async with serving(FakeTextService()) as target, AsyncClient(target) as client:
        await client.wait_ready()
        assert await client.is_ready()


async def test_not_ready_in_time() -> None:
    async with serving(FakeTextService(), ready=False) as target, AsyncClient(target) as client:
        with pytest.raises(Unavailable, match=r"not ready within 0\.2 s \(it is not ready\)"):
            await client.wait_ready(0.2)


async def test_nobody_there() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unreachable, match=r"cannot reach 127\.0\.0\.1:1 \(Connection refused"):
            await client.complete("Hi")
        with pytest.raises(Unavailable, match="Connection refused"):
            await client.wait_ready(0.2)


async def test_a_server_that_goes_away_in_the_middle() -> None:
    service = FakeTextService(pause=1)
    async with serving(service) as target:
        client = AsyncClient(target, resume_tries=1)
        await client.__aenter__()
        answer = client.generate("Hi")
        await anext(answer)
        await service.paused.wait()
    with pytest.raises(AnswerCut, match=r"^the answer was cut .*: cannot reach 127\.0\.0\.1"):
        await anext(answer)
    await client.__aexit__(None, None, None)


async def test_a_refusal_keeps_its_details() -> None:
    bad = error_details_pb2.BadRequest(
        field_violations=[{"field": "sampling.top_p", "description": "must be in (0, 1], got 7"}]
    )
    service = FakeTextService(refusal=failure("INVALID_ARGUMENT", "sampling.top_p: bad", bad))
    async with serving(service) as target, AsyncClient(target) as client:
        with pytest.raises(InvalidRequest) as invalid:
            await client.complete("Hi")
        assert invalid.value.field == "sampling.top_p"
        assert invalid.value.description == "must be in (0, 1], got 7"

        reason = error_details_pb2.ErrorInfo(reason="QUEUE_FULL")
        retry = unavailable(2500).details[0]
        service.refusal = failure("RESOURCE_EXHAUSTED", "queue is full", reason)
        service.refusal.details.append(retry)
        with pytest.raises(Overloaded) as overloaded:
            await client.complete("Hi")
        assert (overloaded.value.retry_after_s, overloaded.value.reason) == (2.5, "QUEUE_FULL")

        service.refusal = failure("NOT_FOUND", "no model x")
        with pytest.raises(NotFound, match="no model x"):
            await client.info()


async def test_a_client_that_is_not_open_says_so() -> None:
    with pytest.raises(QuireError, match="async with"):
        await AsyncClient().info()


@pytest.mark.parametrize("deadline", [float("inf"), 1e300, 10**400])
async def test_a_deadline_that_never_comes(deadline: float) -> None:
    service = FakeTextService(length=1)
    async with serving(service) as target, AsyncClient(target) as client:
        assert (await client.complete("Hi", deadline_s=deadline)).text == " w0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline_s": "1"}, "deadline_s: must be a number of seconds, got '1'"),
        ({"deadline_s": True}, "deadline_s: must be a number of seconds, got True"),
        ({"request_id": 5}, "request_id: must be text"),
        ({"request_id": "a\ud800"}, "request_id: is not valid Unicode at character 1"),
        ({"request_id": "é" * 65}, "request_id: must be at most 128 bytes, got 130"),
        *(
            ({"traceparent": wrong}, "traceparent: must be 1 to 512 printable ASCII characters")
            for wrong in (5, b"a", "", "a\nb", "é", "x" * 513, "a\x7f")
        ),
        ({"params": {"temperature": 0}}, "params: must be SamplingParams, got dict"),
    ],
)
async def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        for call in (client.generate, client.chat):
            with pytest.raises(InvalidRequest) as caught:
                call([], **options)
            assert str(caught.value) == message


async def test_what_runs_while_the_client_is_closed_says_so() -> None:
    service = FakeTextService(pause=1)
    async with serving(service) as target, asyncio.TaskGroup() as tasks:
        async with AsyncClient(target) as client:
            reading = tasks.create_task(_error_of(client.complete("Hi")))
            await service.paused.wait()
        assert (await reading).message == "the client was closed meanwhile"
        async with AsyncClient(target) as client:
            answer = client.generate("Hi")
            await anext(answer)
        error = await _error_of(anext(answer))
        assert error.message == "the client was closed meanwhile"


async def _error_of(call: Any) -> QuireError:
    with pytest.raises(QuireError) as caught:
        await call
    return caught.value


async def test_a_client_is_opened_once() -> None:
    service = FakeTextService(length=1)
    async with serving(service) as target, AsyncClient(target) as client:
        with pytest.raises(QuireError, match="open already"):
            await client.__aenter__()
        assert (await client.complete("Hi")).text == " w0"


async def test_an_address_where_texts_are_not_served() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            for call in (client.complete("Hi"), client.info()):
                with pytest.raises(NotSupported, match=rf"^there is no TextService at .*:{port};"):
                    await call
    finally:
        await server.stop(None)


URGENT = Scheduling(
    priority_class="interactive",
    tenant="acme",
    ttft_target_ms=250,
    tpot_target_ms=40,
    shed_late=True,
    session_id="s",
    cache_salt="",
    skip_reading_prefix_cache=True,
)


async def test_scheduling_is_sent_as_it_is_and_only_where_it_is_given() -> None:
    service = FakeTextService()
    async with serving(service) as target, AsyncClient(target) as client:
        await client.complete("Hi", scheduling=URGENT)
        await client.complete_chat([{"role": "user", "content": "Hi"}], scheduling=URGENT)
        await client.complete("Hi", scheduling=Scheduling())
        await client.complete("Hi", deadline_s=60)
    generated, chatted, *plain = service.requests
    assert generated.scheduling == chatted.scheduling
    assert generated.scheduling == generation_pb2.SchedulingOptions(
        priority_class="interactive",
        tenant="acme",
        ttft_target_ms=250,
        tpot_target_ms=40,
        shed_late=True,
        session_id="s",
        cache_salt="",
        skip_reading_prefix_cache=True,
    )
    assert not any(request.HasField("scheduling") for request in plain)


async def test_scheduling_of_another_kind_is_refused() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match="scheduling: must be Scheduling, got dict"):
            client.generate("Hi", scheduling={"tenant": "x"})  # type: ignore[arg-type]


async def test_every_attempt_says_what_is_left_of_the_deadline() -> None:
    service = FakeTextService(length=5, cuts=[2], failure=unavailable(300))
    async with serving(service) as target, AsyncClient(target) as client:
        answer = await client.complete("Hi", scheduling=Scheduling(deadline_s=60, tenant="a"))
    assert answer.text == "".join(words(5))
    first, again = (request.scheduling for request in service.requests)
    assert 40_000 < first.deadline_ms <= 60_000
    assert 40_000 - 300 < again.deadline_ms <= first.deadline_ms - 300
    assert (first.tenant, again.tenant) == ("a", "a")


@pytest.mark.parametrize(("own", "of_the_call"), [(0.3, None), (0.3, 60.0), (60.0, 0.3)])
async def test_the_earlier_deadline_counts(own: float, of_the_call: float | None) -> None:
    service = FakeTextService(pause=1)
    async with serving(service) as target, AsyncClient(target) as client:
        with pytest.raises(DeadlineExceeded):
            await client.complete(
                "Hi", deadline_s=of_the_call, scheduling=Scheduling(deadline_s=own)
            )
    assert service.requests[0].scheduling.deadline_ms <= 300


async def test_a_full_queue_says_when_to_come_back_and_is_not_asked_again() -> None:
    service = FakeTextService(refusal=full(2500))
    async with serving(service) as target, AsyncClient(target) as client:
        with pytest.raises(Overloaded, match="queue is full") as caught:
            await client.complete("Hi")
    assert (caught.value.retry_after_s, caught.value.was_shed) == (2.5, False)
    assert len(service.requests) == 1


async def test_an_answer_that_has_begun_waits_for_room_where_it_goes_on() -> None:
    service = FakeTextService(length=5, cuts=[2])
    service.refusals_after = [full(1), full(1)]
    async with serving(service) as target, AsyncClient(target) as client:
        answer = await client.complete("Hi")
    assert answer.text == "".join(words(5))
    assert [request.attempt for request in service.requests] == [0, 1, 2, 3]


async def test_an_answer_that_is_shed_is_not_asked_for_again() -> None:
    service = FakeTextService(length=5, cuts=[2])
    service.refusals_after = [full(1, "SHED")]
    async with serving(service) as target, AsyncClient(target) as client:
        with pytest.raises(Overloaded) as caught:
            await client.complete("Hi")
    assert caught.value.was_shed
    assert len(service.requests) == 2
