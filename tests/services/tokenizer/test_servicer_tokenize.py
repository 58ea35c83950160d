"""Tokenize and Detokenize."""

from pathlib import Path
from typing import Any

from quire.v1 import text_pb2
from services.tokenizer.encoding import load_encoding
from tests.assets.tokenizers import byte_ids, byte_level, write_folder
from tests.fakes.scheduler import unpacked
from tests.services.tokenizer.calls import generate, status_of
from tests.services.tokenizer.harness import text_service


async def test_tokenize_and_detokenize(service: Any) -> None:
    async with service() as running:
        texts = ["a<|im_end|>", "", "日"]
        encoded = await running.stub.Tokenize(text_pb2.TokenizeRequest(texts=texts))
        assert [unpacked(result.packed) for result in encoded.results] == [
            [*byte_ids(b"a"), 2],
            [],
            byte_ids("日".encode()),
        ]
        sequences = encoded.results
        decoded = await running.stub.Detokenize(text_pb2.DetokenizeRequest(sequences=sequences))
        assert list(decoded.texts) == ["a", "", "日"]
        whole = text_pb2.DetokenizeRequest(sequences=sequences, skip_special_tokens=False)
        assert list((await running.stub.Detokenize(whole)).texts) == texts


async def test_tokenize_adds_what_the_tokenizer_adds_unless_told_not_to(
    sockets: Path, tmp_path: Path
) -> None:
    with_bos = load_encoding(write_folder(tmp_path, byte_level(bos=True)))
    async with text_service(with_bos, sockets) as running:
        for add, expected in ((None, [1]), (True, [1]), (False, [])):
            request = text_pb2.TokenizeRequest(texts=[""], add_special_tokens=add)
            (result,) = (await running.stub.Tokenize(request)).results
            assert unpacked(result.packed) == expected
        call = running.stub.Generate(generate(""))
        assert (await running.scheduler.next_submission()).prompt == [1]
        call.cancel()
        messages = [text_pb2.ChatMessage(role="user", content="x")]
        rendered = await running.stub.RenderChat(text_pb2.RenderChatRequest(messages=messages))
        assert unpacked(rendered.token_ids.packed)[:2].count(1) == 1
        await running.is_empty()


async def test_too_long_a_text_is_refused_before_it_is_encoded(service: Any) -> None:
    async with service() as running:
        request = text_pb2.TokenizeRequest(texts=["x" * 5_000_000] * 2)
        status = await status_of(running.stub.Tokenize(request))
        assert status.code == 3
        assert status.message == "texts: must have at most 8388608 characters, got 10000000"
