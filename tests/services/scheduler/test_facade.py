"""The door of the smg gateway, driven by a plain client of `vllm.grpc.engine.VllmEngine`."""

import asyncio
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from services.chassis.server import GrpcServer
from services.scheduler.core.plan import TokenArray
from services.scheduler.facade import SERVICE, add_facade
from services.scheduler.hashing import SHA256
from services.scheduler.model_folder import read_model_folder
from services.scheduler.prompt_hasher import PromptHasher
from services.scheduler.session_chains import SessionChains
from tests.assets.byte_tokenizer import make_byte_tokenizer
from tests.fakes.scripted_worker import attached
from tests.services.scheduler.conftest import Running, running_scheduler
from tests.services.scheduler.token_session import opened, served

ROOT = Path(__file__).parents[3]

Sampling = vllm_engine_pb2.SamplingParams
Status = grpc.StatusCode


def engine(scheduler: Running) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(scheduler.channel)


def request(
    ids: tuple[int, ...] = (5, 6, 7), *, stream: bool = False, **fields: Any
) -> vllm_engine_pb2.GenerateRequest:
    return vllm_engine_pb2.GenerateRequest(
        **{
            "tokenized": vllm_engine_pb2.TokenizedInput(input_ids=ids, original_text="never read"),
            "sampling_params": Sampling(max_tokens=4, ignore_eos=True),
            "stream": stream,
            **fields,
        }
    )


async def answers(call: Any) -> list[vllm_engine_pb2.GenerateResponse]:
    return [message async for message in call]


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(call)
    return caught.value


def fields_of(error: grpc.aio.AioRpcError) -> list[str]:
    status = rpc_status.from_call(error)
    assert status is not None
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in status.details)
    return [violation.field for violation in bad.field_violations]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = make_byte_tokenizer(tmp_path / "model")
    (made / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    (made / "generation_config.json").write_text(
        json.dumps({"temperature": 0.25, "top_k": 20, "bos_token_id": 7, "pad_token_id": [1]})
    )
    return made


@pytest.fixture
async def with_model(tmp_path: Path, folder: Path) -> AsyncIterator[Running]:
    async with running_scheduler(tmp_path, tokenizer=str(folder)) as running:
        yield running


# Generate


async def test_one_message_without_a_stream(scheduler: Running) -> None:
    async with served(scheduler):
        (only,) = await answers(engine(scheduler).Generate(request()))
        end = only.complete
        assert list(end.output_ids) == [7] * 4
        assert end.finish_reason == "length"
        assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (3, 4, 0)
        assert end.WhichOneof("matched_stop") is None
        await scheduler.quiesced()


async def test_a_stream_is_pieces_and_then_the_end(scheduler: Running) -> None:
    """The end has the last piece once more, as in vLLM: gateways count the pieces alone."""
    async with served(scheduler):
        *pieces, last = await answers(engine(scheduler).Generate(request(stream=True)))
        chunks = [piece.chunk for piece in pieces]
        assert [token for chunk in chunks for token in chunk.token_ids] == [7] * 4
        counts = [chunk.completion_tokens for chunk in chunks]
        assert counts == sorted(set(counts))
        assert counts[-1] == last.complete.completion_tokens == 4
        assert {chunk.prompt_tokens for chunk in chunks} == {3}
        assert last.complete.output_ids == chunks[-1].token_ids
        assert last.complete.finish_reason == "length"
        await scheduler.quiesced()


async def test_the_token_that_ended_it_is_told(scheduler: Running) -> None:
    async with served(scheduler):
        sampling = Sampling(max_tokens=9, stop_token_ids=[7], stop=["kept by", "the gateway"])
        (only,) = await answers(engine(scheduler).Generate(request(sampling_params=sampling)))
        assert only.complete.finish_reason == "stop"
        assert only.complete.matched_token_id == 7
        assert list(only.complete.output_ids) == [7]


async def test_a_cached_prompt_says_so(scheduler: Running) -> None:
    async with served(scheduler):
        prompt = tuple(range(10, 23))
        for cached in (0, 12):
            (only,) = await answers(engine(scheduler).Generate(request(prompt)))
            assert only.complete.cached_tokens == cached


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("kv_transfer_params", {"kv_transfer_params": vllm_engine_pb2.KvTransferParams()}),
        ("kv_transfer_params_json", {"kv_transfer_params_json": "{}"}),
        ("mm_inputs", {"mm_inputs": vllm_engine_pb2.MultimodalInputs()}),
        ("extra_mm_inputs", {"extra_mm_inputs": [vllm_engine_pb2.MultimodalInputs()]}),
        ("media_refs", {"media_refs": vllm_engine_pb2.MediaRefs()}),
        *(
            (f"sampling_params.{next(iter(params))}", {"sampling_params": Sampling(**params)})
            for params in (
                {"logprobs": 0},
                {"logprobs": 3},
                {"prompt_logprobs": 1},
                {"min_p": 0.1},
                {"frequency_penalty": -0.5},
                {"presence_penalty": 0.5},
                {"repetition_penalty": 1.1},
                {"min_tokens": 1},
                {"n": 2},
                {"logit_bias": {5: 1.0}},
                {"truncate_prompt_tokens": 5},
                {"grammar_from_first_token": True},
                {"json_schema": "{}"},
                {"regex": ""},
                {"grammar": "a"},
                {"structural_tag": "a"},
                {"json_object": True},
                {"choice": vllm_engine_pb2.ChoiceConstraint(choices=["a"])},
            )
        ),
    ],
)
async def test_what_is_not_there_yet_is_refused_by_name(
    scheduler: Running, field: str, change: dict[str, Any]
) -> None:
    async with served(scheduler):
        for stream in (False, True):
            error = await refusal(engine(scheduler).Generate(request(stream=stream, **change)))
            assert error.code() is Status.UNIMPLEMENTED
            assert error.details() == f"{field} is not available in this version"
        assert (await scheduler.loads()).accepted == 0
        assert len(await answers(engine(scheduler).Generate(request()))) == 1


