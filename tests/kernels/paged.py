"""Paged batches for the kernel tests, and attention by its definition, one token at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import AttentionBatch, KernelSet, KVCache, KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Rows with everything they ever computed: keys and values [tokens, kv_heads, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]
    queries: list[Tensor]
    """[query tokens, heads, head_dim]; they are the last tokens of their row."""


def random_sequences(
    lengths: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int
) -> Sequences:
    """Rows of (context, query tokens); the context includes the query tokens."""
    draw = torch.Generator().manual_seed(sum(context * 31 + query for context, query in lengths))

    def random(tokens: int, count: int) -> Tensor:
        return torch.randn(tokens, count, head_dim, generator=draw)

    return Sequences(
        keys=[random(context, kv_heads) for context, _ in lengths],
        values=[random(context, kv_heads) for context, _ in lengths],
        queries=[random(query, heads) for _, query in lengths],
    )


def paged(
    kernels: KernelSet, sequences: Sequences, spec: KVCacheSpec, spare_blocks: int = 7
) -> tuple[KVCache, AttentionBatch]:
    """A cache that holds the sequences in scattered blocks, written in two steps, and the batch."""
    needed = [-(-len(keys) // spec.block_size) for keys in sequences.keys]
    num_blocks = sum(needed) + spare_blocks
    cache = kernels.allocate_kv_cache(spec, num_blocks, torch.device("cpu"))
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(num_blocks))
    tables = torch.zeros(len(needed), max(needed) + 1, dtype=torch.int32)
    slots, start = [], 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[start : start + count]
        start += count
        at = torch.arange(len(sequences.keys[row]))
        slots.append(
            tables[row, at // spec.block_size].long() * spec.block_size + at % spec.block_size
        )
    queries = [len(query) for query in sequences.queries]
    olds = [len(keys) - query for keys, query in zip(sequences.keys, queries, strict=True)]
    for part in (lambda old: slice(0, old), lambda old: slice(old, None)):
        keys, values, where = (
            torch.cat([one[part(old)] for one, old in zip(column, olds, strict=True)])
            for column in (sequences.keys, sequences.values, slots)
        )
        for layer in range(spec.num_layers):
            # Layers differ, so that a mix-up shows.
            new = ((keys + layer).to(spec.dtype), (values * (layer + 1)).to(spec.dtype))
            kernels.write_kv(cache, layer, *new, where)
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, *queries]).cumsum(0).int(),
        seq_lens=torch.tensor([len(keys) for keys in sequences.keys], dtype=torch.int32),
        slot_mapping=torch.cat([one[old:] for one, old in zip(slots, olds, strict=True)]),
        block_tables=tables,
        num_decode_rows=next((i for i, count in enumerate(queries) if count != 1), len(queries)),
        max_query_len=max(queries),
        max_seq_len=max(len(keys) for keys in sequences.keys),
    )
    return cache, batch


def naive_attention(
    sequences: Sequences,
    *,
    layer: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One token, one head at a time, in float64: [all query tokens, heads, head_dim]."""
    out = []
    for keys, values, queries in zip(
        sequences.keys, sequences.values, sequences.queries, strict=True
    ):
        group = queries.shape[1] // keys.shape[1]
        keys_there = keys.double() + layer
        values_there = values.double() * (layer + 1)
        for offset, query in enumerate(queries.double()):
            position = len(keys) - len(queries) + offset
            first = 0 if window is None else max(0, position + 1 - window)
            for head, vector in enumerate(query):
                seen = slice(first, position + 1), head // group
                scores = scale * (keys_there[seen] @ vector)
                if soft_cap is not None:
                    scores = soft_cap * (scores / soft_cap).tanh()
                weights = scores.exp()
                total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
                out.append((weights / total) @ values_there[seen])
    heads, head_dim = sequences.queries[0].shape[1:]
    return torch.stack(out).view(-1, heads, head_dim).float()
