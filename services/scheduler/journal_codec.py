"""Between the values of the core and the messages of a journal (`journal.proto`)."""

import io
import zlib
from collections.abc import Iterable
from typing import IO, TypeVar, cast

import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.proto import parse_length_prefixed

import quire.version
from quire.v1 import journal_pb2
from services.scheduler.core.chain import DIGEST_BYTES
from services.scheduler.core.config import Config
from services.scheduler.core.plan import (
    AddRequest,
    Ended,
    Pin,
    RowFailure,
    Sampling,
    StepResult,
    TokenArray,
    WorkerSpec,
)
from services.scheduler.journal_digest import Answer, Decision, digest_of
from services.scheduler.journal_values import from_json, to_json
from services.scheduler.journal_veil import Veil

_M = TypeVar("_M", journal_pb2.JournalHeader, journal_pb2.JournalEntry)
_T = TypeVar("_T")

MAGIC = "quire-journal"
VERSION = 2

Entry = journal_pb2.JournalEntry
Header = journal_pb2.JournalHeader

_CHECKSUM_TAG = bytes([22 << 3 & 0x7F | 5 | 0x80, 22 >> 4])
"""Of the field `checksum`, which header and entry have under one number."""


class JournalError(Exception):
    """A file that is no journal, or that this version cannot read; says why, on one line."""


# Header


def header(
    *, config: Config, prefix_hash: str, hash_key: bytes, hash_only: bool, clocks: tuple[int, int]
) -> Header:
    """The first message of a file.

    Args:
        config: of the core.
        prefix_hash: name of the hash of the prefix cache.
        hash_key: its key; left out where the digests are kept instead.
        hash_only: token ids are left out.
        clocks: microseconds since 1970, and the same instant on the clock of the entries.
    """
    return Header(
        magic=MAGIC,
        version=VERSION,
        quire_version=quire.version.VERSION,
        mode=journal_pb2.JOURNAL_MODE_HASHES if hash_only else journal_pb2.JOURNAL_MODE_TOKENS,
        config_json=to_json(config),
        prefix_hash=prefix_hash,
        hash_key=b"" if hash_only else hash_key,
        digest_bytes=DIGEST_BYTES,
        started_unix_us=clocks[0],
        started=clocks[1],
    )


def read_header(stream: IO[bytes]) -> Header:
    """The first message of a file.

    Raises:
        JournalError: it is no journal, one of another version, or its header is damaged.
    """
    try:
        read = _parse(Header, stream)
    except (DecodeError, ValueError, EOFError, OSError):
        read = None
    if read is None or read.magic != MAGIC:
        raise JournalError("this is no journal of a scheduler")
    if read.version != VERSION:
        raise JournalError(f"a journal of version {read.version}; this version reads {VERSION}")
    if read.digest_bytes != DIGEST_BYTES:
        raise JournalError(f"digests of {read.digest_bytes} bytes; here they have {DIGEST_BYTES}")
    _check(read, "the header")
    return read


def is_hash_only(read: Header) -> bool:
    """Whether the file holds no token ids."""
    return read.mode == journal_pb2.JOURNAL_MODE_HASHES


def config_of(read: Header) -> Config:
    """The configuration that the core began with."""
    return read_config(read.config_json)


def read_config(text: str) -> Config:
    """A configuration.

    Raises:
        JournalError: it has what this version does not know.
    """
    return _value(Config, text)


def read_entry(stream: IO[bytes]) -> Entry | None:
    """The next entry; None at the end of the file.

    Raises:
        EOFError: the file ends within the entry.
        JournalError: what stands there is no entry.
    """
    try:
        read = _parse(Entry, stream)
    except (DecodeError, ValueError) as error:
        # The last entry of a cut file, or one that was damaged: only the former has nothing after.
        if stream.read(1):
            raise JournalError("an entry is damaged") from error
        raise EOFError from error
    if read is not None:
        _check(read, "an entry")
    return read


def payload_of(message: Message) -> bytes:
    """A header or an entry as it stands in a file, its checksum at the end."""
    payload = message.SerializeToString()
    # Fields that follow each other make a message, whatever wrote them.
    return payload + _CHECKSUM_TAG + zlib.crc32(payload).to_bytes(4, "little")


def _check(read: Header | Entry, what: str) -> None:
    checksum = read.checksum
    read.ClearField("checksum")
    if zlib.crc32(read.SerializeToString()) != checksum:
        raise JournalError(f"{what} is damaged")


def _parse(kind: type[_M], stream: IO[bytes]) -> _M | None:
    # Any buffered stream will do, says the function; its annotation says BytesIO.
    try:
        return parse_length_prefixed(kind, cast("io.BytesIO", stream))
    except (OverflowError, MemoryError) as error:
        raise ValueError("a length that no message has") from error


# Entries


def entry(now: int, ended: Iterable[Ended] = ()) -> Entry:
    """An entry without its input, and without the answer: see `seal`."""
    message = Entry(now=now)
    for end in ended:
        message.ended.add(
            handle=end.handle, reason=end.reason.name, completion_tokens=end.completion_tokens
        )
    return message


def seal(message: Entry, answer: Answer) -> None:
    """Puts in what the core answered."""
    if answer.canonical:
        message.decision = digest_of(answer.canonical)
        message.summary.extend(answer.summary)
        message.error = answer.error


def decision_of(message: Entry) -> Decision:
    """What was decided then."""
    return Decision(message.decision, tuple(message.summary), message.error)