def test_every_field_is_known_or_refused() -> None:
    """A field that a newer version of the stubs brings must be looked at."""
    assert {field.name for field in Sampling.DESCRIPTOR.fields} == {
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
        *("repetition_penalty", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
        *("skip_special_tokens", "spaces_between_special_tokens", "ignore_eos", "n", "logprobs"),
        *("prompt_logprobs", "seed", "include_stop_str_in_output", "logit_bias"),
        *("truncate_prompt_tokens", "grammar_from_first_token", "json_schema", "regex"),
        *("grammar", "structural_tag", "json_object", "choice"),
    }
    assert {field.name for field in vllm_engine_pb2.GenerateRequest.DESCRIPTOR.fields} == {
        *("request_id", "tokenized", "text", "sampling_params", "stream", "kv_transfer_params"),
        *("mm_inputs", "extra_mm_inputs", "kv_transfer_params_json", "data_parallel_rank"),
        "media_refs",
    }


async def test_values_that_ask_for_nothing_are_taken(scheduler: Running) -> None:
    async with served(scheduler):
        sampling = Sampling(
            max_tokens=1,
            repetition_penalty=1.0,
            n=1,
            json_object=False,
            skip_special_tokens=True,
            spaces_between_special_tokens=True,
            include_stop_str_in_output=True,
            seed=-1,
        )
        neutral = request(sampling_params=sampling, data_parallel_rank=0)
        assert len(await answers(engine(scheduler).Generate(neutral))) == 1


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        ({"text": "Hi"}, "text", "this door takes token ids"),
        ({"tokenized": None}, "tokenized", "is missing"),
        (
            {"tokenized": vllm_engine_pb2.TokenizedInput()},
            "tokenized.input_ids",
            "must have at least one token",
        ),
        (
            {"tokenized": vllm_engine_pb2.TokenizedInput(input_ids=[100])},
            "tokenized.input_ids",
            "the largest id of the vocabulary is 99, got 100",
        ),
        (
            {"tokenized": vllm_engine_pb2.TokenizedInput(input_ids=[1] * 64)},
            "tokenized.input_ids",
            "the context holds at most 63, got 64",
        ),
        ({"sampling_params": Sampling(max_tokens=0)}, "sampling_params.max_tokens", ">= 1, got 0"),
        (
            {"sampling_params": Sampling(max_tokens=62)},
            "sampling_params.max_tokens",
            "the context holds at most 61, got 62",
        ),
        (
            {"sampling_params": Sampling(temperature=-1.0)},
            "sampling_params.temperature",
            "must be finite and >= 0",
        ),
        ({"sampling_params": Sampling(top_p=1.5)}, "sampling_params.top_p", "must be in (0, 1]"),
        (
            {"sampling_params": Sampling(stop_token_ids=[100])},
            "sampling_params.stop_token_ids[0]",
            "got 100",
        ),
        ({"request_id": "é" * 65}, "request_id", "at most 128 bytes, got 130"),
        ({"data_parallel_rank": 1}, "data_parallel_rank", "there is only rank 0, got 1"),
    ],
)
async def test_what_is_wrong_is_named_as_it_is_called_here(
    scheduler: Running, change: dict[str, Any], field: str, text: str
) -> None:
    async with served(scheduler):
        changed = {"sampling_params": Sampling(max_tokens=4), **change}
        if "text" in change:
            changed["tokenized"] = None
        error = await refusal(engine(scheduler).Generate(request(stream=True, **changed)))
        assert error.code() is Status.INVALID_ARGUMENT
        assert fields_of(error) == [field]
        assert text in (error.details() or "")
        assert len(await answers(engine(scheduler).Generate(request()))) == 1


