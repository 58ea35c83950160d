"""Generate."""

from typing import Any

import grpc
import pytest

from quire.v1 import generation_pb2, text_pb2
from services.tokenizer.domain import SamplingDefaults
from tests.assets.tokenizers import byte_ids
from tests.fakes.scheduler import Submission, default_limits, packed
from tests.services.tokenizer.calls import (
    STOP,
    TOKENIZER,
    answer,
    collect,
    generate,
    ids,
    status_of,
    unary,
    violation,
    violations,
    with_ids,
)
from tests.services.tokenizer.harness import eventually


async def test_a_generation_from_prompt_to_usage(service: Any) -> None:
    async with service() as running:
        call = running.stub.Generate(generate("Hi", request_id="r1"))
        got = await running.scheduler.next_submission()
        assert got.prompt == byte_ids(b"Hi")
        assert (got.request.request_id, got.request.model) == ("r1", "")
        got.emit(*ids("alpha"))
        first = await call.read()
        assert (first.request_id, first.text) == ("r1", "alpha")
        assert first.seed == got.request.sampling.seed
        assert not first.token_ids
        got.emit(*ids(" beta"))
        second = await call.read()
        assert second == text_pb2.GenerateResponse(text=" beta")
        got.end(*ids("ma"), 2, reason=STOP, stop_token_id=2, completion=4, cached=1)
        last = await call.read()
        assert last == text_pb2.GenerateResponse(
            text="ma",
            finished=text_pb2.Finished(
                reason=STOP,
                stop_token_id=2,
                usage=generation_pb2.Usage(prompt_tokens=2, completion_tokens=4, cached_tokens=1),
            ),
        )
        assert await call.read() is grpc.aio.EOF
        await running.is_empty()


async def test_one_message_with_everything(service: Any) -> None:
    async with service() as running:
        rows = [ids("alpha"), ids(" beta", " gam"), [2]]
        request = generate(output=unary(return_token_ids=True), request_id="r")
        (only,) = await answer(running, request, rows, reason=STOP, stop_token_id=2, completion=4)
        assert (only.request_id, only.HasField("seed")) == ("r", True)
        assert only.text == "alpha beta gam"
        assert list(only.token_ids) == [*ids("alpha", " beta", " gam"), 2]
        assert (only.finished.reason, only.finished.stop_token_id) == (STOP, 2)


@pytest.mark.parametrize("stream", [True, False])
async def test_stream_and_unary_give_the_same_text_and_end(service: Any, stream: bool) -> None:
    async with service() as running:
        rows = [[token] for token in byte_ids("é日\xff🌶".encode()[:-1])]
        request = generate(output=with_ids(stream=stream))
        messages = await answer(running, request, rows, completion=len(rows))
        whole = "".join(message.text for message in messages)
        assert whole == "é日\xff\ufffd"
        kept = [token for message in messages for token in message.token_ids]
        assert whole == TOKENIZER.decode(kept)
        assert all("\ufffd" not in message.text for message in messages[:-1])
        assert [message.HasField("finished") for message in messages].count(True) == 1
        assert len(messages) == (len(rows) + 1 if stream else 1)


async def test_empty_deltas_are_only_sent_with_ids(service: Any) -> None:
    async with service() as running:
        rows = [[token] for token in byte_ids("日".encode())]
        plain = await answer(running, generate(), rows)
        assert [message.text for message in plain] == ["日", ""]
        detailed = await answer(running, generate(output=with_ids()), rows)
        assert [message.text for message in detailed] == ["", "", "日", ""]
        assert [list(message.token_ids) for message in detailed] == [*rows, []]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("together", [True, False])
