"""Random requests of known kinds, with what each may lead to. The same seed gives the same ones.

The model is a successor checkpoint, so the tokens of every greedy request are known too.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from quire.v1 import generation_pb2, text_pb2, token_pb2
from tests.assets.byte_tokenizer import ENDOFTEXT, VOCAB_SIZE
from tests.system.raw_requests import successors, text_request, token_ids, token_request

LONGEST = 256
"""Longest prompt + output of the worker that is asked."""

LENGTH, STOP = "length", "stop"
INVALID, UNKNOWN_FIELD = "INVALID_ARGUMENT", "UNIMPLEMENTED"
NOT_FOUND, DUPLICATE, REPLACED = "NOT_FOUND", "ALREADY_EXISTS", "ABORTED"
CANCELLED, TIMED_OUT = "CANCELLED", "DEADLINE_EXCEEDED"

Message = text_pb2.GenerateRequest | text_pb2.ChatRequest | token_pb2.TokenServiceGenerateRequest


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One request.

    Attributes:
        kind: what is special about it.
        message: of one of the doors.
        outcomes: how it may end.
        ids: the tokens it must give, where they are known; a request that is cut gives the first.
        cut_after: messages after which the caller leaves; None to read to the end.
        timeout_s: deadline of the call.
        twin: is sent while this one runs, under the same request id.
    """

    kind: str
    message: Message
    outcomes: frozenset[str]
    ids: list[int] | None = None
    cut_after: int | None = None
    timeout_s: float | None = None
    twin: "Plan | None" = None


@dataclass(frozen=True)
class Maker:
    """Makes requests of a seed."""

    draw: random.Random = field(default_factory=lambda: random.Random(20))

    def plan(self, number: int) -> Plan:
        kind = self.draw.choice(list(KINDS))
        return KINDS[kind](self, number)

    def scheduling(self) -> generation_pb2.SchedulingOptions:
        """Options that change when an answer comes, and nothing in it."""
        draw = self.draw
        return generation_pb2.SchedulingOptions(
            priority_class=draw.choice(("", "interactive", "standard", "batch")),
            tenant=draw.choice(("", "small", "large", "é" * 64)),
            deadline_ms=draw.choice((None, None, 120_000, 2**32 - 1)),
            ttft_target_ms=draw.choice((None, 1, 200, 2**32 - 1)),
            tpot_target_ms=draw.choice((None, 1, 50, 2**32 - 1)),
            session_id=draw.choice(("", "one", "two", "s" * 128)),
            cache_salt=draw.choice((None, "", "salt", "é" * 64)),
            skip_reading_prefix_cache=draw.random() < 0.2,
        )

    def greedy(self, **fields: Any) -> tuple[Message, list[int]]:
        """A request whose tokens are known, at either door."""
        if self.draw.random() < 0.5:
            fields["scheduling"] = self.scheduling()
        prompt = [self.draw.randrange(250) for _ in range(self.draw.randint(1, 120))]
        count = self.draw.randint(1, 40)
        ids = successors(prompt[-1], count, VOCAB_SIZE)
        if self.draw.random() < 0.5:
            return token_request(prompt, count, **fields), ids
        return text_request(prompt, count, stream=self.draw.random() < 0.6, **fields), ids

    def long(self, **fields: Any) -> tuple[Message, list[int]]:
        """One that takes a while, always streamed."""
        first = self.draw.randrange(250)
        count = LONGEST - 1
        make = text_request if self.draw.random() < 0.5 else token_request
        return make([first], count, **fields), successors(first, count, VOCAB_SIZE)


def valid(maker: Maker, number: int) -> Plan:
    message, ids = maker.greedy()
    return Plan(kind="greedy", message=message, outcomes=frozenset({LENGTH}), ids=ids)


def sampled(maker: Maker, number: int) -> Plan:
    draw = maker.draw
    message, _ = maker.greedy()
    sampling = generation_pb2.SamplingParams(
        temperature=draw.choice((0.1, 1.0, 5.0)),
        top_p=draw.choice((0.05, 0.9, 1.0)),
        top_k=draw.choice((0, 1, 40)),
        seed=draw.randrange(2**64),
    )
    body_of(message).sampling.CopyFrom(sampling)
    body_of(message).stopping.ignore_eos = False
    return Plan(kind="sampled", message=message, outcomes=frozenset({LENGTH, STOP}))


