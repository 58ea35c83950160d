"""One answer: from a valid request to its last message.

Owns the order of things while tokens come, and what is worth a message of its own. Tokens come from
the link, text from `generation`. Knows no protobuf.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from services.chassis.errors import Aborted
from services.tokenizer.detokenizer import IncrementalDetokenizer
from services.tokenizer.domain import (
    FinishReason,
    TextEnd,
    TextMessage,
    TokenEnd,
    TokenWork,
    Usage,
    ValidOptions,
)
from services.tokenizer.generation import TextGeneration, make_matcher
from services.tokenizer.routing import Router
from services.tokenizer.token_stream import SubmissionObserver, TokenStream


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """A request that is ready to generate.

    Attributes:
        options: all of it but the prompt.
        prompt: as the model is given it, checked.
        detokenizer: of the answer's text.
        traceparent: W3C trace context, or "".
        ends_at: when nobody wants the answer any more, in loop time; None for never.
        observer: told of its submissions, or None.
    """

    options: ValidOptions
    prompt: Sequence[int]
    detokenizer: IncrementalDetokenizer
    traceparent: str
    ends_at: float | None
    observer: SubmissionObserver | None = None


class Answer:
    """Iterate `messages` once, and `close` in any case.

    Args:
        plan: what to answer.
        link: to the schedulers.
        special: text of each special token by id.
    """

    def __init__(self, plan: AnswerPlan, link: Router, special: Mapping[int, str]) -> None:
        self._plan = plan
        self._options = plan.options
        self._link = link
        self._generation = TextGeneration(
            plan.detokenizer,
            make_matcher(
                plan.options.stop_strings, special, include_stop=plan.options.include_stop
            ),
            special,
            shows_special=not plan.options.skip_special_tokens,
            include_stop=plan.options.include_stop,
        )
        self._stream: TokenStream | None = None

    async def messages(self) -> AsyncIterator[TextMessage]:
        """What to send, the end last.

        Raises:
            ServiceError: the answer failed.
        """
        options = self._options
        opening: tuple[str, int] | None = (options.request_id, options.sampling.seed)
        texts: list[str] = []
        ids: list[int] = []
        async for text, new_ids, end in self._news():
            texts.append(text)
            if options.return_token_ids:
                ids.extend(new_ids)
            if end is None and not (options.stream and (ids or any(texts))):
                continue
            yield TextMessage(opening=opening, text="".join(texts), token_ids=ids, end=end)
            opening, texts, ids = None, [], []

    def close(self) -> None:
        """Lets go of the request, and aborts it if it still runs. May be called again."""
        if self._stream is not None:
            self._stream.close()

    async def _news(self) -> AsyncIterator[tuple[str, Sequence[int], TextEnd | None]]:
        """New text and new ids as tokens come, and the end."""
        generation = self._generation
        # Text of resumed tokens was sent when they were.
        generation.push(self._options.resumed, self._ending_ids())
        resumed_end = self._resumed_end()
        if resumed_end is not None:
            text, end = generation.finish(resumed_end)
            yield text, (), end
            return
        stream = self._stream = self._link.open(self._work())
        stream.observer = self._plan.observer
        while True:
            delta = await stream.next()
            was_found = generation.found is not None
            text, ids = generation.push(delta.ids, self._ending_ids())
            if generation.found is not None and not was_found:
                stream.finish(generation.found.kept_tokens)
            if delta.end is not None:
                self._refuse_abort(delta.end)
                rest, end = generation.finish(delta.end)
                yield text + rest, ids, end
                return
            yield text, ids, None

    def _refuse_abort(self, end: TokenEnd) -> None:
        """A user is never told that an answer ended well which somebody else cut."""
        if end.reason is FinishReason.ABORT and self._generation.found is None:
            raise Aborted("the scheduler ended the request")

    def _work(self) -> TokenWork:
        options = self._options
        return TokenWork(
            request_id=options.request_id,
            model=options.model,
            prompt=self._plan.prompt,
            sampling=options.sampling,
            max_tokens=options.max_tokens,
            ignore_eos=options.ignore_eos,
            stop_token_ids=options.stop_token_ids,
            attempt=options.attempt,
            resumed=options.resumed,
            traceparent=self._plan.traceparent,
            scheduling=options.scheduling,
            ends_at=self._plan.ends_at,
        )

    def _ending_ids(self) -> frozenset[int]:
        """Tokens that end the answer, as far as they are known."""
        limits, own = self._link.limits, self._options.stop_token_ids
        if self._options.ignore_eos or limits is None:
            return own
        return limits.eos_token_ids | own if own else limits.eos_token_ids

    def _resumed_end(self) -> TokenEnd | None:
        """The end of a resumed answer to which nothing is missing but its last message."""
        resumed = self._options.resumed
        if not resumed:
            return None
        usage = Usage(
            prompt_tokens=len(self._plan.prompt),
            completion_tokens=len(resumed),
            cached_tokens=0,
        )
        if self._generation.found is not None:
            return TokenEnd(reason=FinishReason.STOP, stop_token_id=None, usage=usage)
        if resumed[-1] in self._ending_ids():
            return TokenEnd(reason=FinishReason.STOP, stop_token_id=resumed[-1], usage=usage)
        if len(resumed) >= self._room():
            return TokenEnd(reason=FinishReason.LENGTH, stop_token_id=None, usage=usage)
        return None

    def _room(self) -> float:
        """Most tokens the answer can have, as far as it is known."""
        if self._options.max_tokens is not None:
            return self._options.max_tokens
        limits = self._link.limits
        return float("inf") if limits is None else limits.max_model_len - len(self._plan.prompt)
