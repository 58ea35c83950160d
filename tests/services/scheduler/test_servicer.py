"""The token door: Session's rules, Generate's, and what both refuse."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from quire.v1 import (
    generation_pb2,
    info_pb2,
    info_pb2_grpc,
    token_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.fakes.scripted_worker import REGISTER, attached
from tests.services.scheduler.conftest import Running
from tests.services.scheduler.token_session import opened, served


async def test_many_requests_share_one_session(scheduler: Running) -> None:
    async with served(scheduler), opened(scheduler) as session:
        for stream in range(1, 21):
            await session.submit(stream, [stream, 5], max_tokens=stream)
        for stream in range(1, 21):
            end = await session.end_of(stream)
            assert end.finished.reason == generation_pb2.FINISH_REASON_LENGTH
            assert end.finished.usage.completion_tokens == stream
            assert session.tokens[stream] == [7] * stream
        await session.until(lambda: session.credits == 20)
        await scheduler.quiesced()


async def test_abort_is_answered_once_and_frees_the_blocks(scheduler: Running) -> None:
    async with attached(scheduler.target) as worker, opened(scheduler) as session:
        await session.submit(1, [5, 6], max_tokens=30)
        await worker.step()
        for _ in range(2):
            await session.send(abort=token_pb2.Abort(stream_id=1))
        await session.send(abort=token_pb2.Abort(stream_id=99))
        end = await session.end_of(1)
        assert end.finished.reason == generation_pb2.FINISH_REASON_ABORT
        await scheduler.quiesced()


async def test_finish_keeps_what_the_tokenizer_says(scheduler: Running) -> None:
    async with attached(scheduler.target) as worker, opened(scheduler) as session:
        await session.submit(1, [5, 6], max_tokens=30)
        await worker.answer(await worker.step())
        await session.until(lambda: session.tokens.get(1) == [7])
        await session.send(finish=token_pb2.Finish(stream_id=1, kept_tokens=1))
        end = await session.end_of(1)
        assert end.finished.reason == generation_pb2.FINISH_REASON_STOP
        assert end.finished.usage.completion_tokens == 1
        await scheduler.quiesced()


@pytest.mark.parametrize("orderly", [True, False])
async def test_the_end_of_a_session_aborts_what_it_owns(scheduler: Running, orderly: bool) -> None:
    async with attached(scheduler.target) as worker:
        async with opened(scheduler) as session:
            for stream in range(1, 9):
                await session.submit(stream, [stream, 6], max_tokens=30)
            await worker.step()
            async with asyncio.timeout(5):
                while (await scheduler.loads()).accepted < 8:
                    await asyncio.sleep(0.01)
            if orderly:
                await session.send(bye=token_pb2.Bye(reason="test"))
        await scheduler.quiesced()


async def test_limits_follow_the_workers(scheduler: Running) -> None:
    async with opened(scheduler) as session:
        async with attached(scheduler.target):
            await session.until(lambda: session.limits and session.limits[-1].num_workers == 1)
            assert session.limits[-1].max_model_len == 64
            assert session.limits[-1].kv_capacity_tokens == 64
            assert session.limits[-1].model == "scripted-model"
        await session.until(lambda: session.limits[-1].num_workers == 0)


async def test_a_higher_attempt_replaces_and_a_lower_one_is_refused(scheduler: Running) -> None:
    async with attached(scheduler.target) as worker, opened(scheduler) as session:
        await session.submit(1, [5, 6], request_id="same", attempt=1)
        await worker.step()
        await session.submit(2, [5, 6], request_id="same", attempt=1)
        refused = await session.end_of(2)
        assert refused.status.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
        await session.submit(
            3, [5, 6], request_id="same", attempt=2, resumed=generation_pb2.TokenIds(ids=[7, 7, 7])
        )
        replaced = await session.end_of(1)
        assert replaced.status.code == grpc.StatusCode.ABORTED.value[0]
        async with asyncio.TaskGroup() as tasks:
            await worker.answer(worker.steps[-1])
            serving = tasks.create_task(worker.serve())
            end = await session.end_of(3)
            serving.cancel()
        assert session.tokens[3] == [7], "only the fourth token was missing"
        assert end.finished.usage.completion_tokens == 4
        await scheduler.quiesced()


async def test_a_refused_submit_leaves_the_session_alive(scheduler: Running) -> None:
    async with served(scheduler), opened(scheduler) as session:
        await session.submit(1, [])
        await session.submit(2, [5], max_tokens=0)
        await session.submit(3, [100])
        await session.submit(4, [5], max_tokens=64)
        await session.submit(5, [5], model="another")
        await session.submit(6, [5], request_id="x" * 129)
        fields = {
            1: "request.prompt",
            2: "request.stopping.max_tokens",
            3: "request.prompt",
            4: "request.stopping.max_tokens",
            5: "model",
            6: "request.request_id",
        }
        for stream, field in fields.items():
            end = await session.end_of(stream)
            assert field in end.status.message
        await session.submit(7, [5])
        assert (await session.end_of(7)).finished.usage.completion_tokens == 4
        await session.until(lambda: session.credits == 7)


async def test_a_stream_id_used_twice_ends_the_session(scheduler: Running) -> None:
    async with opened(scheduler) as session:
        await session.submit(1, [5])
        await session.submit(1, [5])
        async with asyncio.timeout(5):
            assert await session._call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await scheduler.quiesced()


def generate(scheduler: Running, **fields: object):
    request = token_pb2.TokenRequest(**{"prompt": generation_pb2.TokenIds(ids=[5, 6, 7]), **fields})
    return scheduler.tokens.Generate(token_pb2.TokenServiceGenerateRequest(request=request))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": generation_pb2.TokenIds()}, "request.prompt"),
        ({"prompt": generation_pb2.TokenIds(packed=b"abc")}, "request.prompt.packed"),
        ({"prompt": generation_pb2.TokenIds(packed=b"abcd", ids=[1])}, "request.prompt"),
        ({"prompt": generation_pb2.TokenIds(ids=[100])}, "request.prompt"),
        ({"prompt": generation_pb2.TokenIds(ids=[1] * 64)}, "request.prompt"),
        (
            {"sampling": generation_pb2.SamplingParams(temperature=-1)},
            "request.sampling.temperature",
        ),
        (
            {"sampling": generation_pb2.SamplingParams(temperature=float("nan"))},
            "request.sampling.temperature",
        ),
        ({"sampling": generation_pb2.SamplingParams(top_p=0)}, "request.sampling.top_p"),
        ({"sampling": generation_pb2.SamplingParams(top_p=1.5)}, "request.sampling.top_p"),
        (
            {"stopping": generation_pb2.StoppingCriteria(max_tokens=0)},
            "request.stopping.max_tokens",
        ),
        (
            {"stopping": generation_pb2.StoppingCriteria(stop_token_ids=[1] * 129)},
            "request.stopping.stop_token_ids",
        ),
        (
            {"stopping": generation_pb2.StoppingCriteria(stop_token_ids=[99, 100])},
            "request.stopping.stop_token_ids[1]",
        ),
    ],
)
async def test_bad_requests_name_their_field(
    scheduler: Running, fields: dict[str, object], field: str
) -> None:
    async with served(scheduler):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await generate(scheduler, **fields).read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.value.details().startswith(f"{field}: ")
        good = [r async for r in generate(scheduler)]
        assert good[0].request_id
        assert good[0].HasField("seed")
        await scheduler.quiesced()


async def test_all_fields_that_are_wrong_are_named_at_once(scheduler: Running) -> None:
    async with served(scheduler):
        call = generate(
            scheduler,
            request_id="x" * 129,
            prompt=generation_pb2.TokenIds(packed=b"abc"),
            sampling=generation_pb2.SamplingParams(temperature=-1, top_p=2),
            stopping=generation_pb2.StoppingCriteria(max_tokens=0, stop_token_ids=[1] * 129),
        )
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        status = rpc_status.from_call(error.value)
        bad = error_details_pb2.BadRequest()
        assert status.details[0].Unpack(bad)
        assert [violation.field for violation in bad.field_violations] == [
            "request.request_id",
            "request.prompt.packed",
            "request.stopping.max_tokens",
            "request.stopping.stop_token_ids",
            "request.sampling.temperature",
            "request.sampling.top_p",
        ]


async def test_stop_tokens_end_a_generation_at_both_doors(scheduler: Running) -> None:
    """The worker samples 7, over and over."""
    async with served(scheduler), opened(scheduler) as session:
        stopping = generation_pb2.StoppingCriteria(
            max_tokens=9, ignore_eos=True, stop_token_ids=[0, 7]
        )
        responses = [r async for r in generate(scheduler, stopping=stopping)]
        assert [token for r in responses for token in r.token_ids] == [7]
        finished = responses[-1].finished
        assert (finished.reason, finished.stop_token_id) == (
            generation_pb2.FINISH_REASON_STOP,
            7,
        )
        assert finished.usage.completion_tokens == 1
        await session.submit(1, [5, 6], stop_token_ids=[8, 7])
        await session.submit(2, [5, 6], stop_token_ids=[8])
        await session.submit(3, [5, 6], stop_token_ids=[8, 100])
        assert (await session.end_of(1)).finished.stop_token_id == 7
        assert session.tokens[1] == [7]
        other = (await session.end_of(2)).finished
        assert (other.reason, other.HasField("stop_token_id")) == (
            generation_pb2.FINISH_REASON_LENGTH,
            False,
        )
        refused = await session.end_of(3)
        assert refused.status.message == (
            "request.stopping.stop_token_ids[1]: the largest id of the vocabulary is 99, got 100"
        )
        await scheduler.quiesced()


async def test_what_fits_the_context_and_not_the_cache_says_so(scheduler: Running) -> None:
    async with attached(scheduler.target, num_blocks=4):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await generate(scheduler, prompt=generation_pb2.TokenIds(ids=[1] * 20)).read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "16" in error.value.details()
        assert "20" in error.value.details()


async def test_a_vanished_caller_frees_its_blocks(scheduler: Running) -> None:
    async with attached(scheduler.target) as worker:
        call = generate(scheduler)
        step = await worker.step()
        await worker.answer(step)
        await call.read()
        call.cancel()
        await scheduler.quiesced()


async def test_traceparent_and_sampling_reach_the_worker(scheduler: Running) -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    async with attached(scheduler.target) as worker:
        call = generate(
            scheduler,
            traceparent=trace,
            sampling=generation_pb2.SamplingParams(temperature=0, top_p=0.5, top_k=3, seed=0),
        )
        (new,) = (await worker.step()).new_requests
        assert new.traceparent == trace
        assert (new.temperature, new.top_p, new.top_k, new.seed) == (0, 0.5, 3, 0)
        call.cancel()


async def test_model_info_follows_the_workers(scheduler: Running) -> None:
    stub = info_pb2_grpc.InfoServiceStub(scheduler.channel)
    info = await stub.GetModelInfo(info_pb2.GetModelInfoRequest())
    assert not info.HasField("limits")
    async with attached(scheduler.target):
        info = await stub.GetModelInfo(info_pb2.GetModelInfoRequest())
        assert info.limits.model == "scripted-model"
        assert info.limits.vocab_size == 100


@pytest.mark.parametrize("door", ["session", "attach"])
async def test_an_unknown_field_in_the_first_message_is_refused(
    scheduler: Running, door: str
) -> None:
    if door == "session":
        call = scheduler.tokens.Session()
        first = token_pb2.SessionRequest(hello=token_pb2.Hello(protocol_major=1))
    else:
        call = worker_pb2_grpc.WorkerLinkServiceStub(scheduler.channel).Attach()
        first = worker_pb2.AttachRequest(register=worker_pb2.Register(**REGISTER))
    first.MergeFromString(b"\x98\x06\x01")
    await call.write(first)
    assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "field 99" in await call.details()


async def test_a_prompt_far_beyond_the_context_is_refused_with_both_numbers(
    scheduler: Running,
) -> None:
    async with served(scheduler), opened(scheduler) as session:
        await session.submit(1, [0] * 2_000_000)
        end = await session.end_of(1)
        assert "63" in end.status.message
        assert "2000000" in end.status.message
