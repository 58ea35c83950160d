"""Generations that were cut and go on."""

from typing import Any

import pytest

from quire.v1 import generation_pb2, text_pb2
from tests.assets.tokenizers import byte_ids
from tests.services.tokenizer.calls import (
    LENGTH,
    STOP,
    collect,
    generate,
    ids,
    resume,
    unary,
    with_ids,
)


async def test_a_lost_scheduler_is_only_a_pause_for_the_user(service: Any) -> None:
    async with service() as running:
        request = generate(stop_strings=["beta gamma"], output=with_ids())
        call = running.stub.Generate(request)
        got = await running.scheduler.next_submission()
        seed = got.request.sampling.seed
        got.emit(*ids("alpha", " beta"), *byte_ids("é".encode()[:1]))
        assert (await call.read()).text == "alpha "
        await running.scheduler.die()
        await running.scheduler.start()
        again = await running.scheduler.next_submission()
        assert again.resumed == [*ids("alpha", " beta"), *byte_ids("é".encode()[:1])]
        assert (again.request.attempt, again.request.sampling.seed) == (1, seed)
        again.emit(*byte_ids("é".encode()[1:]), *ids(" beta", " gam"))
        assert (await call.read()).text == "betaé "
        again.emit(*ids("ma"))
        await running.scheduler.until(lambda: again.session.finishes == [(again.stream_id, 7)])
        again.end(reason=STOP, completion=7)
        rest = await collect(call)
        assert "".join(message.text for message in rest) == ""
        assert rest[-1].finished.usage.completion_tokens == 7
        await running.is_empty()


async def test_a_resumed_generation_goes_on_without_repeating(service: Any) -> None:
    async with service() as running:
        first, second = byte_ids("é".encode())
        request = generate(
            request_id="r",
            attempt=2,
            sampling=generation_pb2.SamplingParams(seed=11),
            stop_strings=["beta gamma"],
            resume=resume(*ids("alpha", " beta"), first),
            output=with_ids(),
        )
        call = running.stub.Generate(request)
        got = await running.scheduler.next_submission()
        assert (got.request.attempt, got.request.sampling.seed) == (2, 11)
        assert got.resumed == [*ids("alpha", " beta"), first]
        got.batch([second], ids("!"))
        got.end(completion=5)
        messages = await collect(call)
        # "beta" was held back when its token was sent: it might have begun the stop string.
        assert "".join(message.text for message in messages) == "betaé!"
        assert messages[0].request_id == "r"
        assert [t for m in messages for t in m.token_ids] == [second, *ids("!")]
        assert messages[-1].finished.usage.completion_tokens == 5


async def test_a_stop_string_may_begin_before_the_cut(service: Any) -> None:
    async with service() as running:
        request = generate(stop_strings=["beta gamma"], resume=resume(*ids("alpha", " beta")))
        call = running.stub.Generate(request)
        got = await running.scheduler.next_submission()
        got.emit(*ids(" gam", "ma"))
        await running.scheduler.until(lambda: got.session.finishes == [(got.stream_id, 4)])
        got.end(reason=STOP, completion=4)
        messages = await collect(call)
        assert "".join(message.text for message in messages) == ""
        assert messages[-1].finished.stop_string == "beta gamma"


@pytest.mark.parametrize(
    ("fields", "text", "finished"),
    [
        (
            {"stopping": generation_pb2.StoppingCriteria(max_tokens=2)},
            "",
            text_pb2.Finished(reason=LENGTH),
        ),
        ({"stop_strings": ["beta"]}, "", text_pb2.Finished(reason=STOP, stop_string="beta")),
        (
            {
                "stopping": generation_pb2.StoppingCriteria(max_tokens=2),
                "stop_strings": ["beta gamma"],
            },
            "beta",
            text_pb2.Finished(reason=LENGTH),
        ),
    ],
)
async def test_a_generation_resumed_at_its_end_is_ended_here(
    service: Any, fields: dict[str, Any], text: str, finished: text_pb2.Finished
) -> None:
    async with service() as running:
        request = generate(resume=resume(*ids("alpha", " beta")), **fields)
        (only,) = await collect(running.stub.Generate(request))
        finished.usage.CopyFrom(generation_pb2.Usage(prompt_tokens=2, completion_tokens=2))
        assert (only.text, only.finished) == (text, finished)
        assert running.scheduler.submissions.empty()
        await running.is_empty()


async def test_a_generation_resumed_after_its_ending_token_is_ended_here(service: Any) -> None:
    async with service() as running:
        request = generate(resume=resume(*ids("alpha"), 2))
        (only,) = await collect(running.stub.Generate(request))
        assert (only.finished.reason, only.finished.stop_token_id) == (STOP, 2)
        full = generate("x" * 200, resume=resume(*ids("alpha") * 56))
        (only,) = await collect(running.stub.Generate(full))
        assert (only.finished.reason, only.finished.usage.completion_tokens) == (LENGTH, 56)
        assert running.scheduler.submissions.empty()


async def test_a_generation_resumed_after_its_stop_token_is_ended_here(service: Any) -> None:
    async with service() as running:
        (stop,) = ids("...")
        request = generate(
            stopping=generation_pb2.StoppingCriteria(ignore_eos=True, stop_token_ids=[stop]),
            stop_strings=["alpha beta..."],
            output=unary(include_stop_str_in_output=True, return_token_ids=True),
            resume=resume(2, *ids("alpha"), stop),
        )
        (only,) = await collect(running.stub.Generate(request))
        assert (only.finished.reason, only.finished.stop_token_id) == (STOP, stop)
        assert (only.text, list(only.token_ids)) == ("", [])
        assert only.finished.usage.completion_tokens == 3
        assert running.scheduler.submissions.empty()
        await running.is_empty()


async def test_a_stop_string_kept_in_the_text_may_begin_before_the_cut(service: Any) -> None:
    async with service() as running:
        request = generate(
            stop_strings=["beta gamma"],
            output=text_pb2.OutputOptions(include_stop_str_in_output=True),
            resume=resume(*ids("alpha", " beta")),
        )
        call = running.stub.Generate(request)
        got = await running.scheduler.next_submission()
        got.emit(*ids(" gam", "ma", "!"))
        await running.scheduler.until(lambda: got.session.finishes == [(got.stream_id, 4)])
        got.end(reason=STOP, completion=4)
        messages = await collect(call)
        # "alpha " was sent before the cut, "beta" was held back.
        assert "".join(message.text for message in messages) == "beta gamma"