async def test_b034_a_large_prompt_is_refused_by_its_length(scheduler: Running) -> None:
    """4 MiB is the limit where nobody sets another."""
    options = [("grpc.max_send_message_length", -1)]
    async with (
        served(scheduler),
        grpc.aio.insecure_channel(scheduler.target, options=options) as channel,
    ):
        large = vllm_engine_pb2.TokenizedInput(input_ids=[5] * 6_000_000)
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        error = await refusal(stub.Generate(request(tokenized=large)))
        assert error.code() is Status.INVALID_ARGUMENT
        assert "the context holds at most 63, got 6000000" in (error.details() or "")


async def test_a_field_of_a_later_version_is_refused(scheduler: Running) -> None:
    """Field 99 of the request, unknown to the stubs."""
    message = vllm_engine_pb2.GenerateRequest.FromString(
        request().SerializeToString() + b"\x98\x06\x01"
    )
    error = await refusal(engine(scheduler).Generate(message))
    assert error.code() is Status.UNIMPLEMENTED
    assert "field 99" in (error.details() or "")


# Metadata


async def test_metadata_say_how_urgent_it_is_and_whom_it_is_for(tmp_path: Path) -> None:
    async with (
        running_scheduler(tmp_path, tenant=("acme:max-live-requests=1",)) as scheduler,
        attached(scheduler.target) as worker,
    ):
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        metadata = (
            ("x-quire-priority", "batch"),
            ("x-quire-tenant", "acme"),
            ("x-request-id", "mine"),
            ("traceparent", trace),
        )
        call = engine(scheduler).Generate(request(), metadata=metadata)
        step = await worker.step()
        assert step.new_requests[0].traceparent == trace
        loads = await scheduler.loads()
        assert [one.name for one in loads.tenants if one.running] == ["acme"]
        assert [one.name for one in loads.classes if one.running] == ["batch"]
        second = await refusal(engine(scheduler).Generate(request(), metadata=metadata))
        # Of one tenant's requests no two have one id.
        assert second.code() is Status.ALREADY_EXISTS
        third = await refusal(
            engine(scheduler).Generate(request(request_id="other"), metadata=metadata)
        )
        assert third.code() is Status.RESOURCE_EXHAUSTED
        assert (third.details() or "").startswith("x-quire-tenant: a tenant may have at most 1")
        await engine(scheduler).Abort(vllm_engine_pb2.AbortRequest(request_ids=["mine"]))
        assert (await answers(call))[-1].complete.finish_reason == "abort"


async def test_a_salt_keeps_prefixes_apart(scheduler: Running) -> None:
    prompt = tuple(range(10, 23))
    async with served(scheduler):
        for salt, cached in ((None, 0), ("a", 0), ("a", 12), ("b", 0), (None, 12)):
            metadata = () if salt is None else (("x-quire-cache-salt", salt),)
            (only,) = await answers(engine(scheduler).Generate(request(prompt), metadata=metadata))
            assert only.complete.cached_tokens == cached


