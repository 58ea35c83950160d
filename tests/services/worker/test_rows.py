import dataclasses
import hashlib
import math

import numpy as np
import pytest

from services.worker.plan import Attachment, LinkProtocolError, NewRow, StepLimits, StepPlan
from services.worker.rows import RequestRows

LIMITS = StepLimits(
    block_size=4,
    num_blocks=16,
    max_num_seqs=3,
    max_num_batched_tokens=8,
    max_model_len=12,
    vocab_size=50,
    max_in_flight=2,
)
ATTACHMENT = Attachment(epoch=7, max_num_seqs=3, num_slots=9, check_block_tables=False)


def new_row(slot, tokens, **fields):
    defaults = {
        "prompt_len": len(tokens),
        "num_computed": 0,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 0,
        "traceparent": "",
    }
    return NewRow(slot=slot, token_ids=np.array(tokens, np.uint32), **(defaults | fields))


def plan(step_id, *, rows=(), new=(), released=(), epoch=7, digest=None, copies=()):
    """Each row is (slot, tokens to compute, block ids appended); each copy (from, to)."""
    return StepPlan(
        epoch=epoch,
        step_id=step_id,
        released_slots=np.array(released, np.int64),
        new_rows=tuple(new),
        slots=np.array([slot for slot, _, _ in rows], np.int64),
        num_tokens=np.array([count for _, count, _ in rows], np.int64),
        num_new_blocks=np.array([len(blocks) for _, _, blocks in rows], np.int64),
        new_block_ids=np.array([b for _, _, blocks in rows for b in blocks], np.int64),
        block_table_digest=digest,
        copied_from=np.array([source for source, _ in copies], np.int64),
        copied_to=np.array([target for _, target in copies], np.int64),
    )


@pytest.fixture
def rows():
    """Slot 2 holds five tokens in blocks 3 and 1, all computed, one sampled."""
    made = RequestRows(ATTACHMENT, LIMITS)
    made.apply(plan(1, new=[new_row(2, [1, 2, 3, 4, 5])], rows=[(2, 5, [3, 1])]))
    made.advance(np.array([2]), np.array([5]))
    made.append_tokens(np.array([2]), np.array([6]))
    return made


def test_a_new_row_holds_what_it_was_given():
    rows = RequestRows(ATTACHMENT, LIMITS)
    request = new_row(
        4,
        [9, 8, 7],
        prompt_len=2,
        num_computed=1,
        temperature=0.5,
        top_p=0.25,
        top_k=6,
        seed=2**64 - 1,
    )
    rows.apply(plan(1, new=[request], rows=[(4, 2, [5])]))
    assert rows.tokens[4, :3].tolist() == [9, 8, 7]
    assert (rows.known[4], rows.computed[4], rows.prompt_len[4]) == (3, 1, 2)
    assert (rows.temperature[4], rows.top_p[4], rows.top_k[4]) == (0.5, 0.25, 6)
    assert rows.seed[4] == 2**64 - 1
    assert rows.block_table[4].tolist() == [5, 0, 0]


def test_a_sampled_token_is_the_next_steps_input(rows):
    rows.apply(plan(2, rows=[(2, 1, [])]))
    assert rows.tokens[2, :6].tolist() == [1, 2, 3, 4, 5, 6]
    assert (rows.known[2], rows.computed[2]) == (6, 5)


def test_blocks_are_appended_behind_those_held(rows):
    rows.apply(plan(2, new=[new_row(0, [1])], rows=[(2, 1, [7]), (0, 1, [8])]))
    assert rows.block_table[2].tolist() == [3, 1, 7]
    assert rows.block_table[0].tolist() == [8, 0, 0]


def test_preemption_is_release_and_add_in_another_slot(rows):
    rows.apply(plan(2, released=[2]))
    assert rows.block_table[2].tolist() == [0, 0, 0]
    rows.apply(plan(3, new=[new_row(5, [1, 2, 3, 4, 5, 6], prompt_len=5)], rows=[(5, 6, [0, 2])]))
    rows.apply(plan(4, new=[new_row(2, [40])], rows=[(2, 1, [9])]))
    assert (rows.known[2], rows.computed[2]) == (1, 0)
    assert rows.block_table[2].tolist() == [9, 0, 0]