def resumed(maker: Maker, number: int) -> Plan:
    message, ids = maker.greedy()
    seen = maker.draw.randint(0, len(ids) - 1)
    if isinstance(message, token_pb2.TokenServiceGenerateRequest):
        message.request.resumed.CopyFrom(token_ids(ids[:seen]))
    else:
        message.resume.token_ids.CopyFrom(token_ids(ids[:seen]))
    body_of(message).attempt = 1
    return Plan(kind="resumed", message=message, outcomes=frozenset({LENGTH}), ids=ids[seen:])


def end_of_sequence(maker: Maker, number: int) -> Plan:
    first = maker.draw.randint(200, 250)
    message = maker.draw.choice((text_request, token_request))([first], 100)
    body_of(message).stopping.ignore_eos = False
    ids = list(range(first + 1, ENDOFTEXT + 1))
    return Plan(kind="end of sequence", message=message, outcomes=frozenset({STOP}), ids=ids)


def stop_string(maker: Maker, number: int) -> Plan:
    message = text_request(b"x01", 60, stop_strings=["no", "8", "9:"])
    ids = list(b"2345678")
    return Plan(kind="stop string", message=message, outcomes=frozenset({STOP}), ids=ids)


def stop_token(maker: Maker, number: int) -> Plan:
    message, ids = maker.greedy()
    position = maker.draw.randrange(len(ids))
    body_of(message).stopping.stop_token_ids.append(ids[position])
    kept = ids[: position + 1]
    return Plan(kind="stop token", message=message, outcomes=frozenset({STOP}), ids=kept)


def chat(maker: Maker, number: int) -> Plan:
    message = text_pb2.ChatRequest(
        messages=[text_pb2.ChatMessage(role="user", content="x" * maker.draw.randrange(60))],
        sampling=generation_pb2.SamplingParams(temperature=0.0),
        stopping=generation_pb2.StoppingCriteria(max_tokens=9, ignore_eos=True),
        output=text_pb2.OutputOptions(return_token_ids=True),
    )
    ids = successors(ord("\n"), 9, VOCAB_SIZE)
    return Plan(kind="chat", message=message, outcomes=frozenset({LENGTH}), ids=ids)


def cut(maker: Maker, number: int) -> Plan:
    message, ids = maker.long()
    after = maker.draw.choice((0, 0, 1, 2, 5, 20))
    return Plan(
        kind="cut", message=message, outcomes=frozenset({CANCELLED}), ids=ids, cut_after=after
    )


def late(maker: Maker, number: int) -> Plan:
    message, ids = maker.long()
    return Plan(
        kind="deadline",
        message=message,
        outcomes=frozenset({TIMED_OUT}),
        ids=ids,
        timeout_s=maker.draw.choice((0.0001, 0.005, 0.02)),
    )


def duplicate(maker: Maker, number: int) -> Plan:
    name = f"twice-{number}"
    message, ids = maker.long(request_id=name)
    other, other_ids = maker.greedy(request_id=name)
    replaces = maker.draw.random() < 0.5
    body_of(other).attempt = int(replaces)
    # Ids are a tenant's own.
    body_of(other).scheduling.tenant = body_of(message).scheduling.tenant
    twin = Plan(
        kind="replacing" if replaces else "duplicate",
        message=other,
        outcomes=frozenset({LENGTH if replaces else DUPLICATE}),
        ids=other_ids,
    )
    ends = frozenset({REPLACED if replaces else LENGTH})
    return Plan(kind="duplicated", message=message, outcomes=ends, ids=ids, twin=twin)


def expired(maker: Maker, number: int) -> Plan:
    """Its own deadline passes; it may just be done before that."""
    message, ids = maker.long()
    body_of(message).scheduling.CopyFrom(maker.scheduling())
    body_of(message).scheduling.deadline_ms = maker.draw.choice((1, 5, 20))
    ends = frozenset({TIMED_OUT, LENGTH})
    return Plan(kind="expired", message=message, outcomes=ends, ids=ids)


