"""What flows through the tokenizer service: frozen values, no protobuf and no I/O.

A request is a `Raw…` value as it came, then a `Valid…` one (every rule checked, see `validation`),
then a `TokenWork` for the scheduler. Token ids are sequences of ints in order.
"""

import enum
from collections.abc import Container, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTokenIds:
    """The two ways to send token ids, at most one of them filled.

    Attributes:
        packed: little-endian uint32.
        ids: the ids.
    """

    packed: bytes = b""
    ids: Sequence[int] = ()

    @property
    def count(self) -> int:
        """How many there are, in whichever form; known without reading them."""
        return len(self.packed) // 4 or len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSampling:
    """Sampling as asked for; None is absent, and an explicit 0 is a value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """How urgent a request is, whom it is for; see SchedulingOptions in the wire contract.

    Attributes:
        priority_class: "" for the scheduler's default.
        tenant: "" for the one without a name.
        deadline_ms: as given, counted from the arrival; on its way to the scheduler what is left
            of it, of the call's own deadline too. None: never.
        ttft_target_ms: None for the class's.
        tpot_target_ms: None for the service's.
        session_id: "" for none.
        cache_salt: None for the tenant, "" for what all share that say so.
    """

    priority_class: str = ""
    tenant: str = ""
    deadline_ms: int | None = None
    ttft_target_ms: int | None = None
    tpot_target_ms: int | None = None
    shed_late: bool = False
    session_id: str = ""
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RawOptions:
    """All of a request but its prompt, as it came.

    Attributes:
        request_id: "" where one is to be minted.
        model: "" for the one that is served.
        resumed: ids already generated, where a cut generation goes on.
    """

    request_id: str = ""
    model: str = ""
    sampling: RawSampling = field(default_factory=RawSampling)
    max_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    stream: bool = True
    return_token_ids: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    attempt: int = 0
    resumed: RawTokenIds = field(default_factory=RawTokenIds)
    scheduling: Scheduling = field(default_factory=Scheduling)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling in force; see SamplingParams in the wire contract."""

    temperature: float
    top_p: float
    top_k: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidOptions:
    """All of a request but its prompt, every rule checked, defaults filled in.

    Attributes:
        request_id: given or minted.
        max_tokens: None for as many as the context and the cache hold.
        stop_token_ids: tokens that end it beside the model's end-of-sequence tokens.
        include_stop: the text ends with what ended it, be that a string or a token.
        resumed: ids already generated and delivered.
    """

    request_id: str
    model: str
    sampling: Sampling
    max_tokens: int | None
    ignore_eos: bool
    stop_token_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    stream: bool
    return_token_ids: bool
    include_stop: bool
    skip_special_tokens: bool
    attempt: int
    resumed: Sequence[int]
    scheduling: Scheduling


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWork:
    """What the scheduler is asked to generate.

    Attributes:
        prompt: at least one id.
        attempt: of the caller; the link counts it up when it resubmits.
        resumed: ids already generated.
        traceparent: W3C trace context, or "".
        scheduling: with `deadline_ms` as of the moment it is sent.
        ends_at: when nobody wants the answer any more, in loop time; None for never.
    """

    request_id: str
    model: str
    prompt: Sequence[int]
    sampling: Sampling
    max_tokens: int | None
    ignore_eos: bool
    stop_token_ids: frozenset[int]
    attempt: int
    resumed: Sequence[int]
    traceparent: str
    scheduling: Scheduling
    ends_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the attached workers can serve; see ModelLimits in the wire contract.

    Attributes:
        prefix_hash: name of the hash of cached blocks; "" where none are.
    """

    model: str
    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int
    eos_token_ids: frozenset[int]
    num_workers: int
    block_size: int = 0
    model_digest: str = ""
    prefix_hash: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """How busy a scheduler is; see LoadReport in the wire contract.

    Attributes:
        prefixes: hashes of cached blocks; None where they are as they were.
    """

    running: int
    waiting: int
    waiting_tokens: int
    prefixes: Container[bytes] | None


class FinishReason(enum.Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEnd:
    """The end of a generation as the scheduler sees it.

    Attributes:
        stop_token_id: the end-of-sequence or stop token sampled, where one ended it.
    """

    reason: FinishReason
    stop_token_id: int | None
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEnd:
    """The end of a generation as the caller sees it.

    Attributes:
        stop_string: the stop string found, where one ended it.
        stop_token_id: the end-of-sequence or stop token sampled, where one ended it.
    """

    reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMessage:
    """One message of a text stream.

    Attributes:
        opening: request id and seed, in the first message only.
        end: in the last message only.
    """

    opening: tuple[str, int] | None
    text: str
    token_ids: Sequence[int]
    end: TextEnd | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A conversation as the model is given it."""

    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What absent sampling fields take."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