FULL = tuple(range(3))

VIOLATIONS = {
    "foreign epoch": (plan(2, epoch=6), "epoch: 6, this attachment is 7"),
    "gap": (plan(3), "step_id: 3, expected 2"),
    "repeated step": (plan(1), "step_id: 1, expected 2"),
    "released slot out of range": (plan(2, released=[9]), "released_slots: 9, slots are below 9"),
    "released slot not in use": (plan(2, released=[1]), "released_slots: slot 1 is not in use"),
    "released twice": (plan(2, released=[2, 2]), "slot 2 appears twice"),
    "row out of range": (plan(2, rows=[(9, 1, [])]), "slots: 9, slots are below 9"),
    "row not in use": (plan(2, rows=[(3, 1, [])]), "slots: slot 3 is not in use"),
    "row of a slot just released": (
        plan(2, released=[2], rows=[(2, 1, [])]),
        "slots: slot 2 is not in use",
    ),
    "row twice": (plan(2, rows=[(2, 1, []), (2, 1, [])]), "slots: slot 2 appears twice"),
    "too many rows": (
        plan(2, rows=[(slot, 1, []) for slot in range(4)]),
        "slots: 4 slots, at most 3",
    ),
    "new slot out of range": (
        plan(2, new=[new_row(9, [1])], rows=[(2, 1, [])]),
        r"new_requests\[slot 9\]: slots are below 9",
    ),
    "new slot in use": (
        plan(2, new=[new_row(2, [1])], rows=[(2, 1, [])]),
        r"new_requests\[slot 2\]: the slot is in use",
    ),
    "new slot twice": (
        plan(2, new=[new_row(1, [1]), new_row(1, [1])], rows=[(1, 1, [4])]),
        r"new_requests\[slot 1\]: the slot is in use",
    ),
    "new request without tokens": (
        plan(2, new=[new_row(1, [], prompt_len=0)], rows=[(1, 1, [4])]),
        "token_ids: 0 tokens, must be 1 to 12",
    ),
    "new request too long": (
        plan(2, new=[new_row(1, [1] * 13)], rows=[(1, 1, [4])]),
        "token_ids: 13 tokens, must be 1 to 12",
    ),
    "prompt longer than the tokens": (
        plan(2, new=[new_row(1, [1, 2], prompt_len=3)], rows=[(1, 1, [4])]),
        "prompt_len: 3, must be 1 to the 2",
    ),
    "no prompt": (
        plan(2, new=[new_row(1, [1, 2], prompt_len=0)], rows=[(1, 1, [4])]),
        "prompt_len: 0, must be 1 to the 2",
    ),
    "everything computed": (
        plan(2, new=[new_row(1, [1, 2], num_computed=2)], rows=[(1, 1, [4])]),
        "num_computed: 2, must leave one of 2",
    ),
    "new request without a row": (
        plan(2, new=[new_row(1, [1])], rows=[(2, 1, [])]),
        r"new_requests\[slot 1\]: a new request needs a row",
    ),
    "computed tokens without blocks": (
        plan(2, new=[new_row(1, [1] * 9, num_computed=8)], rows=[(1, 1, [4, 5])]),
        r"row 0 \(slot 1\): 1 tokens up to position 9, .* blocks for 8",
    ),
    "block out of range": (
        plan(2, rows=[(2, 1, [16])]),
        "new_block_ids: 16, block ids are below 16",
    ),
    "copy from out of range": (
        plan(2, rows=[(2, 1, [])], copies=[(16, 4)]),
        "copied_from: 16, block ids are below 16",
    ),
    "copy to out of range": (
        plan(2, rows=[(2, 1, [])], copies=[(4, 5), (4, 16)]),
        "copied_to: 16, block ids are below 16",
    ),
    "copied over twice": (
        plan(2, rows=[(2, 1, [])], copies=[(3, 5), (4, 5)]),
        "copied_to: block 5 appears twice",
    ),
    "copied from what is copied over": (
        plan(2, rows=[(2, 1, [])], copies=[(3, 5), (5, 6)]),
        "copied_to: block 5 is in copied_from too",
    ),
    "more blocks than a row holds": (
        plan(2, new=[new_row(1, [1])], rows=[(1, 1, [4]), (2, 1, [4, 5])]),
        r"row 1 \(slot 2\): 2 \+ 2 blocks, a row holds 3",
    ),
    "more tokens than known": (
        plan(2, rows=[(2, 2, [])]),
        r"row 0 \(slot 2\): 2 tokens up to position 7, it has 6 known",
    ),
    "no tokens": (plan(2, rows=[(2, 0, [])]), r"row 0 \(slot 2\): 0 tokens"),
    "too many tokens": (
        plan(
            2,
            new=[new_row(1, [1] * 8)],
            rows=[(1, 8, [4, 5]), (2, 1, [])],
        ),
        "num_tokens: 9 in all, at most 8",
    ),
    "sampling past the longest request": (
        plan(2, new=[new_row(1, [1] * 12, num_computed=8)], rows=[(1, 4, [4, 5, 6])]),
        "no room for a token past 12",
    ),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_a_violation_names_what_is_wrong(rows, case):
    bad, says = VIOLATIONS[case]
    with pytest.raises(LinkProtocolError, match=says):
        rows.apply(bad)


def test_a_row_may_end_exactly_at_the_longest_request():
    rows = RequestRows(ATTACHMENT, LIMITS)
    rows.apply(plan(1, new=[new_row(1, [1] * 11, num_computed=8)], rows=[(1, 3, [4, 5, 6])]))
    rows.advance(np.array([1]), np.array([3]))
    rows.append_tokens(np.array([1]), np.array([2]))
    assert rows.known[1] == 12


def test_steps_without_rows_are_legal(rows):
    rows.apply(plan(2))
    rows.apply(plan(3, released=[2]))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
    ],
)
def test_a_request_that_cannot_be_sampled_fails_alone(rows, fields, says):
    rows.apply(plan(2, new=[new_row(1, [1], **fields)], rows=[(1, 1, [4]), (2, 1, [])]))
    assert rows.usable(np.array([1, 2])).tolist() == [False, True]
    (failure,) = rows.failures(np.array([1, 2]))
    assert failure.slot == 1
    assert says in failure.message


