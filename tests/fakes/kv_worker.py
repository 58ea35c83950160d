"""A worker without a model that notices every wrong block table.

Its KV cache remembers, for each place in each block, which history of tokens was written there.
Before a token is "computed", the whole history of its row must stand in the row's blocks; the next
token is a pure function of that history. So a schedule is right exactly if every request's output
equals `expected_output`, whatever was batched, cached, preempted or requeued.
"""

import hashlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from services.scheduler.core.plan import RowFailure, StepPlan, StepResult, WorkerSpec


def next_token(history: bytes, vocab_size: int) -> int:
    digest = hashlib.sha256(history).digest()
    return int.from_bytes(digest[:4], "little") % vocab_size


def extend(history: bytes, token: int) -> bytes:
    return hashlib.sha256(history + int(token).to_bytes(4, "little")).digest()


def expected_output(
    prompt: list[int], max_tokens: int, vocab_size: int, eos: tuple[int, ...] = ()
) -> list[int]:
    """What a request must give, and nothing else."""
    history = b""
    for token in prompt:
        history = extend(history, token)
    output: list[int] = []
    while len(output) < max_tokens:
        token = next_token(history, vocab_size)
        output.append(token)
        if token in eos:
            break
        history = extend(history, token)
    return output


@dataclass
class _Row:
    tokens: list[int]
    computed: int
    blocks: list[int] = field(default_factory=list)


class KvWorker:
    """Executes plans in order; `step()` answers the oldest unanswered one."""

    def __init__(self, spec: WorkerSpec, epoch: int) -> None:
        self.spec = spec
        self._epoch = epoch
        self._kv: dict[tuple[int, int], bytes] = {}
        self._rows: dict[int, _Row] = {}
        self._plans: deque[StepPlan] = deque()
        self._last_step = 0
        self.failing_slots: set[int] = set()
        self.sent: list[StepPlan] = []

    @property
    def unanswered(self) -> int:
        return len(self._plans)

    def send(self, plan: StepPlan) -> None:
        assert plan.epoch == self._epoch
        assert plan.step_id == self._last_step + 1
        self._last_step = plan.step_id
        assert len(self._plans) < self.spec.max_in_flight
        assert int(plan.num_tokens.sum()) <= self.spec.max_num_batched_tokens
        assert plan.slots.size <= self.spec.max_num_seqs
        assert np.unique(plan.slots).size == plan.slots.size
        assert (plan.num_tokens >= 1).all()
        self._plans.append(plan)
        self.sent.append(plan)

    def step(self) -> StepResult:
        plan = self._plans.popleft()
        for slot in plan.released_slots.tolist():
            del self._rows[slot]
        for new in plan.new_rows:
            assert new.slot not in self._rows
            assert 0 <= new.slot < self.spec.num_slots
            self._rows[new.slot] = _Row(new.token_ids.tolist(), new.num_computed)
        starts = np.cumsum(plan.num_new_blocks) - plan.num_new_blocks
        for slot, start, count in zip(
            plan.slots.tolist(), starts.tolist(), plan.num_new_blocks.tolist(), strict=True
        ):
            ids = plan.new_block_ids[start : start + count].tolist()
            assert all(0 <= block < self.spec.num_blocks for block in ids)
            self._rows[slot].blocks += ids
        self._check_digest(plan)
        self._copy(plan)
        counts, tokens, failures = [], [], []
        for slot, chunk in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True):
            token = self._compute(self._rows[slot], chunk)
            if slot in self.failing_slots:
                failures.append(RowFailure(slot=slot, message="not finite"))
                token = None
            counts.append(token is not None)
            if token is not None:
                tokens.append(token)
        return StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            counts=np.array(counts, np.uint8),
            token_ids=np.array(tokens, np.uint32),
            failures=tuple(failures),
        )

    def _copy(self, plan: StepPlan) -> None:
        """Copies whole blocks; all are read before any is written, as on a real worker."""
        sources, targets = plan.copied_from.tolist(), plan.copied_to.tolist()
        assert len(set(targets)) == len(targets) == len(sources)
        assert not set(targets) & set(sources)
        assert set(targets) <= set(plan.new_block_ids.tolist()), "a copy over a block in use"
        places = range(self.spec.block_size)
        read = [[self._kv.get((source, place)) for place in places] for source in sources]
        for target, histories in zip(targets, read, strict=True):
            for place, history in enumerate(histories):
                self._kv.pop((target, place), None)
                if history is not None:
                    self._kv[target, place] = history

    def _compute(self, row: _Row, chunk: int) -> int | None:
        size = self.spec.block_size
        history = b""
        for position, token in enumerate(row.tokens[: row.computed]):
            history = extend(history, token)
            place = (row.blocks[position // size], position % size)
            assert self._kv.get(place) == history, "the KV cache does not hold this row's history"
        assert row.computed + chunk <= len(row.tokens), "more tokens planned than known"
        for position in range(row.computed, row.computed + chunk):
            history = extend(history, row.tokens[position])
            self._kv[row.blocks[position // size], position % size] = history
        row.computed += chunk
        if row.computed < len(row.tokens):
            return None
        token = next_token(history, self.spec.vocab_size)
        row.tokens.append(token)
        return token

    def _check_digest(self, plan: StepPlan) -> None:
        assert plan.block_table_digest is not None
        digest = hashlib.sha256()
        for slot, row in sorted(self._rows.items()):
            digest.update(np.array([slot, len(row.blocks), *row.blocks], "<u4").tobytes())
        assert plan.block_table_digest == int.from_bytes(digest.digest()[:8], "little")
