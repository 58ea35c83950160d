"""Stop tokens, stops kept in the text and special tokens shown, through all services.

The model says the next byte after each byte, then its special tokens, of which 256 and 258 end.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from quire import SamplingParams
from quire.errors import InvalidRequest
from quire.v1 import generation_pb2, token_pb2, token_pb2_grpc
from tests.assets.byte_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from tests.system.conftest import System, running_system

ENDOFTEXT, IM_START, IM_END, TOOL, MASK = SPECIAL_TOKENS[:5]


@pytest.fixture(scope="module")
async def tiny(successor_model: Path) -> AsyncIterator[System]:
    async with running_system({}, model=successor_model) as running:
        yield running


@pytest.mark.parametrize(
    ("params", "text", "num_tokens", "reason"),
    [
        ({"stop_token_ids": [0, ord("f")]}, "bcde", 5, "stop"),
        (
            {"stop_token_ids": [ord("f")], "include_stop_str_in_output": True},
            "bcdef",
            5,
            "stop",
        ),
        ({"stop_token_ids": [ord("b")]}, "", 1, "stop"),
        ({"stop_token_ids": [ord("a")]}, "bcdefghi", 8, "length"),
        ({"stop": ["zzz", "ef"], "include_stop_str_in_output": True}, "bcdef", 5, "stop"),
        ({"stop": "ef"}, "bcd", 5, "stop"),
        ({"stop": "ef", "stop_token_ids": [ord("d")]}, "bc", 3, "stop"),
    ],
)
async def test_what_ends_the_text(
    tiny: System, params: dict[str, object], text: str, num_tokens: int, reason: str
) -> None:
    asked = SamplingParams(temperature=0.0, max_tokens=8, **params)
    answer = await tiny.client.complete("a", asked)
    assert (answer.text, answer.finish_reason) == (text, reason)
    assert answer.token_ids == tuple(range(ord("b"), ord("b") + num_tokens))
    assert answer.usage.completion_tokens == num_tokens


@pytest.mark.parametrize(
    ("ignore_eos", "include", "skip", "last", "text"),
    [
        (False, False, True, 256, ""),
        (False, True, True, 256, ""),
        (False, True, False, 256, ENDOFTEXT),
        (False, False, False, 256, ""),
        (True, False, True, 260, ""),
        (True, False, False, 260, ENDOFTEXT + IM_START + IM_END + TOOL),
        (True, True, False, 260, ENDOFTEXT + IM_START + IM_END + TOOL + MASK),
    ],
)
async def test_special_tokens_show_where_asked_for(
    tiny: System, ignore_eos: bool, include: bool, skip: bool, last: int, text: str
) -> None:
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=ignore_eos,
        stop_token_ids=[260],
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
        max_tokens=100,
    )
    deltas = [delta async for delta in tiny.client.generate([255], params)]
    assert "".join(delta.text for delta in deltas) == text
    end = deltas[-1].finished
    assert end is not None
    assert (end.reason, end.stop) == ("stop", last)


async def test_stop_tokens_at_the_token_door(tiny: System) -> None:
    request = token_pb2.TokenRequest(
        prompt=generation_pb2.TokenIds(ids=[ord("a")]),
        sampling=generation_pb2.SamplingParams(temperature=0.0),
        stopping=generation_pb2.StoppingCriteria(stop_token_ids=[ord("d"), ord("z")]),
    )
    async with grpc.aio.insecure_channel(tiny.local.scheduler) as channel:
        stub = token_pb2_grpc.TokenServiceStub(channel)
        call = stub.Generate(token_pb2.TokenServiceGenerateRequest(request=request))
        responses = [response async for response in call]
    assert [token for r in responses for token in r.token_ids] == [98, 99, 100]
    assert responses[-1].finished.stop_token_id == ord("d")


async def test_what_is_wrong_or_too_long_is_refused_and_the_next_request_works(
    tiny: System,
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await tiny.client.complete("x" * 3_000_000, SamplingParams(stop_token_ids=[1, VOCAB_SIZE]))
    assert [field for field, _ in caught.value.violations] == [
        "stopping.stop_token_ids[1]",
        "prompt",
    ]
    assert f"below the vocabulary size {VOCAB_SIZE}, got {VOCAB_SIZE}" in str(caught.value)
    assert "has 3000000 characters, which are at least" in str(caught.value)
    answer = await tiny.client.complete("a", SamplingParams(temperature=0.0, max_tokens=3))
    assert answer.text == "bcd"
