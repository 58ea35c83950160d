"""What the client hands out: an answer in parts, an answer as a whole, facts about a server."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation.

    Attributes:
        role: "system", "user", "assistant", or whatever the model's template knows.
        content: plain text.
    """

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost, in tokens.

    Attributes:
        prompt_tokens: of the prompt, after templating and tokenization.
        completion_tokens: generated, the ending token included.
        cached_tokens: of the prompt, found in the prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How an answer ended.

    Attributes:
        reason: "stop" or "length".
        stop: the stop string or the token id that ended it, where one did.
        usage: what it cost.
        request_id: the request's name, for the servers' logs.
        seed: what decided the draws; the same seed draws the same tokens again.
        trace_id: of the trace that the request belongs to, hex; "" for none.
    """

    reason: str
    stop: str | int | None
    usage: Usage
    request_id: str
    seed: int
    trace_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is new in an answer.

    Attributes:
        text: never ends inside a character; may be empty.
        token_ids: the new tokens; they may run ahead of the text.
        finished: set in the last one.
    """

    text: str
    token_ids: tuple[int, ...]
    finished: Finished | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer.

    Attributes:
        text: of the answer; what ended it is cut off, unless asked for.
        token_ids: of the answer.
        finish_reason: "stop" or "length".
        stop: the stop string or the token id that ended it, where one did.
        usage: what it cost.
        seed: what decided the draws.
        request_id: the request's name.
        trace_id: of the trace that the request belongs to, hex; "" for none.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop: str | int | None
    usage: Usage
    seed: int
    request_id: str
    trace_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer to a prompt, as far as it has come.

    Attributes:
        index: its place among the answers to that prompt; 0, since there is one.
        text: all of it so far.
        token_ids: all of them so far; they may run ahead of the text.
        finish_reason: "stop" or "length"; None until it has ended.
        stop_reason: the stop string or the token id that ended it, where one did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one prompt of a call has brought so far.

    Attributes:
        index: the prompt's place among those of the call.
        request_id: the request's name, for the servers' logs.
        prompt: the prompt as text; None where token ids or a conversation were given.
        prompt_token_ids: the prompt as token ids where they were given, else None: the encoding is
            the server's, and `usage` has their number.
        outputs: the answer.
        finished: nothing follows.
        usage: what it cost; None until it has ended.
    """

    index: int
    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...] | None
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A conversation as the model will see it.

    Attributes:
        text: what the template makes of it.
        token_ids: of that text.
    """

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server serves, and within which limits.

    Attributes:
        model: its name.
        version: of the service.
        vocab_size: token ids are below this.
        max_model_len: longest prompt + output, in tokens; None while no worker is attached.
        kv_capacity_tokens: what the KV cache of the largest worker holds; None likewise.
        eos_token_ids: tokens that end an answer; empty while no worker is attached.
        tokenizer_digest: sha256 of the tokenizer files, hex.
        has_chat_template: whether `chat` works.
    """

    model: str
    version: str
    vocab_size: int
    max_model_len: int | None
    kv_capacity_tokens: int | None
    eos_token_ids: tuple[int, ...]
    tokenizer_digest: str
    has_chat_template: bool
