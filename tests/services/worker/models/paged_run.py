"""Runs a model over paged rows in any order of chunks, as a worker would, and keeps the logits."""

import torch
from torch import Tensor

from kernels.interface import AttentionBatch, KernelSet, KVCacheSpec
from services.worker.models.registry import LoadedModel


class PagedRun:
    """Rows of known length in one KV cache.

    Args:
        loaded: the model.
        kernels: its kernel set.
        rows: token ids of each row; more may be appended.
        room: most tokens a row will ever have.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        kernels: KernelSet,
        rows: list[list[int]],
        *,
        block_size: int = 4,
        room: int | None = None,
    ) -> None:
        config = loaded.config
        self._model = loaded.model
        self._block_size = block_size
        self.rows = [list(row) for row in rows]
        self.computed = [0] * len(rows)
        width = -(-(room or max(map(len, rows))) // block_size)
        blocks = torch.randperm(len(rows) * width, generator=torch.Generator().manual_seed(3))
        self._tables = blocks.view(len(rows), width).int()
        spec = KVCacheSpec(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=config.dtype,
        )
        self._cache = kernels.allocate_kv_cache(spec, len(rows) * width, torch.device("cpu"))

    def step(self, chunks: dict[int, int], *, logits: str = "all") -> dict[int, Tensor]:
        """Computes the next `chunks[row]` tokens of each row.

        Args:
            chunks: number of tokens by row.
            logits: "all" tokens', the "last" token's of each row, or "none".

        Returns:
            Logits float32 [tokens, vocab] by row.
        """
        order = sorted(chunks, key=lambda row: chunks[row] > 1)
        ids, positions, slots = [], [], []
        for row in order:
            at = torch.arange(self.computed[row], self.computed[row] + chunks[row])
            positions.append(at)
            ids += self.rows[row][at[0] : at[-1] + 1]
            blocks = self._tables[row, at // self._block_size].long()
            slots.append(blocks * self._block_size + at % self._block_size)
            self.computed[row] += chunks[row]
        counts = torch.tensor([0] + [chunks[row] for row in order])
        ends = counts.cumsum(0)
        batch = AttentionBatch(
            query_start_loc=ends.int(),
            seq_lens=torch.tensor([self.computed[row] for row in order], dtype=torch.int32),
            slot_mapping=torch.cat(slots),
            block_tables=self._tables[order],
            num_decode_rows=sum(1 for row in order if chunks[row] == 1),
            max_query_len=max(chunks.values()),
            max_seq_len=max(self.computed[row] for row in order),
        )
        wanted = {
            "all": torch.arange(len(ids)),
            "last": ends[1:] - 1,
            "none": torch.zeros(0, dtype=torch.int64),
        }[logits]
        found = self._model.forward(
            torch.tensor(ids), torch.cat(positions), self._cache, batch, wanted
        )
        sizes = {"all": counts[1:].tolist(), "last": [1] * len(order), "none": [0] * len(order)}
        return dict(zip(order, found.split(sizes[logits]), strict=True))

    def all_logits(self, schedule: list[dict[int, int]]) -> list[Tensor]:
        """Runs the steps of `schedule`; logits [tokens, vocab] of each row, in order."""
        found: list[list[Tensor]] = [[] for _ in self.rows]
        for chunks in schedule:
            for row, logits in self.step(chunks).items():
                found[row].append(logits)
        return [torch.cat(parts) for parts in found]
