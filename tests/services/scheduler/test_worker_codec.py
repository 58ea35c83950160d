"""Steps as messages."""

import numpy as np
import pytest

from services.scheduler.core.plan import NewRow, Sampling, StepPlan, TokenArray
from services.scheduler.worker_codec import step_message

NOTHING = np.empty(0, np.int64)
COLUMN = np.frombuffer(np.arange(70_000, 70_008, dtype="<u4").tobytes(), "<u4")


def step(token_ids: TokenArray) -> StepPlan:
    row = NewRow(
        slot=3,
        handle=1,
        token_ids=token_ids,
        prompt_len=token_ids.size,
        num_computed=0,
        sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0),
        traceparent="",
    )
    return StepPlan(
        epoch=1,
        step_id=1,
        released_slots=NOTHING,
        new_rows=(row,),
        slots=np.array([3]),
        num_tokens=np.array([1]),
        num_new_blocks=np.array([1]),
        new_block_ids=np.array([0]),
        copied_from=NOTHING,
        copied_to=NOTHING,
        block_table_digest=None,
    )


@pytest.mark.parametrize(
    "token_ids",
    [
        COLUMN,
        COLUMN[:5],
        COLUMN[2:],
        COLUMN[::2],
        COLUMN[::-1],
        COLUMN[:0],
        COLUMN.copy(),
        COLUMN.astype(">u4"),
        np.frombuffer(np.arange(8, dtype=">u4").tobytes(), ">u4"),
    ],
    ids=["whole", "head", "tail", "strided", "reversed", "empty", "owned", "swapped", "big-endian"],
)
def test_the_tokens_of_a_new_row_are_told_whatever_their_layout(token_ids: TokenArray) -> None:
    sent = step_message(step(token_ids)).step.new_requests[0].token_ids
    assert sent == b"".join(int(token).to_bytes(4, "little") for token in token_ids)
