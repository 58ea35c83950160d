"""Calls of the text service, written short."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from quire.v1 import generation_pb2, text_pb2
from tests.assets.tokenizers import byte_level, piece_id
from tests.services.tokenizer.harness import TextService

STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH
TOKENIZER = byte_level()


def ids(*pieces: str) -> list[int]:
    return [piece_id(TOKENIZER, piece) for piece in pieces]


def generate(text: str = "Hi", **kwargs: Any) -> text_pb2.GenerateRequest:
    return text_pb2.GenerateRequest(text=text, **kwargs)


def unary(**kwargs: Any) -> text_pb2.OutputOptions:
    return text_pb2.OutputOptions(stream=False, **kwargs)


def with_ids(**kwargs: Any) -> text_pb2.OutputOptions:
    return text_pb2.OutputOptions(return_token_ids=True, **kwargs)


async def collect(call: Any) -> list[Any]:
    """The messages to come, whether some were read or not."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def answer(
    service: TextService,
    request: text_pb2.GenerateRequest,
    rows: Sequence[Sequence[int]],
    **end: Any,
) -> list[text_pb2.GenerateResponse]:
    """All messages of a generation that gets `rows` in one message each, then the end."""
    call = service.stub.Generate(request)
    messages: asyncio.Task[list[Any]]
    async with asyncio.TaskGroup() as tasks:
        messages = tasks.create_task(collect(call))
        got = await service.scheduler.next_submission()
        for row in rows:
            got.batch(row)
        got.end(**end)
    return messages.result()


async def status_of(call: Any) -> Any:
    """The google.rpc.Status a call ends with."""
    ended = collect(call) if hasattr(call, "read") else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ended
    status = rpc_status.from_call(caught.value)
    assert status is not None
    return status


def violations(status: Any) -> list[str]:
    """Every field the status names."""
    bad = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad)
    return [violation.field for violation in bad.field_violations]


def violation(status: Any) -> str:
    bad = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad)
    return bad.field_violations[0].field


def resume(*tokens: int) -> text_pb2.Resume:
    return text_pb2.Resume(token_ids=generation_pb2.TokenIds(ids=tokens))
