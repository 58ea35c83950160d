"""Whoever reads the log knows at any time what is cached, and of what tokens."""

from pathlib import Path

import pytest

from services.scheduler.core.cache_log import CacheLog, Stored
from services.scheduler.hashing import SHA256
from tests.fakes.recorded_run import RecordedRun


class Reader:
    """Keeps a set of digests by the notes."""

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        self.told: set[bytes] = set()
        self.log = CacheLog(self.told)
        run.core.watch_cache(self.log)

    def read(self) -> None:
        for note in self.log.notes:
            digests = split(note.digests)
            if isinstance(note, Stored):
                parent = note.parent or SHA256.root(b"model", note.salt)
                for digest, tokens in zip(digests, note.tokens, strict=True):
                    parent = SHA256.block(parent, tokens.astype("<u4").tobytes())
                    assert parent == digest, "tokens or parent are others'"
            # Of another worker it may be cached still, and by now again.
            self.told -= set(digests)
            self.told |= {one for one in digests if self._run.core.cached_blocks(one)}
        self.log.notes.clear()


def split(digests: bytes) -> list[bytes]:
    return [digests[at : at + 32] for at in range(0, len(digests), 32)]


@pytest.mark.parametrize("seed", range(3))
def test_the_notes_of_a_run_with_faults(tmp_path: Path, seed: int) -> None:
    run = RecordedRun(tmp_path / "j", seed)
    reader = Reader(run)
    most = 0
    for _ in range(1200):
        run.run(1)
        reader.read()
        assert reader.told == set(split(run.core.cached_hashes()))
        most = max(most, len(reader.told))
    run.close()
    assert most > 10
    assert run.seen["lost with open steps"] + run.seen["lost"] > 1
    assert run.seen["flushed"] > 0


def test_a_log_that_begins_late_tells_of_who_runs_and_of_what_is_used_again(
    tmp_path: Path,
) -> None:
    run = RecordedRun(tmp_path / "j", 5)
    while len(run.core.cached_hashes()) < 4 * 32:
        run.run(1)
    reader = Reader(run)
    assert not reader.log.complete
    reader.read()
    most = 0
    for _ in range(900):
        run.run(1)
        reader.read()
        assert reader.told <= set(split(run.core.cached_hashes()))
        most = max(most, len(reader.told))
    assert most > 4
    run.core.watch_cache(None)
    run.run(100)
    assert reader.log.notes == []
    run.close()