def fill_add(message: Entry, request: AddRequest, veil: Veil | None) -> None:
    """Makes the entry one of `add`."""
    stops = request.stop_token_ids if veil is None else veil.stop_ids(request.stop_token_ids)
    add = message.add
    add.MergeFrom(
        journal_pb2.JournalAdd(
            request_id=request.request_id,
            handle=request.handle,
            attempt=request.attempt,
            prompt_hashes=request.prompt_hashes,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
            stop_token_ids=stops,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            seed=request.sampling.seed,
            traceparent=request.traceparent,
            salt=request.salt if veil is None else veil.salt(request.salt),
            skip_reading_prefix_cache=not request.read_prefix_cache,
            priority_class=request.priority_class,
            tenant=request.tenant,
            deadline=request.deadline,
            ttft_target_us=request.ttft_target_us,
            tpot_target_us=request.tpot_target_us,
            shed_late=request.shed_late,
        )
    )
    if veil is None:
        add.prompt.packed = _packed(request.prompt)
        add.resumed.packed = _packed(request.resumed)
    else:
        # Of a prompt the core asks nothing but its hashes.
        _fill_veiled(add.prompt, request.prompt.size, veil.outside(request.prompt), veil)
        _fill_veiled(add.resumed, request.resumed.size, veil.special(request.resumed), veil)


def fill_apply(message: Entry, worker_id: str, result: StepResult, veil: Veil | None) -> None:
    """Makes the entry one of `apply`."""
    apply = message.apply
    apply.worker_id = worker_id
    apply.epoch = result.epoch
    apply.step_id = result.step_id
    rows = result.counts.size
    apply.rows = rows
    counts = result.counts.tobytes()
    if counts != b"\x01" * rows:
        apply.counts = counts
    if veil is None:
        apply.tokens.packed = _packed(result.token_ids)
    else:
        tokens = result.token_ids
        _fill_veiled(apply.tokens, tokens.size, veil.special(tokens), veil)
    apply.execute_us = result.execute_us
    apply.idle_us = result.idle_us
    for failure in result.failures:
        apply.failures.add(slot=failure.slot, message=failure.message)


def fill_attach(message: Entry, spec: WorkerSpec, *, refused: bool) -> None:
    """Makes the entry one of `attach`."""
    message.attach.spec_json = to_json(spec)
    message.attach.refused = refused


def fill_configure(message: Entry, config: Config) -> None:
    """Makes the entry one of `configure`."""
    message.configure_json = to_json(config)


def fill_pin(message: Entry, pin: Pin) -> None:
    """Makes the entry one of `pin`."""
    message.pin.MergeFrom(
        journal_pb2.JournalPin(name=pin.name, hashes=pin.hashes, expires=pin.expires)
    )


def close_entry(now: int, problem: str) -> Entry:
    """The last entry.

    Args:
        now: on the clock of the entries.
        problem: why recording ended before the scheduler did; "": it did not.
    """
    reason = (
        journal_pb2.JOURNAL_CLOSE_REASON_FAILED
        if problem
        else journal_pb2.JOURNAL_CLOSE_REASON_STOPPED
    )
    return Entry(now=now, close=journal_pb2.JournalClose(reason=reason, message=problem))


# And back


def parse_add(message: journal_pb2.JournalAdd) -> AddRequest:
    """The request; what was left out of a prompt is one neutral id."""
    return AddRequest(
        request_id=message.request_id,
        handle=message.handle,
        attempt=message.attempt,
        prompt=_tokens(message.prompt),
        prompt_hashes=message.prompt_hashes,
        resumed=_tokens(message.resumed),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        sampling=Sampling(
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k,
            seed=message.seed,
        ),
        traceparent=message.traceparent,
        salt=message.salt,
        read_prefix_cache=not message.skip_reading_prefix_cache,
        priority_class=message.priority_class,
        tenant=message.tenant,
        deadline=message.deadline if message.HasField("deadline") else None,
        ttft_target_us=message.ttft_target_us if message.HasField("ttft_target_us") else None,
        tpot_target_us=message.tpot_target_us if message.HasField("tpot_target_us") else None,
        shed_late=message.shed_late,
    )


def parse_apply(message: journal_pb2.JournalApply) -> StepResult:
    """The result; ids that were left out are one neutral id."""
    counts = message.counts or b"\x01" * message.rows
    return StepResult(
        epoch=message.epoch,
        step_id=message.step_id,
        counts=np.frombuffer(counts, np.uint8),
        token_ids=_tokens(message.tokens),
        failures=tuple(RowFailure(slot=one.slot, message=one.message) for one in message.failures),
        execute_us=message.execute_us,
        idle_us=message.idle_us,
    )


def parse_attach(message: journal_pb2.JournalAttach) -> WorkerSpec:
    """What the worker announced.

    Raises:
        JournalError: it has what this version does not know.
    """
    return _value(WorkerSpec, message.spec_json)


def parse_pin(message: journal_pb2.JournalPin) -> Pin:
    """The pin."""
    expires = message.expires if message.HasField("expires") else None
    return Pin(name=message.name, hashes=message.hashes, expires=expires)


def _value(kind: type[_T], text: str) -> _T:
    try:
        return from_json(kind, text)
    except (ValueError, TypeError) as error:
        raise JournalError(str(error)) from error


def _packed(ids: TokenArray) -> bytes:
    return ids.astype("<u4", copy=False).tobytes()


def _fill_veiled(
    message: journal_pb2.JournalTokens, size: int, special: tuple[list[int], list[int]], veil: Veil
) -> None:
    message.size = size
    message.neutral = veil.neutral
    places, ids = special
    if places:
        message.places.extend(places)
        message.ids.extend(ids)


def _tokens(message: journal_pb2.JournalTokens) -> TokenArray:
    if not message.size:
        return np.frombuffer(message.packed, "<u4")
    ids = np.full(message.size, message.neutral, np.uint32)
    ids[list(message.places)] = list(message.ids)
    return ids
