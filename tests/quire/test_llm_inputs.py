"""The forms in which prompts, conversations and parameters may be handed in."""

from typing import Any

import pytest

from quire import ChatMessage, SamplingParams
from quire.errors import InvalidRequest
from quire.llm_inputs import asks_of_chats, asks_of_prompts

USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", [("ab", None)]),
        ("", [("", None)]),
        ([1, 2], [(None, (1, 2))]),
        ((1,), [(None, (1,))]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([[1], "a", (2, 3)], [(None, (1,)), ("a", None), (None, (2, 3))]),
        ({"prompt": "a"}, [("a", None)]),
        ([{"prompt": "a"}, {"prompt_token_ids": [5]}], [("a", None), (None, (5,))]),
        ([], []),
    ],
)
def test_forms_of_prompts(prompts: Any, expected: Any) -> None:
    asks = asks_of_prompts(prompts, None)
    assert [(ask.prompt, ask.prompt_token_ids) for ask in asks] == expected
    assert len({ask.request_id for ask in asks}) == len(asks)


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        (None, "prompts"),
        (7, "prompts"),
        (b"ab", "prompts"),
        ({"a"}, "prompts"),
        ([1, "a"], "prompts[0]"),
        (["a", 1], "prompts[1]"),
        (["a", None], "prompts[1]"),
        ([[1], [True]], "prompts[1][0]"),
        ([[1, 2.5]], "prompts[0][1]"),
        ([{"prompt": "a", "prompt_token_ids": [1]}], "prompts[0]"),
        ([{}], "prompts[0]"),
        ({"prompt": "a", "multi_modal_data": 1}, "prompts[0].multi_modal_data"),
        (["a", {"prompt": 3}], "prompts[1]"),
    ],
)
def test_a_prompt_of_no_known_form_is_named(prompts: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asks_of_prompts(prompts, None)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("messages", "count"),
    [([USER], 1), ([ChatMessage(role="user", content="Hi"), USER], 1), ([[USER], [USER]], 2)],
)
def test_forms_of_conversations(messages: Any, count: int) -> None:
    asks = asks_of_chats(messages, None)
    assert [(ask.prompt, ask.prompt_token_ids) for ask in asks] == [(None, None)] * count


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("Hi", "messages"),
        (None, "messages"),
        (USER, "messages"),
        (["Hi"], "messages[0]"),
        ([[USER], USER], "messages[1]"),
        ([[USER], ["Hi"]], "messages[1]"),
    ],
)
def test_a_conversation_of_no_known_form_is_named(messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asks_of_chats(messages, None)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([SamplingParams()], "sampling_params: must be one for all .*: got 1 for 2 prompts"),
        ([], "got 0 for 2 prompts"),
        ({"top_k": 1}, "sampling_params: must be SamplingParams or a list of them, got dict"),
        ([None, 7], r"sampling_params\[1\]: must be SamplingParams, got int"),
    ],
)
def test_params_that_do_not_fit_are_named(params: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        asks_of_prompts(["a", "b"], params)


def test_errors_of_a_request_name_its_place() -> None:
    prompt = asks_of_prompts(["a", "b"], None)[1]
    (alone,) = asks_of_chats([USER], None)
    chat = asks_of_chats([[USER], [USER]], None)[1]
    cases = [
        (prompt, "prompt", "prompts[1]: x"),
        (prompt, "token_ids.packed[2]", "prompts[1]: token_ids.packed[2]: x"),
        (prompt, "stopping.max_tokens", "prompts[1]: stopping.max_tokens: x"),
        (prompt, "", "prompts[1]: x"),
        (alone, "messages[3].role", "messages[3].role: x"),
        (alone, "sampling.top_p", "messages: sampling.top_p: x"),
        (chat, "messages[3].role", "messages[1][3].role: x"),
        (chat, "messages", "messages[1]: x"),
    ]
    for ask, field, expected in cases:
        assert ask.placed(InvalidRequest(field, "x")).message == expected
    both = InvalidRequest("prompt", "x", ("sampling.top_p", "y"))
    assert prompt.placed(both).message == "prompts[1]: x; prompts[1]: sampling.top_p: y"
