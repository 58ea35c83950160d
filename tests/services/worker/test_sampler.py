"""The sampler against a scalar reading of its contract, and what makes it repeatable."""

import math

import pytest
import torch

from services.worker.sampler import SamplingBatch, philox, sample, uniforms

INF = float("inf")


def batch(rows):
    """Rows of (temperature, top_p, top_k, seed, position)."""
    columns = list(zip(*rows, strict=True))
    signed = [seed - 2**64 if seed >= 2**63 else seed for seed in columns[3]]
    return SamplingBatch(
        temperature=torch.tensor(columns[0], dtype=torch.float32),
        top_p=torch.tensor(columns[1], dtype=torch.float32),
        top_k=torch.tensor(columns[2], dtype=torch.int64),
        seed=torch.tensor(signed, dtype=torch.int64),
        position=torch.tensor(columns[4], dtype=torch.int64),
    )


def drawn(logits, rows):
    result = sample(logits, batch(rows))
    assert result.ok.all()
    return result.token_ids.tolist()


def many(logits, count, temperature=1.0, top_p=1.0, top_k=0, seed=11):
    """`count` draws from one row of logits, at positions 0, 1, 2, …"""
    rows = [(temperature, top_p, top_k, seed, position) for position in range(count)]
    return torch.tensor(drawn(logits.expand(count, -1), rows))


