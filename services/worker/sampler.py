"""Draws one token per row. The order of stages: temperature, top-k, top-p, draw.

A row's token depends on its logits, its parameters and (seed, position), and on nothing else: not
on its place in the batch, its neighbours, or which shortcut was taken. Therefore

- the random number is a pure function of (seed, position): Philox4x32-10 (Salmon et al., 2011);
- a row without filters is drawn in the order of token ids, a row with filters in the order of
  (probability descending, id ascending); neighbours never change which of the two it is;
- sums that decide are float64 and sequential.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_PREFIX = 256
"""Most likely tokens looked at first; nearly all filters keep fewer."""

_WIDEN = 16
"""How many times as many are looked at next."""

_CHUNK = 128
"""Neighbouring ids whose probabilities are added up before one of them is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """How to draw, one entry per row of logits.

    Attributes:
        temperature: float32 [n], >= 0; 0 takes the most likely token.
        top_p: float32 [n], in (0, 1]; keeps the fewest tokens that have this much probability.
        top_k: int64 [n], >= 0; keeps that many tokens; 0 keeps all.
        seed: int64 [n], the bits of an unsigned 64-bit number.
        position: int64 [n], index of the token in the output.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    seed: Tensor
    position: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """What was drawn.

    Attributes:
        token_ids: int64 [n].
        ok: bool [n]; False where logits are NaN or +inf or all -inf, and the token means nothing.
    """

    token_ids: Tensor
    ok: Tensor


def sample(logits: Tensor, batch: SamplingBatch) -> SampleResult:
    """Draws a token for each row.

    Args:
        logits: float32 [n, vocab]; not changed.
        batch: parameters of the rows.
    """
    token_ids = logits.argmax(-1)
    highest = logits.gather(1, token_ids[:, None])
    ok = highest.isfinite().squeeze(1)  # a NaN counts as the highest
    drawn = ok & (batch.temperature > 0) & (batch.top_k != 1)
    if not bool(drawn.any()):
        return SampleResult(token_ids=token_ids, ok=ok)
    vocab = logits.shape[1]
    uniform = uniforms(batch.seed, batch.position)
    filtered = (batch.top_p < 1) | ((batch.top_k > 0) & (batch.top_k < vocab))
    for rows, draw in ((drawn & ~filtered, _draw_plain), (drawn & filtered, _draw_filtered)):
        chosen = rows.nonzero().squeeze(1)
        if chosen.numel():
            scaled = logits.index_select(0, chosen)
            scaled -= highest.index_select(0, chosen)
            scaled /= batch.temperature.index_select(0, chosen)[:, None]
            token_ids[chosen] = draw(scaled, _take(batch, chosen), uniform[chosen])
    return SampleResult(token_ids=token_ids, ok=ok)


def uniforms(seed: Tensor, position: Tensor) -> Tensor:
    """float64 [n] in [0, 1), 53 bits, from int64 seeds and positions [n]."""
    words = philox(seed, position)
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() / 2**53


def philox(
    seed: Tensor, position: Tensor, high_counter: tuple[int, int, int] = (0, 0, 0)
) -> Tensor:
    """Philox4x32-10 with key `seed` and counter (position, *high_counter).

    Args:
        seed: int64 [n], bits of unsigned 64-bit keys.
        position: int64 [n], below 2**32.
        high_counter: the other three words of the counter.

    Returns:
        int64 [4, n], unsigned 32-bit words.
    """
    low = 0xFFFFFFFF
    rounds = torch.arange(10, device=seed.device)[:, None, None]
    step = torch.tensor([[0x9E3779B9], [0xBB67AE85]], device=seed.device)
    factor = torch.tensor([[0xD2511F53], [0xCD9E8D57]], device=seed.device)
    keys = (torch.stack((seed & low, (seed >> 32) & low)) + rounds * step) & low
    one, two, three = (torch.full_like(position, word) for word in high_counter)
    even, odd = torch.stack((position & low, two)), torch.stack((one, three))
    for key in keys:
        # The product wraps as a signed number; its 64 bits are those of the unsigned one.
        product = even * factor
        even = ((product >> 32) & low).flip(0) ^ odd ^ key
        odd = (product & low).flip(0)
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def _take(batch: SamplingBatch, rows: Tensor) -> SamplingBatch:
    return SamplingBatch(
        temperature=batch.temperature[rows],
        top_p=batch.top_p[rows],
        top_k=batch.top_k[rows],
        seed=batch.seed[rows],
        position=batch.position[rows],
    )


def _draw_plain(scaled: Tensor, batch: SamplingBatch, uniform: Tensor) -> Tensor:
    """Inverse of the cumulative distribution in the order of ids, in two levels.

    Args:
        scaled: float32 [n, vocab], at most 0; overwritten.
        batch: of these rows; all they ask for is in `scaled`.
        uniform: float64 [n].
    """
    del batch
    weights, sums = _chunked(scaled.exp_())
    ends = sums.cumsum(-1)
    target = _below(uniform, ends[:, -1])
    chunk = (ends <= target).sum(-1, keepdim=True)
    inside = weights.gather(1, chunk[..., None].expand(-1, 1, _CHUNK)).squeeze(1)
    target -= (ends - sums).gather(1, chunk)
    place = (inside.cumsum(-1, dtype=torch.float64) <= target).sum(-1, keepdim=True)
    # The sum of a chunk and the running sum inside it may differ in the last bits.
    last = ((inside > 0) * torch.arange(_CHUNK, device=inside.device)).amax(-1, keepdim=True)
    return (chunk * _CHUNK + torch.minimum(place, last)).squeeze(1)


def _draw_filtered(scaled: Tensor, batch: SamplingBatch, uniform: Tensor) -> Tensor:
    """Draws among the most likely tokens that top-k and top-p keep.

    Looks at the most likely tokens first, and at more of them for the rows that need it.

    Args:
        scaled: float32 [n, vocab], at most 0.
        batch: of these rows.
        uniform: float64 [n].
    """
    vocab = scaled.shape[1]
    limits = torch.where(batch.top_k > 0, batch.top_k.clamp(max=vocab), vocab)
    mass = torch.zeros_like(uniform)
    if bool((limits == vocab).any()):
        mass = _chunked(scaled.exp())[1].cumsum(-1)[:, -1]
    token_ids = torch.empty_like(limits)
    rows = torch.arange(len(limits), device=scaled.device)
    width = min(_PREFIX, vocab)
    while rows.numel():
        found = _draw_from_prefix(
            scaled.index_select(0, rows) if width > _PREFIX else scaled,
            width,
            torch.stack((limits[rows].double(), batch.top_p[rows].double(), mass[rows])),
            uniform[rows],
        )
        token_ids[rows] = found
        rows = rows[found < 0]
        width = min(width * _WIDEN, vocab)
    return token_ids


def _draw_from_prefix(scaled: Tensor, width: int, filters: Tensor, uniform: Tensor) -> Tensor:
    """Draws for the rows whose filters keep fewer than `width` tokens; -1 for the others.

    Args:
        scaled: float32 [n, vocab].
        width: how many of the most likely tokens to look at.
        filters: float64 [3, n]: most tokens to keep, probability to keep, and the sum of all
            weights, which is used where the first is the whole vocabulary.
        uniform: float64 [n].
    """
    vocab = scaled.shape[1]
    limit, top_p, mass = filters[0].long()[:, None], filters[1, :, None], filters[2, :, None]
    values, ids = _most_likely(scaled, width)
    ends = values.exp().cumsum(-1, dtype=torch.float64)
    among = torch.where(limit == vocab, mass, ends.gather(1, limit.clamp(max=width) - 1))
    kept = torch.minimum((ends < top_p * among).sum(-1, keepdim=True) + 1, limit)
    last = kept.clamp(max=width) - 1
    place = (ends <= _below(uniform, ends.gather(1, last).squeeze(1))).sum(-1, keepdim=True)
    drawn = ids.gather(1, place).squeeze(1)
    if width == vocab:
        return drawn
    # Equals of the prefix's last token may lie outside it, so the kept ones must end before them.
    settled = (kept <= width) & (values.gather(1, last) > values[:, -1:])
    settled &= (limit <= width) | (limit == vocab)
    return torch.where(settled.squeeze(1), drawn, -1)


def _most_likely(scaled: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Values and ids of the highest entries, by (value descending, id ascending): [n, width]."""
    if width == scaled.shape[1]:
        values, ids = scaled.sort(stable=True, dim=-1, descending=True)
        return values, ids
    values, ids = scaled.topk(width, -1)
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(stable=True, dim=-1, descending=True)
    return values, ids.gather(1, order)


def _chunked(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Pads [n, vocab] to [n, chunks, _CHUNK] with zeros; and the chunks' sums, float64."""
    padding = -weights.shape[1] % _CHUNK
    padded = functional.pad(weights, (0, padding)) if padding else weights
    chunks = padded.view(weights.shape[0], -1, _CHUNK)
    return chunks, chunks.sum(-1).double()


def _below(uniform: Tensor, total: Tensor) -> Tensor:
    """`uniform * total` [n, 1], kept below `total` whatever rounding does."""
    return torch.minimum(uniform * total, torch.nextafter(total, -total))[:, None]
