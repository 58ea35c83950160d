"""Requests that the system tests send by hand, past the Python client."""

from collections.abc import Sequence
from typing import Any

from quire.v1 import generation_pb2, text_pb2, token_pb2


def token_ids(ids: Sequence[int]) -> generation_pb2.TokenIds:
    packed = b"".join(token_id.to_bytes(4, "little") for token_id in ids)
    return generation_pb2.TokenIds(packed=packed)


def text_request(
    prompt: Sequence[int], max_tokens: int, *, stream: bool = True, **fields: Any
) -> text_pb2.GenerateRequest:
    """Greedy, without an end by a token, and with the ids in the answer."""
    return text_pb2.GenerateRequest(
        token_ids=token_ids(prompt),
        sampling=generation_pb2.SamplingParams(temperature=0.0),
        stopping=generation_pb2.StoppingCriteria(max_tokens=max_tokens, ignore_eos=True),
        output=text_pb2.OutputOptions(stream=stream, return_token_ids=True),
        **fields,
    )


def token_request(
    prompt: Sequence[int], max_tokens: int, **fields: Any
) -> token_pb2.TokenServiceGenerateRequest:
    """The same at the token door."""
    return token_pb2.TokenServiceGenerateRequest(
        request=token_pb2.TokenRequest(
            prompt=token_ids(prompt),
            sampling=generation_pb2.SamplingParams(temperature=0.0),
            stopping=generation_pb2.StoppingCriteria(max_tokens=max_tokens, ignore_eos=True),
            **fields,
        )
    )


def successors(last: int, count: int, vocab: int) -> list[int]:
    """What a successor checkpoint says after a prompt that ends with `last`."""
    return [(last + 1 + index) % vocab for index in range(count)]
