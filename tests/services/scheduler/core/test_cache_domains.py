"""What the prefix cache may share and what not, and that nothing paid for is lost."""

import numpy as np
import pytest

from services.scheduler.core.config import Config
from services.scheduler.core.plan import AddRequest, Ended, EndReason, Events, Sampling, WorkerSpec
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.hashing import SHA256, explicit_salt, hashing_for, tenant_salt
from tests.fakes.kv_worker import KvWorker, expected_output

VOCAB = 1000
BLOCK = 4
SALT = tenant_salt("")
HASHES = {"sha256": SHA256, "blake2b": hashing_for("blake2b", bytes(32))}


class Cache:
    """A scheduler with one worker whose cache notices every wrong block; requests one by one."""

    def __init__(
        self, *, hashing: str = "sha256", num_blocks: int = 64, in_flight: int = 1, **config: object
    ) -> None:
        self.core = Scheduler(Config(check_block_tables=True, **config), HASHES[hashing])
        self._num_blocks = num_blocks
        self._in_flight = in_flight
        self._next = 0
        self.prompts: dict[int, list[int]] = {}
        self.output: dict[int, list[int]] = {}
        self.ends: dict[int, Ended] = {}
        self.attach(b"model")

    def attach(self, model_digest: bytes) -> None:
        spec = WorkerSpec(
            worker_id="w",
            num_blocks=self._num_blocks,
            block_size=BLOCK,
            max_num_seqs=4,
            max_num_batched_tokens=8,
            max_model_len=64,
            vocab_size=VOCAB,
            eos_token_ids=(),
            max_in_flight=self._in_flight,
            model_digest=model_digest,
        )
        lowered, epoch, events = self.core.attach(spec, 0)
        self.worker = KvWorker(lowered, epoch)
        self.take(events)

    def add(
        self, prompt: list[int], max_tokens: int = 3, *, salt: bytes = SALT, **fields: object
    ) -> int:
        self._next += 1
        handle = self._next
        self.prompts[handle], self.output[handle] = prompt, []
        request = AddRequest(
            request_id=str(handle),
            handle=handle,
            attempt=0,
            prompt=np.array(prompt, np.uint32),
            max_tokens=max_tokens,
            ignore_eos=True,
            sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0),
            salt=salt,
            **fields,
        )
        self.take(self.core.add(request, 0))
        return handle

    def take(self, events: Events) -> None:
        for handle, token in zip(events.handles.tolist(), events.token_ids.tolist(), strict=True):
            self.output[handle].append(token)
        for end in events.ended:
            self.ends[end.handle] = end

    def step(self) -> bool:
        plan = self.core.plan("w", 0)
        if plan is not None:
            self.worker.send(plan)
        if self.worker.unanswered == self._in_flight or (plan is None and self.worker.unanswered):
            self.take(self.core.apply("w", self.worker.step(), 0))
        self.core.check_invariants()
        return plan is not None or self.worker.unanswered > 0

    def drain(self) -> None:
        for _ in range(500):
            if not self.step():
                break
        for handle, prompt in self.prompts.items():
            wanted = expected_output(prompt, len(self.output[handle]), VOCAB)
            assert self.output[handle] == wanted

    def cached(self, prompt: list[int], max_tokens: int = 3, **fields: object) -> int:
        """Runs a request alone to its end; the prompt tokens it found in the cache."""
        handle = self.add(prompt, max_tokens, **fields)
        self.drain()
        return self.ends[handle].cached_tokens


def tokens(count: int, first: int = 100) -> list[int]:
    return list(range(first, first + count))


# B044: a prompt that is cached whole