async def test_a_stop_string_cuts_text_ids_and_usage_and_tells_the_scheduler(
    service: Any, stream: bool, together: bool
) -> None:
    async with service() as running:
        request = generate(stop_strings=["beta gamma"], output=with_ids(stream=stream))
        call = running.stub.Generate(request)
        got = await running.scheduler.next_submission()
        tokens = ids("alpha", " beta", " gam", "ma", " delta")
        for row in [tokens] if together else [[token] for token in tokens]:
            got.batch(row)
        await running.scheduler.until(lambda: bool(got.session.finishes))
        assert got.session.finishes == [(got.stream_id, 4)]
        got.end(reason=STOP, completion=4, cached=2)
        messages = await collect(call)
        assert "".join(message.text for message in messages) == "alpha "
        assert [token for message in messages for token in message.token_ids] == tokens[:4]
        assert messages[-1].finished == text_pb2.Finished(
            reason=STOP,
            stop_string="beta gamma",
            usage=generation_pb2.Usage(prompt_tokens=2, completion_tokens=4, cached_tokens=2),
        )
        await running.is_empty()
        assert got.session.aborts == []


async def test_a_stop_string_in_the_last_tokens_beats_the_schedulers_end(service: Any) -> None:
    async with service() as running:
        call = running.stub.Generate(generate(stop_strings=["cd"]))
        got = await running.scheduler.next_submission()
        got.end(*byte_ids(b"abcdeZ"), 2, reason=STOP, stop_token_id=2, completion=7)
        messages = await collect(call)
        assert "".join(message.text for message in messages) == "ab"
        finished = messages[-1].finished
        assert (finished.stop_string, finished.usage.completion_tokens) == ("cd", 4)
        assert not finished.HasField("stop_token_id")
        assert got.session.finishes == []


async def test_stop_strings_are_not_looked_for_in_the_prompt(service: Any) -> None:
    async with service() as running:
        request = generate("a\nb\nc", stop_strings=["\n", "cd"])
        call = running.stub.Generate(request)
        got = await running.scheduler.next_submission()
        got.batch(byte_ids(b"d\n"))
        await running.scheduler.until(lambda: bool(got.session.finishes))
        got.end(reason=STOP)
        messages = await collect(call)
        assert "".join(message.text for message in messages) == "d"
        assert messages[-1].finished.stop_string == "\n"


async def test_ignore_eos_lets_an_ending_token_pass(service: Any) -> None:
    async with service() as running:
        criteria = generation_pb2.StoppingCriteria(ignore_eos=True)
        request = generate(stopping=criteria, output=with_ids())
        messages = await answer(running, request, [[2, *ids("alpha")]], completion=2)
        assert (messages[0].text, list(messages[0].token_ids)) == ("alpha", [2, *ids("alpha")])


async def test_a_prompt_that_ends_inside_a_character_gives_the_character(service: Any) -> None:
    async with service() as running:
        data = "Hello world 🌶".encode()
        prompt = generation_pb2.TokenIds(ids=byte_ids(data[:-2]))
        request = text_pb2.GenerateRequest(token_ids=prompt)
        rows = [[token] for token in byte_ids(data[-2:] + b"!")]
        messages = await answer(running, request, rows)
        assert [message.text for message in messages] == ["🌶", "!", ""]