def unknown_class(maker: Maker, number: int) -> Plan:
    message, _ = maker.greedy()
    body_of(message).scheduling.CopyFrom(maker.scheduling())
    body_of(message).scheduling.priority_class = maker.draw.choice(("urgent", "Batch", " "))
    return Plan(kind="unknown class", message=message, outcomes=frozenset({INVALID}))


def wrong(maker: Maker, number: int) -> Plan:
    message, _ = maker.greedy()
    maker.draw.choice(MISTAKES)(message)
    return Plan(kind="wrong", message=message, outcomes=frozenset({INVALID}))


def other_model(maker: Maker, number: int) -> Plan:
    message, _ = maker.greedy(model="another")
    return Plan(kind="other model", message=message, outcomes=frozenset({NOT_FOUND}))


def unknown_field(maker: Maker, number: int) -> Plan:
    message, _ = maker.greedy()
    body_of(message).MergeFromString(b"\xf8\x3f\x01")  # field 1023, a varint
    return Plan(kind="unknown field", message=message, outcomes=frozenset({UNKNOWN_FIELD}))


KINDS: Mapping[str, Callable[[Maker, int], Plan]] = MappingProxyType(
    {
        make.__name__: make
        for make in (
            *(valid, sampled, resumed, end_of_sequence, stop_string, stop_token, chat),
            *(cut, late, expired, duplicate, wrong, wrong, unknown_class),
            *(other_model, unknown_field),
        )
    }
)


def body_of(message: Message) -> Any:
    """The message with the fields that all doors share."""
    if isinstance(message, token_pb2.TokenServiceGenerateRequest):
        return message.request
    return message


def prompt_of(message: Message) -> generation_pb2.TokenIds:
    if isinstance(message, token_pb2.TokenServiceGenerateRequest):
        return message.request.prompt
    return message.token_ids


def _sampling(**fields: float) -> Callable[[Message], None]:
    return lambda message: body_of(message).sampling.MergeFrom(
        generation_pb2.SamplingParams(**fields)
    )


def _no_tokens(message: Message) -> None:
    body_of(message).stopping.max_tokens = 0


def _too_many_tokens(message: Message) -> None:
    body_of(message).stopping.max_tokens = 2**31


def _too_long_a_prompt(message: Message) -> None:
    prompt_of(message).CopyFrom(token_ids([1] * (LONGEST + 1)))


def _no_prompt(message: Message) -> None:
    prompt_of(message).Clear()


def _half_an_id(message: Message) -> None:
    prompt_of(message).packed += b"\x01\x02"


def _an_id_beyond_the_vocabulary(message: Message) -> None:
    prompt_of(message).packed += (VOCAB_SIZE).to_bytes(4, "little")


def _ids_in_both_forms(message: Message) -> None:
    prompt_of(message).ids.append(1)


def _a_long_name(message: Message) -> None:
    body_of(message).request_id = "n" * 129


def _a_stop_token_beyond_the_vocabulary(message: Message) -> None:
    body_of(message).stopping.stop_token_ids.append(VOCAB_SIZE)


def _many_stop_tokens(message: Message) -> None:
    body_of(message).stopping.stop_token_ids.extend(range(129))


def _scheduling(**fields: Any) -> Callable[[Message], None]:
    return lambda message: body_of(message).scheduling.MergeFrom(
        generation_pb2.SchedulingOptions(**fields)
    )


MISTAKES: tuple[Callable[[Message], None], ...] = (
    *(_sampling(temperature=value) for value in (float("nan"), float("inf"), -0.1)),
    *(_sampling(top_p=value) for value in (float("nan"), 0.0, 1.5, -1.0)),
    *(_no_tokens, _too_many_tokens, _too_long_a_prompt, _no_prompt, _half_an_id),
    *(_an_id_beyond_the_vocabulary, _ids_in_both_forms, _a_long_name),
    *(_a_stop_token_beyond_the_vocabulary, _many_stop_tokens),
    *(
        _scheduling(**{name: "é" * 65})
        for name in ("priority_class", "tenant", "session_id", "cache_salt")
    ),
    *(_scheduling(**{name: 0}) for name in ("deadline_ms", "ttft_target_ms", "tpot_target_ms")),
)
