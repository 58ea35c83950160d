"""A cut answer loses no text: what was given out hangs on the tokens alone, not on their pieces."""

import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from services.tokenizer.detokenizer import Detokenization
from services.tokenizer.domain import FinishReason, TokenEnd, Usage
from services.tokenizer.generation import TextGeneration, make_matcher
from tests.assets.tokenizers import byte_level, sentencepiece_like

EOS = frozenset({2})
STOPS = ["alpha beta gamma", "ury.inj", "é!!", "<end_turn>x", "\ufffd\ufffd\ufffd\ufffd"]
END = TokenEnd(
    reason=FinishReason.LENGTH,
    stop_token_id=None,
    usage=Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0),
)


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
@pytest.mark.parametrize("stops", [[], STOPS])
@pytest.mark.parametrize("skip", [True, False])
def test_text_before_a_cut_and_after_it_is_the_whole(
    make: Callable[[], Tokenizer], stops: list[str], skip: bool
) -> None:
    tokenizer = make()
    detokenization = Detokenization(tokenizer)
    special = detokenization.special

    def start() -> TextGeneration:
        return TextGeneration(
            detokenization.start(skip_special_tokens=skip),
            make_matcher(stops, special, include_stop=False),
            special,
            shows_special=not skip,
        )

    choice = random.Random(7)
    for _ in range(40):
        tokens = [choice.randrange(tokenizer.get_vocab_size()) for _ in range(60)]
        whole = start()
        expected = whole.push(tokens, EOS)[0] + whole.finish(END)[0]
        cut = choice.randrange(len(tokens) + 1)
        before = start()
        sent, kept = "", []
        while len(kept) < cut and before.found is None:
            size = choice.randint(1, cut - len(kept))
            text, ids = before.push(tokens[len(kept) : len(kept) + size], EOS)
            sent += text
            kept += ids
        after = start()
        assert after.push(kept, EOS)[0] == sent
        rest = after.push(tokens[len(kept) :], EOS)[0] if after.found is None else ""
        assert sent + rest + after.finish(END)[0] == expected