def random_logits(rows, vocab, spread=2.0, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def kept_shares(logits, temperature, top_p, top_k):
    """Share of each token after the filters, by sorting in float64: {token: share}."""
    scaled = logits.double() / temperature
    shares = (scaled - scaled.max()).exp().tolist()
    order = sorted(range(len(shares)), key=lambda token: (-float(logits[token]), token))
    if 0 < top_k < len(order):
        order = order[:top_k]
    total = sum(shares[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        kept.append(token)
        mass += shares[token]
        if top_p < 1 and mass >= float(torch.tensor(top_p)) * total:
            break
    return {token: shares[token] / mass for token in kept}


class TestPhilox:
    @pytest.mark.parametrize(
        ("key", "counter", "words"),
        [
            (0, (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
            (2**64 - 1, (2**32 - 1,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
            (
                0x299F31D0_A4093822,
                (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
                "d16cfe09 94fdcceb 5001e420 24126ea1",
            ),
        ],
    )
    def test_known_answers(self, key, counter, words):
        """Known answers published with the generator (Salmon et al., 2011)."""
        seed = torch.tensor([key - 2**64 if key >= 2**63 else key])
        got = philox(seed, torch.tensor([counter[0]]), counter[1:])
        assert " ".join(f"{word:08x}" for word in got.squeeze(1).tolist()) == words

    def test_rows_do_not_mix(self):
        seeds = torch.arange(-3, 4) * 0x123456789ABCDEF
        positions = torch.arange(7) * 1000
        together = philox(seeds, positions)
        for row in range(7):
            alone = philox(seeds[row : row + 1], positions[row : row + 1])
            assert torch.equal(together[:, row : row + 1], alone)

    def test_uniforms_use_53_bits_of_the_first_two_words(self):
        zero = torch.zeros(1, dtype=torch.int64)
        wanted = ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
        assert uniforms(zero, zero).item() == wanted

    def test_uniforms_are_uniform(self):
        found = uniforms(torch.full((50_000,), 7), torch.arange(50_000))
        assert found.min() >= 0
        assert found.max() < 1
        assert_fits(torch.histc(found.float(), 100, 0, 1), torch.full((100,), 0.01))


class TestGreedy:
    def test_temperature_zero_is_the_most_likely_token(self):
        logits = random_logits(5, 263)
        rows = [(0.0, 1.0, 0, row, row) for row in range(5)]
        assert drawn(logits, rows) == logits.argmax(-1).tolist()

    @pytest.mark.parametrize(
        "row",
        [(0.0, 0.5, 7, 1, 1), (1.0, 1e-9, 0, 1, 1), (2.0, 1.0, 1, 1, 1), (1e9, 1e-12, 40, 1, 1)],
    )
    def test_other_ways_to_ask_for_it(self, row):
        logits = random_logits(20, 1000)
        assert drawn(logits, [row] * 20) == logits.argmax(-1).tolist()

    @pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-8, 1e-4, 0.01])
    def test_tiny_temperatures(self, temperature):
        """A gap of 11 decides at 0.01 and below, and nothing overflows."""
        logits = torch.zeros(4, 128)
        logits[torch.arange(4), torch.tensor([0, 77, 127, 3])] = 11.3
        for top_p, top_k in ((1.0, 0), (0.9, 0), (1.0, 20)):
            rows = [(temperature, top_p, top_k, 5, place) for place in range(4)]
            assert drawn(logits, rows) == [0, 77, 127, 3]

    def test_of_equal_tokens_the_first_is_taken(self):
        logits = torch.zeros(3, 700)
        logits[:, 500:] = 1.0
        rows = [(0.0, 1.0, 0, 1, 1), (1.0, 1e-9, 0, 1, 1), (1.0, 1.0, 1, 1, 1)]
        assert drawn(logits, rows) == [500, 500, 500]


class TestDistribution:
    @pytest.mark.parametrize(
        ("temperature", "top_p", "top_k"),
        [
            (1.0, 1.0, 0),
            (0.6, 1.0, 0),
            (1.7, 1.0, 0),
            (1.0, 0.8, 0),
            (1.0, 1.0, 5),
            (0.8, 0.7, 9),
            (1.0, 0.999, 60),
            (1.0, 1.0, 263),
            (1.0, 1.0, 10**6),
        ],
    )
    @pytest.mark.parametrize("vocab", [3, 128, 263])
    def test_draws_follow_the_filtered_distribution(self, temperature, top_p, top_k, vocab):
        logits = random_logits(1, vocab, seed=vocab)[0]
        shares = kept_shares(logits, temperature, top_p, top_k)
        found = many(logits, 6000, temperature, top_p, top_k)
        counts = torch.bincount(found, minlength=vocab)
        assert {token for token in range(vocab) if counts[token]} <= set(shares)
        wanted = torch.zeros(vocab)
        wanted[list(shares)] = torch.tensor(list(shares.values()), dtype=torch.float32)
        assert_fits(counts, wanted)

    def test_huge_temperatures_are_uniform(self):
        counts = torch.bincount(many(random_logits(1, 50)[0], 6000, temperature=1e30), minlength=50)
        assert_fits(counts, torch.full((50,), 0.02))

    def test_masked_tokens_never_come(self):
        logits = random_logits(1, 400)[0]
        logits[::2] = -INF
        for top_p, top_k in ((1.0, 0), (0.99, 0), (1.0, 300)):
            assert (many(logits, 500, 5.0, top_p, top_k) % 2 == 1).all()

    def test_the_last_token_can_come(self):
        found = many(torch.zeros(2), 200)
        assert set(found.tolist()) == {0, 1}
        assert many(torch.zeros(1), 5).tolist() == [0] * 5


def assert_fits(counts, shares):
    """Chi-square over the tokens that are expected five times or more."""
    counts, expected = counts.double(), shares.double() * counts.sum()
    often = expected >= 5
    freedom = max(1, int(often.sum()) - 1)
    chi_square = ((counts - expected).square() / expected)[often].sum().item()
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


class TestFilters:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 5000])
    def test_every_draw_is_the_scalar_one(self, vocab, seed):
        """Inverse of the cumulative distribution, walked through token by token."""
        logits = random_logits(12, vocab, spread=[0.05, 1.0, 3.0, 8.0][seed], seed=seed)
        kinds = (
            *((1.0, 1.0, 0), (0.7, 0.9, 0), (1.0, 0.9999, 0), (1.3, 1.0, 50)),
            *((1.0, 0.5, 300), (2.0, 0.95, 1000), (0.1, 0.3, 0), (5.0, 0.97, 0)),
            *((1.0, 1.0, vocab), (1.0, 1.0, vocab - 1), (9.0, 1.0, 0), (0.4, 0.99999, 7)),
        )
        choices = [(*kind, seed * 2**61 + 99, place) for place, kind in enumerate(kinds)]
        got = drawn(logits, choices)
        points = uniforms(batch(choices).seed, batch(choices).position).tolist()
        for row, (temperature, top_p, top_k, _, _) in enumerate(choices):
            shares = kept_shares(logits[row], temperature, top_p, top_k)
            filtered = top_p < 1 or 0 < top_k < vocab
            order = list(shares) if filtered else sorted(shares)
            total = 0.0
            for token in order:
                total += shares[token]
                if total > points[row]:
                    break
            assert got[row] == token

    def test_among_equals_the_lower_ids_are_kept(self):
        """Also where the equals reach far beyond the tokens that are looked at first."""
        logits = torch.zeros(6000)
        assert set(many(logits, 300, top_k=3).tolist()) == {0, 1, 2}
        assert max(many(logits, 300, top_p=0.1).tolist()) < 601
        logits[5990:] = 1.0
        found = set(many(logits, 300, top_k=12).tolist())
        assert found == {*range(5990, 6000), 0, 1}

    def test_top_p_keeps_the_fewest_that_reach_it(self):
        logits = torch.tensor([0.5, 0.3, 0.2]).log()
        assert set(many(logits, 200, top_p=0.49).tolist()) == {0}
        assert set(many(logits, 200, top_p=0.51).tolist()) == {0, 1}
        assert set(many(logits, 200, top_p=0.81).tolist()) == {0, 1, 2}

    def test_top_p_is_reached_by_equality(self):
        logits = torch.zeros(4)
        assert set(many(logits, 200, top_p=0.5).tolist()) == {0, 1}
        assert set(many(logits, 200, top_p=0.75).tolist()) == {0, 1, 2}

    def test_top_p_is_a_share_of_what_top_k_left(self):
        logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
        assert set(many(logits, 200, top_p=0.55, top_k=2).tolist()) == {0}
        assert set(many(logits, 200, top_p=0.6, top_k=2).tolist()) == {0, 1}

    def test_temperature_comes_before_the_filters(self):
        logits = torch.tensor([0.6, 0.3, 0.1]).log()
        assert set(many(logits, 200, top_p=0.59).tolist()) == {0}
        assert set(many(logits, 200, temperature=3.0, top_p=0.59).tolist()) == {0, 1}


class TestIndependence:
    @pytest.mark.parametrize("vocab", [5, 263, 3000])
    def test_a_row_is_the_same_alone_and_among_any_neighbours(self, vocab):
        logits = random_logits(24, vocab, spread=1.5, seed=9)
        kinds = [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.8, 0.95, 0), (1.2, 1.0, 40), (1.0, 0.9999, 0)]
        rows = [(*kinds[row % 5], row * 77, row) for row in range(24)]
        together = drawn(logits, rows)
        alone = [drawn(logits[row : row + 1], rows[row : row + 1])[0] for row in range(24)]
        order = torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist()
        shuffled = drawn(logits[order], [rows[row] for row in order])
        halves = drawn(logits[:9], rows[:9]) + drawn(logits[9:], rows[9:])
        assert together == alone == halves
        assert shuffled == [together[row] for row in order]

    def test_seed_and_position_both_matter(self):
        logits = torch.zeros(1, 1000)
        tokens = {
            drawn(logits, [(1.0, 1.0, 0, seed, position)])[0]
            for seed in (0, 1, 2**32, 2**63, 2**64 - 1)
            for position in (0, 1, 2)
        }
        assert len(tokens) >= 14
        assert drawn(logits, [(1.0, 1.0, 0, 3, 4)]) == drawn(logits, [(1.0, 1.0, 0, 3, 4)])

    def test_logits_are_not_changed(self):
        logits = random_logits(4, 300)
        before = logits.clone()
        drawn(
            logits,
            [(1.0, 1.0, 0, 1, 1), (0.0, 1.0, 0, 1, 1), (2.0, 0.5, 3, 1, 1), (1.0, 0.9, 0, 1, 1)],
        )
        assert torch.equal(logits, before)


class TestBrokenRows:
    @pytest.mark.parametrize("kind", [(0.0, 1.0, 0), (1.0, 1.0, 0), (1.0, 0.9, 0), (1.0, 1.0, 5)])
    @pytest.mark.parametrize("vocab", [300, 2000])
    def test_only_they_are_not_ok(self, kind, vocab):
        logits = random_logits(6, vocab)
        rows = [(*kind, row, row) for row in range(6)]
        clean = drawn(logits, rows)
        logits[1, 17] = float("nan")
        logits[3] = -INF
        logits[4, 250] = INF
        result = sample(logits, batch(rows))
        assert result.ok.tolist() == [True, False, True, False, False, True]
        assert [result.token_ids[row].item() for row in (0, 2, 5)] == [clean[0], clean[2], clean[5]]
        assert ((result.token_ids >= 0) & (result.token_ids < vocab)).all()

    def test_all_rows_broken(self):
        result = sample(torch.full((2, 9), float("nan")), batch([(1.0, 0.9, 0, 1, 1)] * 2))
        assert result.ok.tolist() == [False, False]

    def test_no_rows(self):
        none = SamplingBatch(
            temperature=torch.zeros(0),
            top_p=torch.zeros(0),
            top_k=torch.zeros(0, dtype=torch.int64),
            seed=torch.zeros(0, dtype=torch.int64),
            position=torch.zeros(0, dtype=torch.int64),
        )
        result = sample(torch.zeros(0, 263), none)
        assert result.token_ids.shape == result.ok.shape == (0,)
