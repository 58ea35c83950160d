"""What is remembered of sessions' last turns."""

import numpy as np

from services.scheduler.session_chains import SessionChains, SessionKey

KEY = SessionKey("s", b"root", 4)


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint32)


def digests(blocks: int, fill: int = 1) -> bytes:
    return b"".join(bytes([fill + block]) * 32 for block in range(blocks))


def test_a_next_turn_reuses_the_blocks_it_shares() -> None:
    chains = SessionChains()
    chains.remember(KEY, np.arange(10, dtype=np.uint32), digests(2))
    assert chains.leading(KEY, np.arange(50, dtype=np.uint32)) == digests(2)


def test_only_equal_tokens_count() -> None:
    chains = SessionChains()
    chains.remember(KEY, np.arange(12, dtype=np.uint32), digests(3))
    edited = np.arange(12, dtype=np.uint32)
    edited[7] = 99
    assert chains.leading(KEY, edited) == digests(1)
    assert chains.leading(KEY, tokens(5, 1, 2, 3)) == b""


def test_a_shorter_prompt_gets_its_own_full_blocks_only() -> None:
    chains = SessionChains()
    chains.remember(KEY, np.arange(12, dtype=np.uint32), digests(3))
    assert chains.leading(KEY, np.arange(11, dtype=np.uint32)) == digests(2)
    assert chains.leading(KEY, tokens(0)) == b""


def test_the_last_turn_takes_the_place_of_the_one_before() -> None:
    chains = SessionChains()
    chains.remember(KEY, np.arange(12, dtype=np.uint32), digests(3))
    chains.remember(KEY, np.arange(100, 104, dtype=np.uint32), digests(1, fill=9))
    assert chains.leading(KEY, np.arange(12, dtype=np.uint32)) == b""
    assert chains.leading(KEY, np.arange(100, 108, dtype=np.uint32)) == digests(1, fill=9)
    assert len(chains) == 1


def test_sessions_models_salts_and_block_sizes_share_nothing() -> None:
    chains = SessionChains()
    prompt = np.arange(12, dtype=np.uint32)
    chains.remember(KEY, prompt, digests(3))
    for other in (
        SessionKey("t", b"root", 4),
        SessionKey("s", b"other root", 4),
        SessionKey("s", b"root", 2),
    ):
        assert chains.leading(other, prompt) == b""


def test_least_recently_used_sessions_are_given_up() -> None:
    chains = SessionChains(max_sessions=2)
    prompt = np.arange(4, dtype=np.uint32)
    first, second, third = (SessionKey(name, b"root", 4) for name in "abc")
    chains.remember(first, prompt, digests(1))
    chains.remember(second, prompt, digests(1))
    assert chains.leading(first, prompt)  # used
    chains.remember(third, prompt, digests(1))
    assert chains.leading(first, prompt)
    assert not chains.leading(second, prompt)
    assert chains.leading(third, prompt)


def test_bytes_are_bounded_and_counted_back() -> None:
    prompt = np.arange(1000, dtype=np.uint32)
    one = SessionChains()
    one.remember(KEY, prompt, digests(250, fill=0))
    each = one.num_bytes
    assert each >= 4 * 1000 + 32 * 250
    chains = SessionChains(max_bytes=3 * each)
    for turn in range(10):
        chains.remember(SessionKey(str(turn % 5), b"root", 4), prompt, digests(250, fill=0))
        assert chains.num_bytes == len(chains) * each <= 3 * each
    assert len(chains) == 3


def test_a_turn_above_the_bound_is_not_kept_and_drops_no_other() -> None:
    chains = SessionChains(max_bytes=2000)
    small, other = np.arange(4, dtype=np.uint32), SessionKey("t", b"root", 4)
    chains.remember(KEY, small, digests(1))
    chains.remember(other, small, digests(1))
    chains.remember(other, np.arange(4000, dtype=np.uint32), b"")
    assert len(chains) == 1
    assert chains.leading(KEY, small) == digests(1)
    assert chains.leading(other, small) == b""