@pytest.mark.parametrize("hashing", sorted(HASHES))
@pytest.mark.parametrize(("size", "cached"), [(7, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_at_least_the_last_token_is_computed_again(hashing: str, size: int, cached: int) -> None:
    cache = Cache(hashing=hashing)
    found = [cache.cached(tokens(size)) for _ in range(3)]
    assert found == [0, cached, cached]


def test_a_prompt_of_a_prompt_and_its_output_finds_all_full_blocks() -> None:
    cache = Cache()
    first = cache.add(tokens(8), 5)
    cache.drain()
    turn = tokens(8) + cache.output[first]
    # 13 tokens; the last of them was sampled and not computed.
    assert cache.cached(turn) == 12
    assert cache.cached(turn[:12]) == 8


# B104: what changes the values of keys and values stands in the key


def test_salts_share_nothing_with_others_and_all_with_themselves() -> None:
    cache = Cache()
    salts = [
        tenant_salt(""),
        tenant_salt("x"),
        explicit_salt("x"),
        explicit_salt(""),
        explicit_salt("tx"),
        tenant_salt("xs"),
    ]
    assert [cache.cached(tokens(9), salt=salt) for salt in salts] == [0] * len(salts)
    assert [cache.cached(tokens(9), salt=salt) for salt in salts] == [8] * len(salts)


def test_other_weights_under_the_same_name_share_nothing() -> None:
    cache = Cache()
    cache.cached(tokens(9))
    before = set(split(cache.core.cached_hashes()))
    cache.core.lost("w", 0)
    root = SHA256.root(b"model", SALT)
    stale = SHA256.block(root, np.array(tokens(4), "<u4").tobytes())
    assert stale in before
    # Hashed for the weights that are gone, queued until the others come.
    waiting = cache.add(tokens(9), prompt_hashes=stale)
    cache.attach(b"model, other weights")
    cache.drain()
    assert cache.ends[waiting].cached_tokens == 0
    after = set(split(cache.core.cached_hashes()))
    assert after
    assert not before & after
    assert cache.cached(tokens(9)) == 8


# B106: a block is found only once its tokens are final


def test_what_was_computed_beyond_a_stop_is_not_found() -> None:
    prompt = [5] * 15
    (stop,) = expected_output(prompt, 1, VOCAB)
    cache = Cache(in_flight=2)
    ended = cache.add(prompt, 10, stop_token_ids=(stop,))
    cache.drain()
    assert cache.ends[ended].reason is EndReason.STOP
    # A second step had the stop token computed, which would have filled the fourth block.
    assert len(split(cache.core.cached_hashes())) == 3
    assert cache.cached([*prompt, 6, 7]) == 12
    assert cache.cached([*prompt, stop, 7]) == 12


def test_hits_are_those_of_the_moment_of_admission() -> None:
    cache = Cache(num_blocks=8, max_num_seqs=1)
    assert cache.cached(tokens(9)) == 0
    # While the second waits, its prefix is evicted by the one that runs.
    running = cache.add(tokens(20, first=300), 12)
    waiting = cache.add(tokens(9))
    cache.drain()
    assert len(cache.output[running]) == 12
    assert cache.ends[waiting].cached_tokens == 0
    assert cache.cached(tokens(9)) == 8


def test_preempted_requests_register_what_they_were_given() -> None:
    cache = Cache(num_blocks=8)
    for first in (100, 200, 300):
        cache.add(tokens(6, first=first), 14)
    cache.drain()
    assert cache.core.loads().counters.preemptions > 0
    assert [len(output) for output in cache.output.values()] == [14] * 3
    last = list(cache.ends)[-1]
    # Its 19 computed tokens; the worker's cache looks whether they are what is found.
    assert cache.cached(cache.prompts[last] + cache.output[last]) == 16


# B109: giving up does not throw away what was computed


def test_a_prompt_given_up_goes_on_where_it_was() -> None:
    cache = Cache(prefill_chunk_size=6)
    given_up = cache.add(tokens(40))
    for _ in range(5):
        cache.step()
    cache.take(cache.core.abort(given_up, 0))
    cache.drain()
    assert cache.ends[given_up].reason is EndReason.ABORT
    assert cache.cached([*tokens(40), 1, 2, 3]) == 28


def test_a_client_more_impatient_than_the_prefill_gets_there() -> None:
    cache = Cache(prefill_chunk_size=6)
    for _ in range(8):
        handle = cache.add(tokens(40))
        cache.step()
        cache.step()
        if cache.output[handle]:
            break
        cache.take(cache.core.abort(handle, 0))
        cache.drain()
    # 12, 24, 36 tokens were there when the second, third and fourth attempt began.
    assert handle == 4
    assert cache.output[handle]


def split(digests: bytes) -> list[bytes]:
    return [digests[at : at + 32] for at in range(0, len(digests), 32)]
