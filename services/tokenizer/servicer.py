"""The text door: one handler per rpc of TextService.

Owns the order of things before a request is answered, and the count of live calls. What each step
does is elsewhere: rules in `validation`, encoding in `encoding_pool`, the answer in `answer`.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.v1 import text_pb2, text_pb2_grpc
from services.chassis.errors import Unavailable, Violations
from services.chassis.tracing import passed_on
from services.chassis.unknown_fields import refuse_unknown_fields
from services.tokenizer import codec
from services.tokenizer.answer import Answer, AnswerPlan
from services.tokenizer.deadline import end_of, within
from services.tokenizer.domain import (
    ChatMessage,
    Limits,
    RawTokenIds,
    Scheduling,
    TextMessage,
    ValidOptions,
)
from services.tokenizer.encoding import Encoding
from services.tokenizer.encoding_pool import EncodingPool
from services.tokenizer.packing import compact_ids
from services.tokenizer.routing import Router
from services.tokenizer.validation import (
    Validator,
    check_messages,
    check_not_empty,
    check_text,
)
from services.tokenizer.watching import CHAT, COMPLETION, Watch, Watchers

# Generic in grpc's stubs, a plain class at run time.
_Context = Any

_UNWATCHED = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class _Arrival:
    """When a call came, in loop time, and what it had left then, seconds; None for no deadline."""

    at: float
    left_s: float | None

    def ends_at(self, scheduling: Scheduling) -> float | None:
        """When its answer is no longer wanted, in loop time; None for never."""
        return end_of(self.at, self.left_s, scheduling.deadline_ms)


class TextServicer(text_pb2_grpc.TextServiceServicer):
    """Serves TextService.

    Args:
        version: of this service.
        validator: the rules for the model.
        encoding: the tokenizer.
        pool: the tokenizer, beside the event loop.
        link: to the schedulers.
        watchers: of the requests, or None.
    """

    def __init__(
        self,
        *,
        version: str,
        validator: Validator,
        encoding: Encoding,
        pool: EncodingPool,
        link: Router,
        watchers: Watchers | None = None,
    ) -> None:
        self._version = version
        self._validator = validator
        self._encoding = encoding
        self._pool = pool
        self._link = link
        self._watchers = watchers
        self._draining = False
        self._calls: set[_Context] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def live_calls(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    def refuse_new(self) -> None:
        """From now on new calls are UNAVAILABLE; running ones go on."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Waits until no call runs."""
        await self._idle.wait()

    async def Generate(
        self, request: text_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[text_pb2.GenerateResponse]:
        """Completes a prompt."""
        watch = self._watch(COMPLETION, request, context)
        with watch or _UNWATCHED:
            arrival = self._enter(request, context)
            limits = self._link.limits
            raw = codec.prompt_from_request(request)
            wrong = Violations()
            with wrong.collected():
                options = self._validator.options(codec.options_from_request(request), limits)
            if raw is None:
                wrong.add("prompt", "is missing; send text or token_ids")
            elif isinstance(raw, RawTokenIds):
                with wrong.collected():
                    prompt = self._validator.prompt_ids(raw, "token_ids", limits)
            else:
                with wrong.collected():
                    self._check_text("prompt", limits)(raw)
            wrong.raise_any()
            ends_at = arrival.ends_at(options.scheduling)
            if watch is not None:
                watch.asked(options)
            if isinstance(raw, str):
                prompt = await self._encode(raw, ends_at, watch)
            self._validator.prompt(prompt, "prompt", options, self._link.limits)
            # The text goes on where the prompt ends, be it inside a word or a character.
            plan = self._plan(options, prompt, prompt, context, ends_at, watch)
            async for message in self._answer(plan, context, watch):
                yield codec.to_generate_response(message)

    async def Chat(
        self, request: text_pb2.ChatRequest, context: _Context
    ) -> AsyncIterator[text_pb2.ChatResponse]:
        """Renders a conversation and completes it."""
        watch = self._watch(CHAT, request, context)
        with watch or _UNWATCHED:
            arrival = self._enter(request, context)
            limits = self._link.limits
            messages = codec.messages_from_proto(request.messages)
            wrong = Violations()
            with wrong.collected():
                options = self._validator.options(codec.options_from_request(request), limits)
            with wrong.collected():
                check_messages(messages)
            wrong.raise_any()
            ends_at = arrival.ends_at(options.scheduling)
            if watch is not None:
                watch.asked(options)
            prompt = await self._render(messages, limits, ends_at, watch)
            self._validator.prompt(prompt, "messages", options, self._link.limits)
            # The assistant's turn is a text of its own.
            plan = self._plan(options, prompt, (), context, ends_at, watch)
            async for message in self._answer(plan, context, watch):
                yield codec.to_chat_response(message)

    async def Tokenize(
        self, request: text_pb2.TokenizeRequest, context: _Context
    ) -> text_pb2.TokenizeResponse:
        """Encodes texts."""
        self._enter(request, context)
        check_not_empty(request.texts, "texts")
        add = codec.flag(request, "add_special_tokens", default=True)
        results = await self._pool.encode(list(request.texts), "texts", add_special_tokens=add)
        return codec.to_tokenize_response(results)

    async def Detokenize(
        self, request: text_pb2.DetokenizeRequest, context: _Context
    ) -> text_pb2.DetokenizeResponse:
        """Decodes token ids."""
        self._enter(request, context)
        check_not_empty(request.sequences, "sequences")
        sequences = [
            self._validator.token_ids(
                codec.token_ids_from_proto(ids), f"sequences[{index}]", self._link.limits
            )
            for index, ids in enumerate(request.sequences)
        ]
        skip = codec.flag(request, "skip_special_tokens", default=True)
        texts = await self._pool.decode(sequences, skip_special_tokens=skip)
        return text_pb2.DetokenizeResponse(texts=texts)

    async def RenderChat(
        self, request: text_pb2.RenderChatRequest, context: _Context
    ) -> text_pb2.RenderChatResponse:
        """Renders a conversation and encodes it."""
        self._enter(request, context)
        messages = codec.messages_from_proto(request.messages)
        check_messages(messages)
        prompt = codec.flag(request, "add_generation_prompt", default=True)
        return codec.to_render_response(
            await self._pool.render(messages, add_generation_prompt=prompt)
        )

    async def GetInfo(
        self, request: text_pb2.GetInfoRequest, context: _Context
    ) -> text_pb2.GetInfoResponse:
        """Says what is served."""
        self._enter(request, context)
        limits = self._link.limits
        return text_pb2.GetInfoResponse(
            model=self._validator.model,
            version=self._version,
            vocab_size=self._encoding.vocab_size,
            max_model_len=None if limits is None else limits.max_model_len,
            kv_capacity_tokens=None if limits is None else limits.kv_capacity_tokens,
            eos_token_ids=() if limits is None else sorted(limits.eos_token_ids),
            tokenizer_digest=self._encoding.digest,
            has_chat_template=self._encoding.has_chat_template,
        )

    async def _encode(self, text: str, ends_at: float | None, watch: Watch | None) -> Sequence[int]:
        """The ids of a prompt."""
        began_ns = time.time_ns()
        ids: Sequence[int] = ()
        try:
            async with within(ends_at):
                (ids,) = await self._pool.encode([text], "text", add_special_tokens=True)
        finally:
            if watch is not None:
                watch.tokenized(began_ns, text, len(ids))
        return ids

    async def _render(
        self,
        messages: Sequence[ChatMessage],
        limits: Limits | None,
        ends_at: float | None,
        watch: Watch | None,
    ) -> Sequence[int]:
        """The ids of a conversation."""
        check = self._check_text("messages", limits)
        if watch is not None:
            check = watch.noting(check)
        began_ns = time.time_ns()
        ids: Sequence[int] = ()
        try:
            async with within(ends_at):
                chat = await self._pool.render(messages, add_generation_prompt=True, check=check)
            ids = chat.token_ids
        finally:
            if watch is not None:
                watch.rendered(began_ns, messages, len(ids))
        return ids

    def _plan(
        self,
        options: ValidOptions,
        prompt: Sequence[int],
        before: Sequence[int],
        context: _Context,
        ends_at: float | None,
        watch: Watch | None,
    ) -> AnswerPlan:
        """What to answer, once the prompt is known; the answer's text goes on after `before`."""
        detokenizer = self._encoding.detokenization.start(
            before, skip_special_tokens=options.skip_special_tokens
        )
        if watch is not None:
            detokenizer = watch.decoding(detokenizer, options, prompt)
        return AnswerPlan(
            options=options,
            prompt=compact_ids(prompt),
            detokenizer=detokenizer,
            traceparent=passed_on(context.invocation_metadata()),
            ends_at=ends_at,
            observer=watch,
        )

    async def _answer(
        self, plan: AnswerPlan, context: _Context, watch: Watch | None
    ) -> AsyncIterator[TextMessage]:
        answer = Answer(plan, self._link, self._encoding.detokenization.special)
        # gRPC may end a call while it writes, and then never comes back into this generator.
        context.add_done_callback(lambda _: answer.close())
        try:
            async for message in answer.messages():
                if watch is not None:
                    watch.answered(message)
                yield message
        finally:
            answer.close()

    def _watch(
        self,
        operation: str,
        request: text_pb2.GenerateRequest | text_pb2.ChatRequest,
        context: _Context,
    ) -> Watch | None:
        if self._watchers is None:
            return None
        return self._watchers.begin(operation, context, request.model, request.request_id)

    def _check_text(self, field: str, limits: Limits | None) -> Callable[[str], None]:
        """Refuses a text that cannot fit, before work is put into it."""
        return functools.partial(
            check_text,
            field=field,
            bound=self._encoding.text_bound,
            limits=limits,
        )

    def _enter(self, request: Any, context: _Context) -> "_Arrival":
        """Counts a call until it ends, however it ends."""
        if self._draining:
            raise Unavailable("this tokenizer is going away", reason="DRAINING")
        self._calls.add(context)
        self._idle.clear()
        context.add_done_callback(self._leave)
        refuse_unknown_fields(request)
        return _Arrival(asyncio.get_running_loop().time(), context.time_remaining())

    def _leave(self, context: _Context) -> None:
        self._calls.discard(context)
        if not self._calls:
            self._idle.set()
