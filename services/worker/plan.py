"""The worker's own types of the step link: what it registers, executes and answers.

Every value is frozen and complete. Knows neither protobuf nor torch.
"""

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]
"""One number per row (or released slot, or block), int64 [n]."""


class LinkProtocolError(Exception):
    """The scheduler sent what the contract of the step link forbids; the link must end.

    The message names the step's field and the limit.
    """


class DeviceLost(Exception):
    """The device cannot be used any more by this process; only a new process can go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What bounds every step this worker executes."""

    block_size: int
    """Tokens per KV block."""
    num_blocks: int
    """KV blocks in the pool; block ids are below it."""
    max_num_seqs: int
    """Most rows in one step."""
    max_num_batched_tokens: int
    """Most tokens in one step."""
    max_model_len: int
    """Longest prompt + output of one request, in tokens."""
    vocab_size: int
    """Token ids are below it."""
    max_in_flight: int
    """Most steps received and not answered."""

    @property
    def max_blocks_per_row(self) -> int:
        """KV blocks that hold `max_model_len` tokens."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What the worker says about itself when it attaches."""

    worker_id: str
    instance_id: str
    model: str
    model_digest: str
    dtype: str
    device: str
    limits: StepLimits
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """The scheduler's answer: the terms of one attachment."""

    epoch: int
    max_num_seqs: int
    """Most rows in one step, at most what was registered."""
    num_slots: int
    """Slots are below it."""
    check_block_tables: bool
    """Every step carries a digest of the block tables, to be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The scheduler ends the link in order."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A request the worker does not hold yet."""

    slot: int
    token_ids: npt.NDArray[np.uint32]
    """Prompt and output so far, uint32 [n], n >= 1."""
    prompt_len: int
    """How many of `token_ids` are the prompt."""
    num_computed: int
    """Leading tokens whose keys and values are in the row's first blocks already."""
    temperature: float
    top_p: float
    top_k: int
    seed: int
    """Key of the request's random numbers, below 2**64."""
    traceparent: str
    """W3C context of the scheduler's span of the request; "" where no spans of it are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One batch. Applied in this order: released slots, new rows, blocks, copies, forward."""

    epoch: int
    step_id: int
    released_slots: Column
    """[released]"""
    new_rows: tuple[NewRow, ...]
    slots: Column
    """[rows]"""
    num_tokens: Column
    """[rows], tokens to compute, >= 1; a row that reaches its last known token samples one."""
    num_new_blocks: Column
    """[rows], KV blocks appended to the row's table."""
    new_block_ids: Column
    """[sum of num_new_blocks], rows back to back."""
    block_table_digest: int | None
    """Digest of all block tables after the appends, where the attachment asks for it."""
    copied_from: Column = field(default_factory=lambda: np.zeros(0, np.int64))
    """[copies], blocks to copy before the forward."""
    copied_to: Column = field(default_factory=lambda: np.zeros(0, np.int64))
    """[copies], where to; all different, none of them copied from."""
    traceparent: str = ""
    """W3C context of the scheduler's span of this step; "" where no spans of it are kept."""


class FailureKind(enum.Enum):
    """What made one request impossible to compute."""

    BAD_REQUEST = "bad_request"
    """It came with a number that is out of range."""
    NOT_FINITE = "not_finite"
    """The model gave logits that are no numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFailure:
    """One request could not be computed; the step went on without it."""

    slot: int
    kind: FailureKind
    message: str
    """Says what failed, without text or ids of the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPhases:
    """Parts of the execution of one step, microseconds; what is left is bookkeeping of rows."""

    batch_us: int
    """Checks, copies of blocks, and gathering the batch."""
    forward_us: int
    """The model."""
    sample_us: int
    """From logits to tokens on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gave, rows in the order of its plan."""

    epoch: int
    step_id: int
    counts: npt.NDArray[np.uint8]
    """[rows], tokens sampled."""
    token_ids: npt.NDArray[np.uint32]
    """[sum of counts], rows back to back."""
    failures: tuple[SlotFailure, ...]
    phases: StepPhases | None = None
    """Where the step is traced, and only there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    """Times of one step, microseconds."""

    wait_us: int
    """From receipt to the start of execution."""
    execute_us: int
    """From the start of execution to the last sampled token."""
    idle_us: int
    """From the end of the step before (or the attachment) to the start of this one."""
