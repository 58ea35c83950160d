"""Which block has which content: an open-addressing hash table over digests, batched by numpy.

Owns the mapping digest -> block and nothing else. The table has buckets of four lanes of 8 bytes;
a lane is a 32-bit tag and the block it stands for. A digest's home is the bucket named by the
highest bits of its first 8 bytes, its tag are the lowest 32 bits of these; what counts is the
comparison of all 32 bytes, so forged tags cost time and never give a wrong block.

A digest whose home is full goes to the next bucket with a free lane, and every bucket it passes
counts it. A look-up goes on to the next bucket only where something passed, and a deletion takes
its counts back: there are no tombstones, and nothing is left of what was deleted. With at most 3
digests per 4 buckets fewer than one digest in 500 is away from home (Poisson), so a look-up reads
one bucket, whatever the size of the pool and the age of the process. Only forged digests fill
_FARTHEST buckets in a row; what would have to go farther is not taken in.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from services.scheduler.core.chain import DIGEST_BYTES
from services.scheduler.core.plan import IntArray, Mask

Digests = npt.NDArray[np.uint64]
"""uint64 [n, 4], digests read as little-endian numbers."""

_LANES = 4
_LANE_BITS = 2
_FULL = (1 << _LANES) - 1
_PASSED = 1 << _LANES
_BLOCK = 0xFFFFFFFF
_BLOCK_BITS = 32
_SINGLY = 5
"""Up to so many are faster one at a time than as a batch."""
_FEW = 32
"""Up to so many are likely to have different homes, which need not be sorted to be seen."""
_FARTHEST = 64
_PLACE_BITS = 16
_MOST_AT_ONCE = 1 << _PLACE_BITS
_UNUSED = -1

# [`_in_use` of a bucket, rank] -> the lane of that rank among the free ones, or _LANES.
_FREE_LANE = np.array(
    [
        [*(lane for lane in range(_LANES) if not bits >> lane & 1), *([_LANES] * 5)][: _LANES + 1]
        for bits in range(2 * _PASSED)
    ],
    np.int64,
)
_FREE_LANE.flags.writeable = False
_FIRST_FREE_LANE = _FREE_LANE[:, 0].copy()
_FIRST_FREE_LANE.flags.writeable = False
_BIT = (1 << np.arange(_LANES)).astype(np.uint8)
_BIT.flags.writeable = False


def _number(value: int) -> npt.NDArray[np.uint64]:
    """For use with columns: a Python number costs twice the time of an array of no dimension."""
    number = np.array(value, np.uint64)
    number.flags.writeable = False
    return number


_BLOCK_PART, _BLOCK_SHIFT = _number(_BLOCK), _number(_BLOCK_BITS)
_PLACE_PART, _STEM_PART = _number(_MOST_AT_ONCE - 1), _number(2**64 - _MOST_AT_ONCE)


def as_digests(digests: bytes) -> Digests:
    """Digests back to back as numbers, without a copy."""
    return np.frombuffer(digests, "<u8").reshape(-1, DIGEST_BYTES // 8)


class PrefixIndex:
    """Digests of the blocks that can be found; each digest at most once.

    Args:
        num_blocks: ids are below this.
    """

    def __init__(self, num_blocks: int) -> None:
        bits = max(1, (-(-4 * num_blocks // 3) - 1).bit_length())
        self._shift = 64 - bits
        self._home_shift = _number(self._shift)
        self._num_buckets = 1 << bits
        # Zeros come from untouched pages. Blocks are kept as id + 1, so that zero means none.
        self._table: npt.NDArray[np.uint64] = np.zeros((self._num_buckets, _LANES), "<u8")
        self._lanes = self._table.reshape(-1)
        self._in_use: npt.NDArray[np.uint8] = np.zeros(self._num_buckets, np.uint8)
        """Lanes in use as bits; _PASSED where something went by."""
        self._passed: dict[int, int] = {}
        """How many digests went by, by bucket."""
        self._digests: Digests = np.zeros((num_blocks + 1, DIGEST_BYTES // 8), "<u8")
        # An empty lane has tag 0, so what is asked for there never equals this row.
        self._digests[0] = np.iinfo(np.uint64).max
        self._rows = self._digests.view("V32").reshape(-1)
        self._lane_of: IntArray = np.full(num_blocks, _UNUSED, np.int64)
        """Where a block stands in `_lanes`; `-2 - lane` where that is not in its home."""
        self._size = 0
        self._places: IntArray = np.arange(256)
        # Indexing a memoryview by one number costs a third of indexing an array.
        self._view = self._lanes.data
        self._bytes = self._digests.data.cast("B")
        self.lookups = 0
        """Digests looked up since start."""
        self.probes = 0
        """Buckets read for them."""

    def __len__(self) -> int:
        """Number of digests."""
        return self._size

    def holds(self, blocks: IntArray) -> Mask:
        """Which of these blocks can be found."""
        mask: Mask = self._lane_of[blocks] != _UNUSED
        return mask

    def blocks(self) -> IntArray:
        """All blocks that can be found, ascending."""
        return np.flatnonzero(self._lane_of != _UNUSED)

    def digests(self, blocks: IntArray) -> bytes:
        """The digests of blocks that can be found, back to back."""
        return self._digests.take(blocks + 1, axis=0).tobytes()

    def find(self, digest: bytes) -> int:
        """The block of one digest, or -1."""
        block, probes = self._seek(digest)
        self.lookups += 1
        self.probes += probes
        return block

    def lookup(self, digests: bytes) -> IntArray:
        """The blocks of digests given back to back; -1 where there is none."""
        if len(digests) <= _SINGLY * DIGEST_BYTES:
            return np.array([self.find(digest) for digest in _split(digests)], np.int64)
        keys = as_digests(digests)
        self.lookups += len(keys)
        found = self._lookup(keys, digests)
        return np.full(len(keys), -1, np.int64) if found is None else found

    def insert(self, blocks: IntArray, digests: bytes) -> IntArray:
        """Makes blocks (all different, none findable) findable; of equal digests the first counts.

        Args:
            blocks: int64 [n].
            digests: one for each, back to back.

        Returns:
            Places of those that are findable now, int64 [m]; the others had known digests, or ones
            that crowd too much.
        """
        if blocks.size > _MOST_AT_ONCE:
            parts = [
                start
                + self.insert(
                    blocks[start : start + _MOST_AT_ONCE],
                    digests[start * DIGEST_BYTES : (start + _MOST_AT_ONCE) * DIGEST_BYTES],
                )
                for start in range(0, blocks.size, _MOST_AT_ONCE)
            ]
            return np.concatenate(parts)
        if blocks.size <= _SINGLY:
            return self._insert_singly(range(blocks.size), blocks, digests)
        keys = as_digests(digests)
        first = keys[:, 0]
        places = self._first_places(blocks.size)
        found = self._lookup(keys, digests)
        if found is None and blocks.size <= _FEW:
            homes = self._homes(first)
            if len(set(homes.tolist())) == blocks.size:
                return self._place(places, homes, None, blocks, digests)
        if found is not None:
            places = (found < 0).nonzero()[0]
            first = first.take(places)
        # Sorted by their first 48 bits, so by home, and in the order given where these are equal.
        order = first & _STEM_PART | places.view(np.uint64)
        order.sort()
        places = (order & _PLACE_PART).view(np.int64)
        homes = self._homes(order)
        run = homes[1:] == homes[:-1]
        if not np.count_nonzero(run):
            return self._place(places, homes, None, blocks, digests)
        pairs = run.nonzero()[0]
        same = pairs[order[pairs] ^ order[pairs + 1] < _MOST_AT_ONCE]
        if same.size:
            if not np.all(_equal_rows(keys[places[same]], keys[places[same + 1]])):
                return self._insert_singly(np.sort(places).tolist(), blocks, digests)
            homes, places = np.delete(homes, same + 1), np.delete(places, same + 1)
            run = homes[1:] == homes[:-1]
        all_places = self._first_places(homes.size)
        starts = all_places.copy()
        starts[1:][run] = 0
        ranks = all_places - np.maximum.accumulate(starts)
        return self._place(places, homes, ranks, blocks, digests)

    def delete(self, blocks: IntArray) -> None:
        """Makes blocks (all different, all findable) unfindable."""
        lanes = self._lane_of[blocks]
        away = lanes < 0
        if np.count_nonzero(away):
            lanes[away] = -2 - lanes[away]
            self._take_back(blocks[away], lanes[away])
        self._lane_of[blocks] = _UNUSED
        self._lanes[lanes] = 0
        np.subtract.at(self._in_use, lanes >> _LANE_BITS, _BIT.take(lanes & (_LANES - 1)))
        self._size -= lanes.size

    def check_invariants(self) -> None:
        """Asserts that table, counts and digests agree."""
        blocks = self.blocks()
        assert blocks.size == self._size, "index size is off"
        lanes = self._lane_of[blocks]
        away = lanes < 0
        lanes = np.where(away, -2 - lanes, lanes)
        keys = self._digests[blocks + 1, 0]
        entries = keys << _BLOCK_SHIFT | (blocks.astype(np.uint64) + 1)
        assert np.array_equal(self._lanes[lanes], entries), "index and blocks disagree"
        assert np.count_nonzero(self._lanes) == blocks.size, "an entry without a block"
        bits = (self._table != 0) @ _BIT.astype(np.int64)
        assert np.array_equal(bits, self._in_use & _FULL), "lanes in use are off"
        buckets = lanes >> _LANE_BITS
        assert np.array_equal(self._homes(keys) != buckets, away), "displaced blocks are off"
        passed: dict[int, int] = {}
        for home, bucket in zip(self._homes(keys).tolist(), buckets.tolist(), strict=True):
            for by in self._way(home, bucket):
                passed[by] = passed.get(by, 0) + 1
        assert passed == self._passed, "counts of what went by are off"
        assert np.flatnonzero(self._in_use >= _PASSED).tolist() == sorted(passed), "marks are off"
        for block, digest in zip(blocks.tolist(), _split(self.digests(blocks)), strict=True):
            assert self._seek(digest)[0] == block, "a block is not found"

    def _seek(self, digest: bytes) -> tuple[int, int]:
        """The block of a digest, or -1, and how many buckets were read."""
        key = int.from_bytes(digest[:8], "little")
        bucket, tag = key >> self._shift, key & _BLOCK
        # Over time something may have gone by every bucket: once around is enough.
        for probe in range(1, min(_FARTHEST, self._num_buckets) + 1):
            start = bucket << _LANE_BITS
            for entry in self._view[start : start + _LANES].tolist():
                if entry >> _BLOCK_BITS == tag and entry:
                    at = (entry & _BLOCK) * DIGEST_BYTES
                    if self._bytes[at : at + DIGEST_BYTES] == digest:
                        return (entry & _BLOCK) - 1, probe
            if self._in_use.item(bucket) < _PASSED:
                break
            bucket = (bucket + 1) & (self._num_buckets - 1)
        return -1, probe

    def _lookup(self, keys: Digests, digests: bytes) -> IntArray | None:
        """`lookup`; None where nothing is found."""
        count = len(keys)
        self.probes += count
        home = self._homes(keys[:, 0])
        lanes = self._table.take(home, axis=0).reshape(-1)
        tags = keys.view("<u4")[:, 0].repeat(_LANES)
        at = (lanes.view("<u4")[1::2] == tags).nonzero()[0]
        found = None
        if at.size:
            held: IntArray = (lanes.take(at) & _BLOCK_PART).view(np.int64)
            known = self._digests.take(held, axis=0)
            if at.size == count and known.tobytes() == digests:
                # Equal bytes mean that each candidate stands at the place of its query.
                held -= 1
                return held
            found = np.full(count, -1, np.int64)
            query = at >> _LANE_BITS
            asked = keys.take(query, axis=0)
            if known.tobytes() != asked.tobytes():
                equal = _equal_rows(known, asked)
                query, held = query[equal], held[equal]
            found[query] = held - 1
        if self._passed:
            missing = self._first_places(count) if found is None else (found < 0).nonzero()[0]
            passed = missing[self._in_use.take(home.take(missing)) >= _PASSED]
            if passed.size:
                found = np.full(count, -1, np.int64) if found is None else found
                for place in passed.tolist():
                    found[place], probes = self._seek(_nth(digests, place))
                    self.probes += probes - 1
        return found

    def _homes(self, first: npt.NDArray[np.uint64]) -> IntArray:
        return (first >> self._home_shift).view(np.int64)

    def _way(self, home: int, bucket: int) -> list[int]:
        """The buckets passed from home to the bucket."""
        length = (bucket - home) % self._num_buckets
        return [(home + step) % self._num_buckets for step in range(length)]

    def _first_places(self, count: int) -> IntArray:
        if count > self._places.size:
            self._places = np.arange(2 * count)
        return self._places[:count]

    def _place(
        self,
        places: IntArray,
        homes: IntArray,
        ranks: IntArray | None,
        blocks: IntArray,
        digests: bytes,
    ) -> IntArray:
        """Puts new digests into free lanes of their homes, or beyond.

        Args:
            places: of what to put, in `blocks` and `digests`; sorted by home.
            homes: of these.
            ranks: among those of the same home; None where all homes differ.
            blocks: as given to `insert`.
            digests: the same; those named by `places` are all different.
        """
        in_use = self._in_use.take(homes)
        if ranks is None:
            lane = _FIRST_FREE_LANE.take(in_use)
        else:
            lane = _FREE_LANE[in_use, np.minimum(ranks, _LANES)]
        late = lane == _LANES
        if np.count_nonzero(late):
            done = self._place_fitting(places[~late], homes[~late], lane[~late], blocks, digests)
            rest = self._insert_singly(places[late].tolist(), blocks, digests)
            return np.concatenate([done, rest])
        return self._place_fitting(places, homes, lane, blocks, digests)

    def _place_fitting(
        self, places: IntArray, homes: IntArray, lane: IntArray, blocks: IntArray, digests: bytes
    ) -> IntArray:
        lanes = homes << _LANE_BITS | lane
        rows = np.frombuffer(digests, "V32").take(places)
        first = rows.view("<u8")[::4]
        ids = blocks.take(places)
        self._lane_of[ids] = lanes
        ids += 1
        self._lanes[lanes] = first << _BLOCK_SHIFT | ids.view(np.uint64)
        self._rows[ids] = rows
        np.add.at(self._in_use, homes, _BIT.take(lane))
        self._size += places.size
        return places

    def _insert_singly(self, places: Iterable[int], blocks: IntArray, digests: bytes) -> IntArray:
        """`insert` for few, for full buckets, and for digests that begin alike."""
        new: list[int] = []
        for place in places:
            digest = _nth(digests, place)
            if self._seek(digest)[0] < 0 and self._insert_one(blocks.item(place), digest):
                new.append(place)
        return np.array(new, np.int64)

    def _insert_one(self, block: int, digest: bytes) -> bool:
        key = int.from_bytes(digest[:8], "little")
        home = bucket = key >> self._shift
        passed: list[int] = []
        while (in_use := self._in_use.item(bucket)) & _FULL == _FULL:
            passed.append(bucket)
            if len(passed) == _FARTHEST:
                return False
            bucket = (bucket + 1) & (self._num_buckets - 1)
        for by in passed:
            self._in_use[by] |= _PASSED
            self._passed[by] = self._passed.get(by, 0) + 1
        free = ~in_use & _FULL
        lane = bucket << _LANE_BITS | (free & -free).bit_length() - 1
        self._view[lane] = (key & _BLOCK) << _BLOCK_BITS | block + 1
        self._lane_of[block] = lane if bucket == home else -2 - lane
        self._bytes[(block + 1) * DIGEST_BYTES : (block + 2) * DIGEST_BYTES] = digest
        self._in_use[bucket] = in_use | free & -free
        self._size += 1
        return True

    def _take_back(self, blocks: IntArray, lanes: IntArray) -> None:
        """Uncounts displaced blocks in the buckets they went by."""
        homes = self._homes(self._digests[blocks + 1, 0])
        for home, lane in zip(homes.tolist(), lanes.tolist(), strict=True):
            for bucket in self._way(home, lane >> _LANE_BITS):
                self._passed[bucket] -= 1
                if not self._passed[bucket]:
                    del self._passed[bucket]
                    self._in_use[bucket] &= _FULL


def _equal_rows(these: Digests, those: Digests) -> Mask:
    """Which digests are equal in all bytes."""
    differ = these ^ those
    equal: Mask = (differ[:, 0] | differ[:, 1] | differ[:, 2] | differ[:, 3]) == 0
    return equal


def _nth(digests: bytes, place: int) -> bytes:
    return digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
