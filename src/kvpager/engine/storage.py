"""The memory behind the blocks: one set of buffers for the whole pool, shared by all groups.

::

                 block 0   block 1   block 2   …            group 0         group 1
    buffer 0    [ page   |  page   |  page   | … ]   ◄──  its 1st layer,  its 1st layer
    buffer 1    [ page   |  page   |  page   | … ]   ◄──  its 2nd layer,  its 2nd layer

The j-th layer of every group uses the j-th buffer. Groups never get in each other's way, because
the pool hands a block to one group at a time. A page is bytes; each layer sees it as its own tensors
(keys and values of a block of tokens, or one state), and a buffer's pages are as large as the largest.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..config import CacheConfig
from ..errors import ConfigError

__all__ = ["PagedStorage", "TensorShape"]

_ALIGNMENT = 16  # bytes: where a tensor may start in a page
_NAN_BYTE = 0xFF  # all bits set is a NaN in every floating-point format


@dataclass(frozen=True, kw_only=True)
class TensorShape:
    """What one tensor takes of a page."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes in a page, rounded up so that the next tensor starts aligned."""
        num_bytes: int = math.prod(self.shape) * self.dtype.itemsize
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class PagedStorage:
    """Buffers for ``config.num_blocks`` blocks.

    ``pages`` says for each layer name which tensors a page of it holds. Raises ``ConfigError`` for a
    layer of ``config`` that ``pages`` lacks.
    """

    def __init__(
        self, config: CacheConfig, pages: Mapping[str, Sequence[TensorShape]], device: torch.device | str = "cpu"
    ) -> None:
        missing = [name for group in config.groups for name in group.layer_names if name not in pages]
        if missing:
            raise ConfigError(f"the cache has layers that the model lacks: {missing}; it has {sorted(pages)}")
        self.num_blocks = config.num_blocks
        self._buffers = [
            torch.zeros(config.num_blocks, page_bytes, dtype=torch.uint8, device=device)
            for page_bytes in _page_bytes(config, pages)
        ]
        self._tensors = {
            name: tuple(self._views(buffer, pages[name]))
            for group in config.groups
            for buffer, name in zip(self._buffers, group.layer_names, strict=False)
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def tensors(self, layer_name: str) -> tuple[torch.Tensor, ...]:
        """The layer's tensors, each ``[num_blocks, *shape]``: views, to be read and written."""
        return self._tensors[layer_name]

    def poison(self, block_ids: Collection[int]) -> None:
        """Fill these blocks with NaN in all buffers, so that whoever reads one is seen at once."""
        index = torch.tensor(sorted(block_ids), dtype=torch.int64)
        for buffer in self._buffers:
            buffer[index.to(buffer.device)] = _NAN_BYTE

    @staticmethod
    def _views(buffer: torch.Tensor, shapes: Sequence[TensorShape]) -> list[torch.Tensor]:
        views, start = [], 0
        for spec in shapes:
            num_bytes = math.prod(spec.shape) * spec.dtype.itemsize
            views.append(buffer[:, start : start + num_bytes].view(spec.dtype).unflatten(1, spec.shape))
            start += spec.num_bytes
        return views


def _page_bytes(config: CacheConfig, pages: Mapping[str, Sequence[TensorShape]]) -> list[int]:
    """The size of each buffer's pages: what the largest of the layers that use it needs."""
    sizes = [0] * max(len(group.layer_names) for group in config.groups)
    for group in config.groups:
        for index, name in enumerate(group.layer_names):
            sizes[index] = max(sizes[index], sum(tensor.num_bytes for tensor in pages[name]))
    return sizes