@pytest.mark.parametrize("own", [True, False])
async def test_a_deadline_of_metadata_or_call_ends_it(scheduler: Running, own: bool) -> None:
    """The worker never answers its step."""
    async with attached(scheduler.target):
        metadata = (("x-quire-deadline-ms", "200" if own else "60000"),)
        error = await refusal(
            engine(scheduler).Generate(request(), metadata=metadata, timeout=60.0 if own else 0.3)
        )
        assert error.code() is Status.DEADLINE_EXCEEDED
        await scheduler.quiesced()


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("x-quire-deadline-ms", "soon", "must be a whole number of milliseconds"),
        ("x-quire-deadline-ms", "0", "must be from 1 to 4294967295, got 0"),
        ("x-quire-deadline-ms", "4294967296", "must be from 1 to 4294967295, got 4294967296"),
        ("x-quire-priority", "urgent", "is no priority class of this scheduler"),
        ("x-quire-tenant", "a" * 129, "must be at most 128 bytes, got 129"),
        ("x-quire-cache-salt", "a" * 129, "must be at most 128 bytes, got 129"),
    ],
)
async def test_wrong_metadata_are_named(
    scheduler: Running, key: str, value: str, text: str
) -> None:
    async with served(scheduler):
        error = await refusal(engine(scheduler).Generate(request(), metadata=((key, value),)))
        assert error.code() is Status.INVALID_ARGUMENT
        assert fields_of(error) == [key]
        assert text in (error.details() or "")


# Abort


async def test_an_abort_wakes_who_waits_and_minds_nothing_else(scheduler: Running) -> None:
    async with attached(scheduler.target) as worker:
        call = engine(scheduler).Generate(request(request_id="mine", stream=True))
        await worker.step()
        ids = ["unknown", "mine", "mine"]
        for _ in range(2):
            await engine(scheduler).Abort(vllm_engine_pb2.AbortRequest(request_ids=ids))
        (only,) = await answers(call)
        assert only.complete.finish_reason == "abort"
        assert only.complete.completion_tokens == 0
        await engine(scheduler).Abort(vllm_engine_pb2.AbortRequest(request_ids=ids))
        await scheduler.quiesced()


class GatedHasher(PromptHasher):
    """Hashes once it is let."""

    def __init__(self) -> None:
        super().__init__(SHA256, SessionChains())
        self.asked, self.gate = asyncio.Event(), asyncio.Event()

    async def chain(self, prompt: TokenArray, **options: Any) -> bytes:
        self.asked.set()
        await self.gate.wait()
        return await super().chain(prompt, **options)


async def test_an_abort_counts_while_the_prompt_is_hashed(
    scheduler: Running, tmp_path: Path
) -> None:
    hasher = GatedHasher()
    server = GrpcServer([SERVICE])
    add_facade(server, scheduler.loop, hasher, None)
    (target,) = await server.start([f"unix://{tmp_path}/other.sock"])
    async with served(scheduler), grpc.aio.insecure_channel(target) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        call = stub.Generate(request(request_id="mine"))
        await hasher.asked.wait()
        await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["mine"]))
        hasher.gate.set()
        (only,) = await answers(call)
        assert only.complete.finish_reason == "abort"
        await scheduler.quiesced()
    await server.stop()


async def test_an_abort_leaves_the_other_door_alone(scheduler: Running) -> None:
    async with attached(scheduler.target) as worker, opened(scheduler) as session:
        await session.submit(1, [5, 6], request_id="mine")
        await worker.step()
        await engine(scheduler).Abort(vllm_engine_pb2.AbortRequest(request_ids=["mine"]))
        await worker.answer(worker.steps[-1])
        await session.until(lambda: session.tokens.get(1))
        assert not session.ends


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_its_request(scheduler: Running, stream: bool) -> None:
    async with attached(scheduler.target) as worker:
        call = engine(scheduler).Generate(request(stream=stream))
        await worker.step()
        call.cancel()
        loads = await scheduler.quiesced()
        assert loads.accepted == 1


# Health and facts