async def test_absent_sampling_takes_the_models_defaults(service: Any) -> None:
    defaults = SamplingDefaults(temperature=0.5, top_p=0.75, top_k=9)
    async with service(defaults=defaults) as running:
        for given, expected in (
            ({}, (0.5, 0.75, 9)),
            ({"temperature": 0.0, "top_k": 0, "seed": 0}, (0.0, 0.75, 0)),
        ):
            params = generation_pb2.SamplingParams(**given)
            call = running.stub.Generate(generate(sampling=params))
            got = (await running.scheduler.next_submission()).request.sampling
            assert (got.temperature, got.top_p, got.top_k) == expected
            assert got.HasField("temperature")
            assert got.HasField("top_k")
            assert got.seed == 0 if "seed" in given else got.seed > 0
            call.cancel()
        await running.is_empty()


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"text": None}, "prompt"),
    ({"text": ""}, "prompt"),
    ({"text": "x" * 256}, "prompt"),
    ({"text": None, "token_ids": generation_pb2.TokenIds(ids=[5, 5000])}, "token_ids.ids[1]"),
    ({"text": None, "token_ids": generation_pb2.TokenIds(packed=b"12345")}, "token_ids.packed"),
    (
        {"text": None, "token_ids": generation_pb2.TokenIds(ids=[5], packed=packed([5]))},
        "token_ids",
    ),
    ({"text": None, "token_ids": generation_pb2.TokenIds()}, "prompt"),
    ({"sampling": generation_pb2.SamplingParams(top_p=0)}, "sampling.top_p"),
    ({"sampling": generation_pb2.SamplingParams(temperature=-1)}, "sampling.temperature"),
    ({"stopping": generation_pb2.StoppingCriteria(max_tokens=0)}, "stopping.max_tokens"),
    ({"stopping": generation_pb2.StoppingCriteria(max_tokens=255)}, "stopping.max_tokens"),
    (
        {"stopping": generation_pb2.StoppingCriteria(stop_token_ids=[1] * 129)},
        "stopping.stop_token_ids",
    ),
    (
        {"stopping": generation_pb2.StoppingCriteria(stop_token_ids=[1023, 1024])},
        "stopping.stop_token_ids[1]",
    ),
    ({"stop_strings": [""]}, "stop_strings[0]"),
    ({"request_id": "r" * 129}, "request_id"),
    (
        {"resume": text_pb2.Resume(token_ids=generation_pb2.TokenIds(ids=[5000]))},
        "resume.token_ids.ids[0]",
    ),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("fields", "field"), BAD_REQUESTS)
async def test_a_bad_request_is_refused_by_field_and_the_next_one_works(
    service: Any, fields: dict[str, Any], field: str, stream: bool
) -> None:
    async with service() as running:
        output = text_pb2.OutputOptions(stream=stream)
        request = text_pb2.GenerateRequest(**{"text": "Hi", "output": output, **fields})
        status = await status_of(running.stub.Generate(request))
        assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert violation(status) == field
        assert status.message.startswith(f"{field}: ")
        messages = await answer(running, generate(), [ids("alpha")])
        assert "".join(message.text for message in messages) == "alpha"
        await running.is_empty()


async def test_errors_of_the_scheduler_come_through_as_they_are(service: Any) -> None:
    async with service() as running:
        call = running.stub.Generate(generate(request_id="r"))
        (await running.scheduler.next_submission()).fail(
            grpc.StatusCode.ALREADY_EXISTS, "request_id r is live"
        )
        status = await status_of(call)
        assert (status.code, status.message) == (6, "request_id r is live")
        call = running.stub.Generate(generate())
        got = await running.scheduler.next_submission()
        got.emit(*ids("alpha"))
        got.fail(grpc.StatusCode.INTERNAL, "NaN logits")
        assert (await call.read()).text == "alpha"
        with pytest.raises(grpc.aio.AioRpcError, match="NaN logits"):
            await call.read()
        await running.is_empty()


async def test_an_abort_that_nobody_asked_for_is_an_error(service: Any) -> None:
    async with service() as running:
        call = running.stub.Generate(generate())
        got = await running.scheduler.next_submission()
        got.emit(*ids("alpha"))
        got.end(reason=generation_pb2.FINISH_REASON_ABORT)
        status = await status_of(call)
        assert (status.code, status.message) == (10, "the scheduler ended the request")
        await running.is_empty()


async def test_a_large_answer_and_a_large_prompt_pass(service: Any) -> None:
    limits = default_limits()
    limits.max_model_len = limits.kv_capacity_tokens = 3_000_000
    async with service() as running:
        running.scheduler.session.send(limits=limits)
        await eventually(lambda: running.link.limits.max_model_len == 3_000_000)
        prompt = generation_pb2.TokenIds(packed=packed([5] * 1_500_000))
        call = running.stub.Generate(text_pb2.GenerateRequest(token_ids=prompt, output=unary()))
        got: Submission = await running.scheduler.next_submission()
        assert len(got.request.prompt.packed) == 6_000_000
        got.end(*ids("alpha") * 1_000_000, completion=1_000_000)
        (only,) = await collect(call)
        assert len(only.text) == 5_000_000


