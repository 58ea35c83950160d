"""Conversations to token ids, through the chat template of the model's folder.

Owns one promise beside rendering: special tokens in the ids come from the template alone. Text of a
message that reads like one (`<|im_end|>`) is encoded as the ordinary characters it consists of.

How: where a message holds the text of a special token, that text is put between two marks (two
private-use characters that occur nowhere in the conversation) before rendering. In the rendered
text everything between marks is ordinary; special tokens outside of them are the template's. The
text is cut at the template's tokens, and what lies between is encoded without special tokens, each
piece in one go, so that the ids are those of the library for the same text with special tokens
unknown. A conversation without such text, that is nearly every one, is rendered and encoded as the
library does.

Limits: where a template takes a marked text apart, or changes it, the message is refused. A
template that itself makes a special token out of other text (by lower case, say, or out of a role's
name) is believed. Added tokens that are not special (such as `<think>`) show in generated text, so
they may be written in messages too.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from services.chassis.errors import InvalidArgument
from services.tokenizer.bounded_template import MAX_SECONDS, BoundedTemplate, TemplateTooSlow
from services.tokenizer.domain import ChatMessage, RenderedChat

_PRIVATE_USE = range(0xF0000, 0xFFFFE)

# What a template may raise beside TemplateError: it is a program, run on data it may not expect.
_TEMPLATE_FAULTS = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)


class TemplateBroken(Exception):
    """The template is no valid template; the message says why."""


@dataclass(frozen=True, slots=True)
class _Marks:
    """Two characters that occur nowhere else in a conversation."""

    begin: str
    end: str

    def put_around(self, text: str, spans: Sequence[tuple[int, int]]) -> str:
        """`text` with each span between the marks."""
        parts = []
        done = 0
        for begin, end in spans:
            parts += [text[done:begin], self.begin, text[begin:end], self.end]
            done = end
        return "".join([*parts, text[done:]])

    def split(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """The pieces of a rendered text, and whether each was between marks."""
        pattern = f"{self.begin}([^{self.begin}{self.end}]*){self.end}"
        for index, piece in enumerate(re.split(pattern, rendered)):
            yield piece, index % 2 == 1


class ChatTemplate:
    """Renders and encodes conversations. Its methods may be called from several threads.

    Args:
        tokenizer: as loaded from the model's folder; neither it nor its backend is changed.

    Raises:
        TemplateBroken: there is a template, and it cannot be parsed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        special = {index: token for index, token in added.items() if token.special}
        self._special_ids = frozenset(special)
        self._special_texts = _any_of(token.content for token in special.values())
        normalizer = self._backend.normalizer
        # Such a token is also found in text that only becomes its text when normalized.
        self._normalized_texts = (
            None
            if normalizer is None
            else _any_of(
                normalizer.normalize_str(token.content)
                for token in special.values()
                if token.normalized
            )
        )
        self._special_tokens = _plain_tokens(tokenizer.special_tokens_map)
        self._template = self._compiled()
        self.exists = self._template is not None
        # Made now, although few conversations need it: making it keeps all threads waiting.
        self._ordinary = _OrdinaryText(self._backend) if self.exists else None

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        check: Callable[[str], None] | None = None,
    ) -> RenderedChat:
        """Renders and encodes a conversation.

        Args:
            messages: at least one.
            add_generation_prompt: whether the text ends with the opening of the assistant's turn.
            check: given the rendered text before anything is encoded; what it raises is raised.

        Raises:
            InvalidArgument: the model has no template, the template refuses the conversation, or a
                message holds a special token that cannot be told from the template's.
        """
        if self._ordinary is None:
            raise InvalidArgument(
                "messages",
                "this model has no chat template; send a prompt to Generate",
                reason="NO_CHAT_TEMPLATE",
            )
        for index, message in enumerate(messages):
            if self._special_spans(message.role):
                raise InvalidArgument(f"messages[{index}].role", "must not hold a special token")
        text = self._rendered(messages, add_generation_prompt)
        if check is not None:
            check(text)
        spans = [self._special_spans(message.content) for message in messages]
        if not any(spans):
            return RenderedChat(text=text, token_ids=_encode(self._backend, text))
        marks = _marks_beside(messages)
        marked = [
            replace(message, content=marks.put_around(message.content, found))
            for message, found in zip(messages, spans, strict=True)
        ]
        first = next(index for index, found in enumerate(spans) if found)
        texts = {
            message.content[begin:end]
            for message, found in zip(messages, spans, strict=True)
            for begin, end in found
        }
        pieces = list(marks.split(self._rendered(marked, add_generation_prompt)))
        self._check_intact(pieces, texts, marks, f"messages[{first}].content")
        return RenderedChat(
            text="".join(piece for piece, _ in pieces),
            token_ids=self._encode_marked(pieces, self._ordinary, f"messages[{first}].content"),
        )

    def _compiled(self) -> BoundedTemplate | None:
        """The template, if there is one."""
        try:
            source = self._tokenizer.get_chat_template()
        except ValueError:
            return None
        try:
            return BoundedTemplate(source)
        except TemplateSyntaxError as error:
            raise TemplateBroken(f"line {error.lineno}: {error.message}") from error
        except _TEMPLATE_FAULTS as error:
            raise TemplateBroken(f"it is no template: {error}") from error

    def _rendered(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        try:
            return self._apply(messages, add_generation_prompt)
        except TemplateError as error:
            raise InvalidArgument(
                "messages", f"the model's chat template refuses them: {error.message}"
            ) from error
        except TemplateTooSlow as error:
            raise InvalidArgument(
                "messages", f"the model's chat template needs more than {MAX_SECONDS:g} s for them"
            ) from error
        except _TEMPLATE_FAULTS as error:
            raise InvalidArgument(
                "messages", "the model's chat template cannot render them"
            ) from error

    def _apply(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        assert self._template is not None, "asked only where there is one"
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        # What `transformers` gives to templates.
        return self._template.render(
            {
                **self._special_tokens,
                "messages": conversation,
                "tools": None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def _special_spans(self, text: str) -> list[tuple[int, int]]:
        """Where in `text` the tokenizer would see special tokens, in characters."""
        suspicious = self._special_texts.search(text) or (
            self._normalized_texts is not None
            and self._normalized_texts.search(self._backend.normalizer.normalize_str(text))
        )
        return self._find_special(text) if suspicious else []

    def _find_special(self, text: str) -> list[tuple[int, int]]:
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        return [
            span
            for token_id, span in zip(encoding.ids, encoding.offsets, strict=True)
            if token_id in self._special_ids
        ]

    def _check_intact(
        self, pieces: Sequence[tuple[str, bool]], texts: set[str], marks: _Marks, field: str
    ) -> None:
        for piece, is_marked in pieces:
            intact = piece in texts if is_marked else not {marks.begin, marks.end} & set(piece)
            if not intact:
                raise InvalidArgument(
                    field,
                    "holds a special token of the model, and the chat template does not pass the "
                    "text on as it is",
                )

    def _encode_marked(
        self, pieces: Sequence[tuple[str, bool]], plain: "_OrdinaryText", field: str
    ) -> list[int]:
        """Ids of a marked text: the template's special tokens, and ordinary text between them."""
        ids: list[int] = []
        ordinary = ""
        is_first = True
        num_special = 0
        for piece, is_marked in pieces:
            done = 0
            for begin, end in [] if is_marked else self._find_special(piece):
                ids += plain.encode(ordinary + piece[done:begin], is_first=is_first)
                ids += _encode(self._backend, piece[begin:end])
                ordinary, done, is_first = "", end, False
                num_special += 1
            ordinary += piece[done:]
        ids += plain.encode(ordinary, is_first=is_first)
        if sum(token_id in self._special_ids for token_id in ids) != num_special:
            raise InvalidArgument(
                field,
                "holds a special token of the model, and its tokenizer cannot write that as text",
            )
        return ids


class _OrdinaryText:
    """Encodes text in which special tokens are nothing special.

    Args:
        backend: the tokenizer, of which this is a copy.
    """

    def __init__(self, backend: Tokenizer) -> None:
        serialized = backend.to_str()
        self._beginning = self._following = _without_special(serialized)
        steps = backend.pre_tokenizer
        if steps is not None and b'"prepend_scheme":"first"' in steps.__getstate__():
            state = json.loads(serialized)
            _prepend_never(state["pre_tokenizer"])
            self._following = _without_special(json.dumps(state))

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        """The ids of a text that begins a prompt, or of one that follows a special token."""
        if not text:
            return []
        return _encode(self._beginning if is_first else self._following, text)


def _without_special(serialized: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(serialized)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _prepend_never(step: dict[str, Any]) -> None:
    """Tells pre-tokenizers that put a space before the first word of a text not to."""
    if step.get("prepend_scheme") == "first":
        step["prepend_scheme"] = "never"
    for part in step.get("pretokenizers", ()):
        _prepend_never(part)


def _marks_beside(messages: Sequence[ChatMessage]) -> _Marks:
    used = set().union(*(message.content for message in messages))
    free = (chr(point) for point in _PRIVATE_USE if chr(point) not in used)
    return _Marks(next(free), next(free))


def _plain_tokens(tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens by role, as texts that carry no methods of their own."""
    return {
        role: [str(one) for one in token] if isinstance(token, list | tuple) else str(token)
        for role, token in tokens.items()
    }


def _any_of(texts: Iterator[str]) -> re.Pattern[str]:
    """A pattern that finds any of `texts`; nothing where there are none."""
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    # Of the library's calls only the batch ones let other threads run meanwhile.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return list(encoding.ids)
