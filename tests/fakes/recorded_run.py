"""A random run of the core with all that can befall it, recorded: losses, failures, lies, aborts,
deadlines, changed configurations, pins. The workers check every block table.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from services.scheduler import journal_codec
from services.scheduler.core.config import Config, Policy
from services.scheduler.core.plan import (
    AddRequest,
    Events,
    LinkFault,
    Pin,
    Refused,
    Sampling,
    WorkerSpec,
)
from services.scheduler.hashing import SHA256
from services.scheduler.journal import Journal
from services.scheduler.recording import RecordingScheduler
from tests.fakes.kv_worker import KvWorker

VOCAB = 977
EOS = (5, 900)
STOPS = ((), (), (), (331,), (7, 11, 902), (5,), tuple(range(0, 900, 3)))
START = 1_000_000

CONFIG = Config(
    check_block_tables=True,
    prefill_chunk_size=6,
    worker_grace_us=50_000,
    max_num_seqs=4,
    tpot_target_us=5_000,
    max_queued_requests=40,
)


def worker_spec(worker_id: str, num_blocks: int = 24) -> WorkerSpec:
    return WorkerSpec(
        worker_id=worker_id,
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_model_len=64,
        vocab_size=VOCAB,
        eos_token_ids=EOS,
        max_in_flight=2,
        model_digest=b"model",
    )


def open_journal(
    path: Path, config: Config = CONFIG, *, hash_only: bool = False, **options: int
) -> Journal:
    header = journal_codec.header(
        config=config,
        prefix_hash=SHA256.name,
        hash_key=b"",
        hash_only=hash_only,
        clocks=(1_700_000_000_000_000, START),
    )
    return Journal(path, header, **options)


class RecordedRun:
    """Drives a recorded core.

    Args:
        path: of the journal.
        seed: of all choices.
        hash_only: token ids are left out.
    """

    def __init__(self, path: Path, seed: int, *, hash_only: bool = False) -> None:
        self.random = random.Random(seed)
        self.journal = open_journal(path, hash_only=hash_only)
        self.core = RecordingScheduler(CONFIG, SHA256, self.journal, hash_only=hash_only)
        self.now = START
        self.workers: dict[str, KvWorker] = {}
        self.live: list[int] = []
        self.handles = 0
        self.added: list[AddRequest] = []
        self.events: list[tuple[int, Events]] = []
        self.seen: dict[str, int] = {}
        self.sampled: set[int] = set()

    def close(self) -> None:
        self.core.finish_recording()
        self.journal.close()

    def run(self, inputs: int) -> None:
        acts: list[tuple[int, Callable[[], None]]] = [
            (10, self.add),
            (2, self.abort),
            (2, self.finish),
            (2, self.attach),
            (1, self.lose),
            (1, self.configure),
            (1, self.pin),
            (1, self.flush),
            (30, self.plan),
            (30, self.answer),
            (1, self.lie),
            (8, self.expire),
        ]
        weights = [weight for weight, _ in acts]
        for number in range(inputs):
            self.now += self.random.choice((0, 10, 700, 3_000))
            (act,) = self.random.choices([act for _, act in acts], weights)
            act()
            if number % 25 == 0:
                self.core.check_invariants()

    def add(self) -> None:
        draw = self.random
        shared = [i % VOCAB for i in range(100, 100 + draw.choice((0, 8, 17, 30)))]
        own = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))]
        if draw.random() < 0.02:
            own[0] = VOCAB + 3
        self.handles += 1
        request = AddRequest(
            request_id=f"r{self.handles if draw.random() < 0.9 else draw.randint(1, self.handles)}",
            handle=self.handles,
            attempt=draw.randint(0, 2),
            prompt=np.array(shared + own, np.uint32),
            resumed=np.array(draw.choice(((), (), (), (17, 5), (8, 331))), np.uint32),
            max_tokens=draw.choice((None, 1, 5, 12, 20)),
            ignore_eos=draw.random() < 0.3,
            stop_token_ids=draw.choice(STOPS),
            sampling=Sampling(temperature=0.5, top_p=0.9, top_k=3, seed=draw.getrandbits(63)),
            traceparent=draw.choice(
                ("", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
            ),
            salt=draw.choice((b"t", b"ssecret-salt")),
            read_prefix_cache=draw.random() < 0.9,
            priority_class=draw.choice(("", "interactive", "batch")),
            tenant=draw.choice(("", "a", "b")),
            deadline=self.now + 30_000 if draw.random() < 0.2 else None,
            ttft_target_us=draw.choice((None, 4_000)),
            tpot_target_us=draw.choice((None, 2_000)),
            shed_late=draw.random() < 0.2,
        )
        self.added.append(request)
        try:
            events = self.core.add(request, self.now)
        except Refused:
            self._count("refused")
            return
        self.live.append(request.handle)
        self._take(events)

    def abort(self) -> None:
        if self.live:
            self._take(self.core.abort(self.random.choice(self.live), self.now))

    def finish(self) -> None:
        if self.live:
            handle = self.random.choice(self.live)
            self._take(self.core.finish(handle, self.random.randint(0, 5), self.now))

    def attach(self) -> None:
        worker_id = self.random.choice(("left", "right"))
        if worker_id in self.workers:
            return
        announced = worker_spec(worker_id, self.random.choice((16, 24, 40)))
        spec, epoch, events = self.core.attach(announced, self.now)
        self.workers[worker_id] = KvWorker(spec, epoch)
        self._take(events)

    def lose(self) -> None:
        if self.workers:
            worker_id = self.random.choice(sorted(self.workers))
            self._count("lost with open steps" if self.workers[worker_id].unanswered else "lost")
            del self.workers[worker_id]
            self.core.lost(worker_id, self.now)

    def configure(self) -> None:
        self._count("configured")
        config = replace(
            CONFIG,
            policy=self.random.choice(list(Policy)),
            prefill_chunk_size=self.random.choice((3, 6, 16)),
        )
        self._take(self.core.configure(config, self.now))

    def pin(self) -> None:
        if self.random.random() < 0.5:
            self.core.unpin("p", self.now)
        elif self.workers:
            try:
                self.core.pin(Pin(name="p", hashes=bytes(32), expires=self.now + 9_000), self.now)
            except Refused:
                self._count("refused pin")

    def flush(self) -> None:
        if self.core.flush(self.now):
            self._count("flushed")

    def plan(self) -> None:
        for worker_id, worker in self.workers.items():
            if (step := self.core.plan(worker_id, self.now)) is not None:
                worker.send(step)

    def answer(self) -> None:
        for worker_id, worker in list(self.workers.items()):
            if not worker.unanswered:
                continue
            if self.random.random() < 0.03:
                self._count("failed")
                worker.failing_slots = {self.random.randrange(worker.spec.num_slots)}
            result = replace(worker.step(), execute_us=self.random.randint(500, 4_000))
            worker.failing_slots = set()
            self.sampled.update(result.token_ids.tolist())
            self._take(self.core.apply(worker_id, result, self.now))

    def lie(self) -> None:
        """A worker answers what nobody asked; it is let go."""
        for worker_id, worker in list(self.workers.items()):
            if not worker.unanswered:
                continue
            honest = worker.step()
            lie = self.random.choice(
                (
                    replace(honest, step_id=honest.step_id + 1),
                    replace(honest, token_ids=np.append(honest.token_ids, np.uint32(3))),
                    replace(
                        honest,
                        counts=np.ones(3, np.uint8),
                        token_ids=np.array([1, VOCAB + 9, 2], np.uint32),
                    ),
                )
            )
            try:
                self._take(self.core.apply(worker_id, lie, self.now))
            except LinkFault:
                self._count("lied")
                del self.workers[worker_id]
                self.core.lost(worker_id, self.now)

    def expire(self) -> None:
        self._take(self.core.expire(self.now))

    def _take(self, events: Events) -> None:
        self.events.append((self.now, events))
        for end in events.ended:
            self._count(end.reason.value)
            self.live.remove(end.handle)

    def _count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1
