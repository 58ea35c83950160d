"""One generation as text: tokens in, text deltas and the end out.

Owns detokenizing and stop strings of one request. Invariant: the texts given out, joined, are the
decoded tokens up to the stop, and nothing is given out twice. Pure: knows no stream, no protobuf.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.tokenizer.detokenizer import IncrementalDetokenizer
from services.tokenizer.domain import FinishReason, TextEnd, TokenEnd, Usage
from services.tokenizer.stop_matcher import StopMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFound:
    """A stop string that appeared.

    Attributes:
        stop: the string.
        kept_tokens: output tokens up to and with the one that completed it, resumed ones included.
    """

    stop: str
    kept_tokens: int


def make_matcher(
    stops: Sequence[str], special: Mapping[int, str], *, include_stop: bool = False
) -> StopMatcher | None:
    """A matcher for `stops`, or None where there are none.

    Args:
        stops: none empty.
        special: text of each special token by id. A stop string that contains one is looked for in
            the text with special tokens in it, so that it can be found where they do not show.
        include_stop: whether the text ends with the stop string, or before it.
    """
    if not stops:
        return None
    names = special.values()
    raw = [stop for stop in stops if any(name in stop for name in names)]
    visible = (stop for stop in stops if stop not in raw)
    return StopMatcher(visible, raw, include=include_stop)


class TextGeneration:
    """Turns the tokens of one request into text.

    Args:
        detokenizer: of this text, already told of the prompt where the text goes on from it.
        matcher: the stop strings, or None.
        special: text of each special token by id.
        shows_special: whether the detokenizer gives text for special tokens.
        include_stop: whether the token that ends the generation adds its text.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        matcher: StopMatcher | None,
        special: Mapping[int, str],
        *,
        shows_special: bool = False,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._special = special
        self._shows_special = shows_special
        self._include_stop = include_stop
        self._num_tokens = 0
        self.found: StopFound | None = None

    def push(self, ids: Sequence[int], ending_ids: frozenset[int]) -> tuple[str, Sequence[int]]:
        """Takes new tokens; also, first of all, those a resumed generation begins with.

        Args:
            ids: in order.
            ending_ids: tokens that end the generation; without `include_stop` they add no text.

        Returns:
            The text that is certain now, and those of the ids that belong to the answer: all, or
            those up to the one that completed a stop string.
        """
        if self._matcher is None:
            shown = ids
            if not (self._include_stop or ending_ids.isdisjoint(ids)):
                shown = [token_id for token_id in ids if token_id not in ending_ids]
            return self._detokenizer.push(shown), ids
        text = []
        taken = 0
        for token_id in ids:
            if self.found is not None:
                break
            taken += 1
            text.append(self._push_one(self._matcher, token_id, token_id in ending_ids))
        return "".join(text), ids[:taken]

    def finish(self, end: TokenEnd) -> tuple[str, TextEnd]:
        """Takes the scheduler's end.

        Returns:
            The text still held back, and the end as the caller is told it: after a stop string the
            reason and the number of completion tokens are ours, not the scheduler's.
        """
        text = "" if self.found is not None else self._flush()
        if self.found is None:
            return text, TextEnd(
                reason=end.reason,
                stop_string=None,
                stop_token_id=end.stop_token_id,
                usage=end.usage,
            )
        usage = Usage(
            prompt_tokens=end.usage.prompt_tokens,
            completion_tokens=self.found.kept_tokens,
            cached_tokens=end.usage.cached_tokens,
        )
        return text, TextEnd(
            reason=FinishReason.STOP,
            stop_string=self.found.stop,
            stop_token_id=None,
            usage=usage,
        )

    def _push_one(self, matcher: StopMatcher, token_id: int, is_ending: bool) -> str:
        self._num_tokens += 1
        adds_text = self._include_stop or not is_ending
        text = matcher.push(self._detokenizer.push((token_id,))) if adds_text else ""
        shows = adds_text and self._shows_special
        if not shows and matcher.watches_hidden and token_id in self._special:
            text += matcher.push_hidden(self._special[token_id])
        self._note(matcher)
        return text

    def _flush(self) -> str:
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        text = self._matcher.push(rest)
        self._note(self._matcher)
        return text if self.found is not None else text + self._matcher.flush()

    def _note(self, matcher: StopMatcher) -> None:
        if matcher.found is not None and self.found is None:
            self.found = StopFound(stop=matcher.found, kept_tokens=self._num_tokens)
