"""Full attention with static sink blocks: some blocks at the head of every table are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import ConfigError
from .full import FullAttention

__all__ = ["SinkAttention"]


@dataclass(frozen=True, kw_only=True)
class SinkAttention(FullAttention):
    """Full attention whose kernels read ``sink_len`` tokens of static K/V before the sequence.

    Their blocks are reserved when the manager starts and prefixed to every row that the group's
    kernels see; they are not positions of any request.
    """

    sink_len: int

    kind: ClassVar[str] = "sink_full_attention"
    reads_whole_blocks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("sink_len", self.sink_len, 1)
        if self.sink_len % self.block_size:
            raise ConfigError(
                f"SinkAttention.sink_len must be a multiple of the block size {self.block_size}, got {self.sink_len}"
            )

    @property
    def num_sink_blocks(self) -> int:
        """Blocks that are reserved for the sinks."""
        return self.sink_len // self.block_size
