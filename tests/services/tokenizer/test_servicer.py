"""What all calls share: info, refusals, draining."""

from typing import Any

import grpc
from google.rpc import error_details_pb2

from quire.v1 import generation_pb2, text_pb2
from services.tokenizer.encoding import Encoding
from tests.assets.tokenizers import byte_ids
from tests.fakes.scheduler import unpacked
from tests.services.tokenizer.calls import collect, generate, ids, status_of, violation
from tests.services.tokenizer.harness import NOTHING, eventually


async def test_info_says_what_is_served_and_within_which_limits(
    service: Any, encoding: Encoding
) -> None:
    async with service() as running:
        info = await running.stub.GetInfo(text_pb2.GetInfoRequest())
        assert info == text_pb2.GetInfoResponse(
            model="tiny",
            version="1",
            vocab_size=encoding.vocab_size,
            max_model_len=256,
            kv_capacity_tokens=4096,
            eos_token_ids=[2],
            tokenizer_digest=encoding.digest,
            has_chat_template=True,
        )
        await running.scheduler.die()
        await eventually(lambda: running.link.limits is None)
        info = await running.stub.GetInfo(text_pb2.GetInfoRequest())
        assert not info.HasField("max_model_len")
        assert not info.HasField("kv_capacity_tokens")
        assert (list(info.eos_token_ids), info.model) == ([], "tiny")


async def test_the_trace_context_travels(service: Any) -> None:
    async with service() as running:
        trace = f"00-{'a' * 32}-{'b' * 16}-01"
        call = running.stub.Generate(generate(), metadata=(("traceparent", trace),))
        assert (await running.scheduler.next_submission()).request.traceparent == trace
        call.cancel()
        call = running.stub.Generate(generate(), metadata=(("traceparent", "nonsense"),))
        assert (await running.scheduler.next_submission()).request.traceparent == ""
        call.cancel()
        await running.is_empty()


async def test_other_bad_calls_are_refused_by_field(service: Any) -> None:
    async with service() as running:
        stub = running.stub
        for call, field in (
            (stub.Chat(text_pb2.ChatRequest()), "messages"),
            (stub.RenderChat(text_pb2.RenderChatRequest()), "messages"),
            (stub.Tokenize(text_pb2.TokenizeRequest()), "texts"),
            (stub.Detokenize(text_pb2.DetokenizeRequest()), "sequences"),
            (
                stub.Detokenize(
                    text_pb2.DetokenizeRequest(
                        sequences=[
                            generation_pb2.TokenIds(ids=[5]),
                            generation_pb2.TokenIds(ids=[9999]),
                        ]
                    )
                ),
                "sequences[1].ids[0]",
            ),
            (
                stub.Chat(
                    text_pb2.ChatRequest(
                        messages=[text_pb2.ChatMessage(role="user", content="x" * 300)]
                    )
                ),
                "messages",
            ),
        ):
            status = await status_of(call)
            assert (status.code, violation(status)) == (3, field)
        await running.is_empty()


async def test_another_model_and_unknown_fields_are_refused(service: Any) -> None:
    async with service() as running:
        status = await status_of(running.stub.Generate(generate(model="huge")))
        assert status.code == grpc.StatusCode.NOT_FOUND.value[0]
        newer = generate()
        newer.sampling.ParseFromString(b"\xa0\x06\x01")  # field 100
        status = await status_of(running.stub.Generate(newer))
        assert status.code == grpc.StatusCode.UNIMPLEMENTED.value[0]
        assert "field 100" in status.message
        call = running.stub.Generate(generate(model="tiny"))
        assert (await running.scheduler.next_submission()).request.model == "tiny"
        call.cancel()
        await running.is_empty()


async def test_without_a_scheduler_calls_are_unavailable_with_a_delay(service: Any) -> None:
    async with service(scheduler_runs=False, new_request_s=0.05) as running:
        status = await status_of(running.stub.Generate(generate()))
        assert status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        retry = error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() > 0
        # What needs no scheduler works.
        encoded = await running.stub.Tokenize(text_pb2.TokenizeRequest(texts=["a"]))
        assert unpacked(encoded.results[0].packed) == byte_ids(b"a")
        await running.is_empty()


async def test_a_draining_service_refuses_new_calls_and_finishes_old_ones(service: Any) -> None:
    async with service() as running:
        call = running.stub.Generate(generate())
        got = await running.scheduler.next_submission()
        running.servicer.refuse_new()
        status = await status_of(running.stub.Generate(generate()))
        assert (status.code, "going away" in status.message) == (14, True)
        got.end(*ids("alpha"))
        assert (await collect(call))[0].text == "alpha"
        await running.servicer.wait_idle()
        assert running.link.counts == NOTHING