def test_a_token_outside_the_vocabulary_fails_its_request_until_it_is_released(rows):
    rows.apply(plan(2, new=[new_row(1, [49, 50])], rows=[(1, 1, [4])]))
    (failure,) = rows.failures(np.array([2, 1]))
    assert failure.slot == 1
    assert "50, ids are below 50" in failure.message
    # The step planned before the failure was known: one token more than the row will ever have.
    rows.apply(plan(3, rows=[(1, 1, []), (2, 1, [])]))
    rows.apply(plan(4, released=[1]))
    rows.apply(plan(5, new=[new_row(1, [49])], rows=[(1, 1, [4])]))
    assert rows.failures(np.array([1])) == ()
    assert rows.usable(np.array([1])) is None


def test_digest_as_the_contract_defines_it():
    checked = dataclasses.replace(ATTACHMENT, check_block_tables=True)
    rows = RequestRows(checked, LIMITS)

    def digest(*numbers):
        packed = np.array(numbers, "<u4").tobytes()
        return int.from_bytes(hashlib.sha256(packed).digest()[:8], "little")

    rows.apply(
        plan(
            1,
            new=[new_row(6, [1] * 5), new_row(0, [1])],
            rows=[(6, 5, [3, 15]), (0, 1, [2])],
            digest=digest(0, 1, 2, 6, 2, 3, 15),
        )
    )
    rows.apply(plan(2, rows=[], digest=digest(0, 1, 2, 6, 2, 3, 15)))
    rows.apply(plan(3, released=[0], digest=digest(6, 2, 3, 15)))
    rows.apply(plan(4, released=[6], digest=digest()))
    with pytest.raises(LinkProtocolError, match="differ"):
        rows.apply(plan(5, digest=digest(6, 2, 3, 15)))
    with pytest.raises(LinkProtocolError, match="absent"):
        rows.apply(plan(6))