async def test_all_fields_that_are_wrong_are_named_at_once(service: Any) -> None:
    async with service() as running:
        request = text_pb2.GenerateRequest(
            sampling=generation_pb2.SamplingParams(temperature=-1, top_p=2),
            stopping=generation_pb2.StoppingCriteria(max_tokens=0, stop_token_ids=[5000]),
            stop_strings=[""],
        )
        status = await status_of(running.stub.Generate(request))
        assert violations(status) == [
            "sampling.temperature",
            "sampling.top_p",
            "stopping.max_tokens",
            "stopping.stop_token_ids[0]",
            "stop_strings[0]",
            "prompt",
        ]
        assert all(f"{field}: " in status.message for field in violations(status))
        await running.is_empty()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("include", "skip", "text"),
    [
        (False, None, "alpha"),
        (True, None, "alpha..."),
        (True, False, "<|endoftext|>alpha..."),
        (False, False, "<|endoftext|>alpha"),
    ],
)
async def test_a_stop_token_ends_the_text(
    service: Any, include: bool, skip: bool | None, text: str, stream: bool
) -> None:
    async with service() as running:
        (stop,) = ids("...")
        output = with_ids(
            stream=stream, include_stop_str_in_output=include, skip_special_tokens=skip
        )
        stopping = generation_pb2.StoppingCriteria(stop_token_ids=[stop, 7, stop])
        call = running.stub.Generate(generate(stopping=stopping, output=output))
        got = await running.scheduler.next_submission()
        assert list(got.request.stopping.stop_token_ids) == [7, stop]
        got.batch([0], ids("alpha"))
        got.end(stop, reason=STOP, stop_token_id=stop, completion=3)
        messages = await collect(call)
        assert "".join(message.text for message in messages) == text
        assert [token for m in messages for token in m.token_ids] == [0, *ids("alpha"), stop]
        finished = messages[-1].finished
        assert (finished.reason, finished.stop_token_id) == (STOP, stop)
        assert finished.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_the_stop_string_may_stay_in_the_text(service: Any, stream: bool) -> None:
    async with service() as running:
        output = with_ids(stream=stream, include_stop_str_in_output=True)
        request = generate(stop_strings=["zzz", "a gam", "gamma"], output=output)
        call = running.stub.Generate(request)
        got = await running.scheduler.next_submission()
        tokens = ids("alpha", " beta", " gam", "ma", " delta")
        for token in tokens:
            got.emit(token)
        await running.scheduler.until(lambda: got.session.finishes == [(got.stream_id, 3)])
        got.end(reason=STOP, completion=3)
        messages = await collect(call)
        assert "".join(message.text for message in messages) == "alpha beta gam"
        assert [token for message in messages for token in message.token_ids] == tokens[:3]
        assert messages[-1].finished.stop_string == "a gam"


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(service: Any) -> None:
    """No token of this vocabulary covers more than the 13 characters of `<|endoftext|>`."""
    async with service() as running:
        for text in ("<|endoftext|>" * 256, "x" * 8_000_000):
            status = await status_of(running.stub.Generate(generate(text)))
            least = -(-len(text) // 13)
            assert status.message == (
                f"prompt: has {len(text)} characters, which are at least {least} tokens; "
                "the context is 256 tokens"
            )
        call = running.stub.Generate(generate("<|endoftext|>" * 255))
        assert (await running.scheduler.next_submission()).prompt == [0] * 255
        call.cancel()
        await running.is_empty()


async def test_ids_that_cannot_fit_are_refused_by_their_number(service: Any) -> None:
    async with service() as running:
        for form in ({"packed": b"\xff" * 4_000_000}, {"ids": [2**31] * 1_000_000}):
            prompt = generation_pb2.TokenIds(**form)
            status = await status_of(
                running.stub.Generate(text_pb2.GenerateRequest(token_ids=prompt))
            )
            assert status.message == (
                "prompt: has 1000000 tokens, and at least one is to be generated; "
                "the context is 256 tokens"
            )
        await running.is_empty()