async def test_health_follows_the_workers(scheduler: Running) -> None:
    stub = engine(scheduler)
    health = health_pb2_grpc.HealthStub(scheduler.channel)
    with pytest.raises(grpc.aio.AioRpcError, match="no worker is attached") as caught:
        await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    assert caught.value.code() is Status.UNAVAILABLE
    async with attached(scheduler.target):
        scheduler.loop.serving = True
        said = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert (said.healthy, said.message) == (True, "")
        scheduler.loop.serving = False
        said = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert (said.healthy, said.message) == (False, "work waits and no step completes")
        scheduler.loop.draining = True
        said = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert said.message == "the scheduler is stopping"
        scheduler.loop.draining = False
    scheduler.loop.workers_changed.clear()
    async with asyncio.timeout(5):
        while scheduler.loop.limits is not None:
            await scheduler.loop.workers_changed.wait()
    said = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    assert (said.healthy, said.message) == (False, "no worker is attached")
    answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_reflection_lists_the_service(scheduler: Running) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(scheduler.channel)
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    names = [
        service.name async for answer in call for service in answer.list_services_response.service
    ]
    assert SERVICE == "vllm.grpc.engine.VllmEngine"
    assert SERVICE in names


async def test_model_info_without_and_with_the_folder(
    scheduler: Running, tmp_path: Path, folder: Path
) -> None:
    ask = vllm_engine_pb2.GetModelInfoRequest()
    with pytest.raises(grpc.aio.AioRpcError, match="no worker is attached"):
        await engine(scheduler).GetModelInfo(ask)
    async with attached(scheduler.target):
        bare = await engine(scheduler).GetModelInfo(ask)
        assert (bare.served_model_name, bare.is_generation) == ("scripted-model", True)
        assert (bare.max_context_length, bare.max_req_input_len, bare.vocab_size) == (64, 63, 100)
        assert list(bare.eos_token_ids) == [2]
        assert (bare.default_sampling_params_json, bare.model_type) == ("", "")
        assert bare.model_path, "a gateway that is told none does not ask for the tokenizer"
        assert not os.path.exists(bare.model_path)  # noqa: ASYNC240 - nothing is there
    (tmp_path / "b").mkdir()
    async with (
        running_scheduler(tmp_path / "b", tokenizer=str(folder)) as told,
        attached(told.target),
    ):
        full = await engine(told).GetModelInfo(ask)
        assert json.loads(full.default_sampling_params_json) == {"temperature": 0.25, "top_k": 20}
        assert (full.model_type, list(full.architectures)) == ("llama", ["LlamaForCausalLM"])
        assert (full.bos_token_id, full.pad_token_id) == (7, 0)


async def test_unset_parameters_take_the_models_defaults(with_model: Running) -> None:
    """top_k = 0 is no limit: gateways resolve it, and send what is to be."""
    async with attached(with_model.target) as worker:
        stub = engine(with_model)
        for sampling, expected in (
            (Sampling(max_tokens=1), (0.25, 1.0, 0)),
            (Sampling(max_tokens=1, temperature=0.0, top_p=0.5, top_k=3), (0.0, 0.5, 3)),
        ):
            call = stub.Generate(request(sampling_params=sampling))
            while not (step := await worker.step()).new_requests:
                await worker.answer(step)
            sent = step.new_requests[0]
            assert (sent.temperature, sent.top_p, sent.top_k) == expected
            await worker.answer(step)
            assert len(await answers(call)) == 1


async def test_server_info_and_loads(scheduler: Running) -> None:
    stub = engine(scheduler)
    async with attached(scheduler.target) as worker:
        calls = [stub.Generate(request((5 + n, 6, 7))) for n in range(5)]
        await worker.step()
        async with asyncio.timeout(5):
            while (await scheduler.loads()).accepted < 5:
                await asyncio.sleep(0.01)
        info = await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
        assert (info.active_requests, info.is_paused) == (5, False)
        assert (info.data_parallel_size, info.block_size, info.max_num_seqs) == (1, 4, 4)
        assert info.uptime_seconds > 0
        assert info.last_receive_timestamp > 1.7e9
        answer = await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(dp_rank=0, include=["core"]))
        assert answer.dp_rank_count == 1
        assert answer.timestamp.startswith("20")
        (load,) = answer.loads
        assert load.num_running_reqs + load.num_waiting_reqs == load.num_total_reqs == 5
        assert load.num_running_reqs > 0
        assert load.max_total_num_tokens == 64
        assert load.num_used_tokens == 4 * load.num_running_reqs
        assert load.token_usage == load.num_used_tokens / 64
        assert load.max_running_requests == 4
        assert load.utilization == load.num_running_reqs / 4
        with pytest.raises(grpc.aio.AioRpcError, match="dp_rank: there is only rank 0, got 1"):
            await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(dp_rank=1))
        for call in calls:
            call.cancel()
        await scheduler.quiesced()


