"""One forward pass, laid out: whose tokens lie where in the pack, where they go, what they read.

::

    packed tokens   │ request a: 5 of its prompt │ b: 1 │ c: 1 │ d: 3 │      one row of the model's batch
    slots           │ where each token's K/V is written: block * block size + offset
    reads           │ one a request: its pages, how many of their keys count, and the mask
    state batches   │ segments of equal length and history: [b, c], [a], [d]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..attention import AttentionSpec, ChunkedLocalAttention, Mamba, SlidingWindow
from ..block_table import BlockTable
from ..scheduler import SchedulerOutput

__all__ = ["Read", "Segment", "StateBatch", "Step"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A request's tokens in the pack: rows ``[first, first + length)`` are its positions from ``start`` on.

    ``row`` is the request's row in the block table.
    """

    row: int
    first: int
    start: int
    length: int

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.start + self.length

    @property
    def rows(self) -> slice:
        """Where it lies in the pack."""
        return slice(self.first, self.first + self.length)


@dataclass(frozen=True, kw_only=True)
class Read:
    """What one request's tokens read in one group.

    The keys are those of ``blocks``, in order, less the first ``num_skipped``, ``num_keys`` in all. ``mask`` [tokens,
    keys] is True where a token may look; None: every token sees every key.
    """

    rows: slice
    blocks: torch.Tensor
    num_skipped: int
    num_keys: int
    mask: torch.Tensor | None

    def gather(self, pages: torch.Tensor) -> torch.Tensor:
        """The request's keys (or values) out of ``pages`` [blocks, block size, heads, size], as [keys, heads, size]."""
        return pages.index_select(0, self.blocks).flatten(0, 1).narrow(0, self.num_skipped, self.num_keys)


@dataclass(frozen=True, kw_only=True)
class StateBatch:
    """Segments that a state layer takes side by side: equally long, and all with a state or none.

    ``rows`` [segments, length] points into the pack; ``sources`` are the blocks with the states to start from (None:
    the sequences begin here), ``targets`` the blocks for the states after the last token.
    """

    rows: torch.Tensor
    sources: torch.Tensor | None
    targets: torch.Tensor


class Step:
    """The pack that a scheduler's output makes, with the block table that belongs to it."""

    def __init__(
        self,
        output: SchedulerOutput,
        table: BlockTable,
        specs: Sequence[AttentionSpec],
        device: torch.device | str = "cpu",
    ) -> None:
        self._table = table
        self._specs = specs
        self._device = device
        self._masks: dict[tuple[Segment, AttentionSpec], torch.Tensor] = {}
        self.segments = list(_segments(output))
        tokens: list[int] = []
        for row, scheduled in enumerate(output.scheduled):
            table.add_row(row, scheduled.block_ids)
            tokens += scheduled.request.all_token_ids[scheduled.start : scheduled.start + scheduled.num_tokens]
        self.token_ids = torch.tensor(tokens, device=device)
        self.sampling_rows = self._index(
            segment.first + segment.length - 1
            for segment, scheduled in zip(self.segments, output.scheduled, strict=True)
            if scheduled.samples
        )

    @cached_property
    def positions(self) -> torch.Tensor:
        """[tokens]: each token's position in its sequence."""
        return self._index(position for s in self.segments for position in range(s.start, s.stop))

    @cached_property
    def slots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each group, where each token's keys and values go: the block and the place in it, [tokens] each."""
        rows = [segment.row for segment in self.segments for _ in range(segment.length)]
        positions = self.positions.cpu().numpy()
        slots = []
        for group, spec in enumerate(self._specs):
            flat = torch.from_numpy(self._table.slot_mapping(group, rows, positions)).to(self._device)
            slots.append((flat // spec.block_size, flat % spec.block_size))
        return slots

    @cached_property
    def reads(self) -> list[list[Read]]:
        """For each group, what each segment reads."""
        return [
            [] if isinstance(spec, Mamba) else [self._read(group, spec, segment) for segment in self.segments]
            for group, spec in enumerate(self._specs)
        ]

    @cached_property
    def state_batches(self) -> list[list[StateBatch]]:
        """For each group, the batches of its state layers."""
        return [
            list(self._state_batches(group, spec)) if isinstance(spec, Mamba) else []
            for group, spec in enumerate(self._specs)
        ]

    def _read(self, group: int, spec: AttentionSpec, segment: Segment) -> Read:
        first_key = _first_key(spec, segment.start)
        first_block = first_key // spec.block_size
        end_block = -(-segment.stop // spec.block_size)
        return Read(
            rows=segment.rows,
            blocks=self._index(self._table.rows(group)[segment.row, first_block:end_block].tolist()),
            num_skipped=first_key - first_block * spec.block_size,
            num_keys=segment.stop - first_key,
            mask=None if segment.length == 1 else self._mask(segment, spec),
        )

    def _mask(self, segment: Segment, spec: AttentionSpec) -> torch.Tensor:
        if (segment, spec) not in self._masks:
            queries = torch.arange(segment.start, segment.stop, device=self._device)[:, None]
            keys = torch.arange(_first_key(spec, segment.start), segment.stop, device=self._device)[None, :]
            self._masks[segment, spec] = _may_look(spec, queries, keys)
        return self._masks[segment, spec]

    def _state_batches(self, group: int, spec: AttentionSpec) -> Iterator[StateBatch]:
        """A state after n tokens is in the block at position ceil(n / block size) - 1 of the table."""
        alike: dict[tuple[int, bool], list[Segment]] = {}
        for segment in self.segments:
            alike.setdefault((segment.length, segment.start > 0), []).append(segment)
        rows = self._table.rows(group)
        for (length, has_state), segments in alike.items():
            sources = (int(rows[s.row, (s.start - 1) // spec.block_size]) for s in segments)
            targets = (int(rows[s.row, (s.stop - 1) // spec.block_size]) for s in segments)
            firsts = self._index(segment.first for segment in segments)
            yield StateBatch(
                rows=firsts[:, None] + torch.arange(length, device=self._device),
                sources=self._index(sources) if has_state else None,
                targets=self._index(targets),
            )

    def _index(self, values: Iterator[int] | Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._device)


def _segments(output: SchedulerOutput) -> Iterator[Segment]:
    first = 0
    for row, scheduled in enumerate(output.scheduled):
        yield Segment(row=row, first=first, start=scheduled.start, length=scheduled.num_tokens)
        first += scheduled.num_tokens


def _first_key(spec: AttentionSpec, position: int) -> int:
    """The first token that the token at ``position`` may look at."""
    match spec:
        case SlidingWindow(window=window):
            return max(0, position - window + 1)
        case ChunkedLocalAttention(chunk_size=chunk_size):
            return position // chunk_size * chunk_size
        case _:
            return 0


def _may_look(spec: AttentionSpec, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The mask for these positions, [queries, keys]."""
    mask = keys <= queries
    match spec:
        case SlidingWindow(window=window):
            return mask & (keys > queries - window)
        case ChunkedLocalAttention(chunk_size=chunk_size):
            return mask & (keys // chunk_size == queries // chunk_size)
        case _:
            return mask