async def test_the_tokenizer_comes_in_pieces(with_model: Running, folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(bytes(range(256)) * 1024)
    call = engine(with_model).GetTokenizer(common_pb2.GetTokenizerRequest())
    pieces = [piece async for piece in call]
    data = b"".join(piece.data for piece in pieces)
    assert all(len(piece.data) == 65_536 for piece in pieces[:-1])
    assert [piece.sha256 for piece in pieces[:-1]] == [""] * (len(pieces) - 1)
    assert pieces[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        # What lay there when the scheduler was started.
        assert sorted(archive.namelist()) == [
            *("chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json"),
            "tokenizer_config.json",
        ]
        assert archive.read("tokenizer.json") == (folder / "tokenizer.json").read_bytes()
    large = read_model_folder(str(folder))
    assert large.tokenizer_zip == read_model_folder(str(folder)).tokenizer_zip
    assert large.sha256 != pieces[-1].sha256


async def test_without_the_setting_it_says_what_to_set(scheduler: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="start it with --tokenizer MODEL") as caught:
        async for _ in engine(scheduler).GetTokenizer(common_pb2.GetTokenizerRequest()):
            pass
    assert caught.value.code() is Status.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("rpc", "message"),
    [
        ("Embed", vllm_engine_pb2.EmbedRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
    ],
)
async def test_other_calls_are_refused_by_name(scheduler: Running, rpc: str, message: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=f"{rpc}: .* is not available") as caught:
        await getattr(engine(scheduler), rpc)(message)
    assert caught.value.code() is Status.UNIMPLEMENTED


# FlushCache


async def test_a_flush_forgets_what_nobody_uses(scheduler: Running) -> None:
    prompt = tuple(range(10, 23))
    stub = engine(scheduler)
    async with served(scheduler):
        await answers(stub.Generate(request(prompt)))
        flushed = await stub.FlushCache(common_pb2.FlushCacheRequest())
        assert (flushed.success, flushed.message) == (True, "4 blocks given up")
        (only,) = await answers(stub.Generate(request(prompt)))
        assert only.complete.cached_tokens == 0
    for timeout_s in (-1.0, float("nan"), 1e6):
        with pytest.raises(grpc.aio.AioRpcError, match="timeout_s: must be from 0 to 3600"):
            await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=timeout_s))


async def test_a_flush_waits_for_who_runs_and_says_who_is_left(scheduler: Running) -> None:
    stub = engine(scheduler)
    async with attached(scheduler.target) as worker:
        call = stub.Generate(request(sampling_params=Sampling(max_tokens=1)))
        step = await worker.step()
        flushed = await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=0.05))
        assert not flushed.success
        assert "1 requests are live" in flushed.message
        waiting = asyncio.ensure_future(  # noqa: TID251 - of a test
            stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=30))
        )
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await worker.answer(step)
        assert len(await answers(call)) == 1
        assert (await waiting).success


# Without the extra


def test_without_the_extra_the_scheduler_starts_and_says_so_once(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['smg_grpc_proto'] = None\n"
        "import services.scheduler.__main__ as scheduler\n"
        "assert scheduler.facade is None\n"
        "scheduler.main()\n"
    )
    command = [sys.executable, "-c", script, "--listen", f"unix://{tmp_path}/s.sock"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while "listening on" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(signal.SIGTERM)
        said += process.stderr.read()
    assert process.returncode == 0, said
    assert said.count("VllmEngine is not served: quire-llm[openai] is not installed") == 1
