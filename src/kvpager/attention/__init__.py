"""Attention kinds: one small file each."""

from .base import AttentionSpec, ceil_div
from .chunked_local import ChunkedLocalAttention
from .cross import CrossAttention
from .full import FullAttention, MLAAttention
from .mamba import Mamba
from .reference_window import ReferenceWindow
from .sink import SinkAttention
from .sliding_window import SlidingWindow

__all__ = [
    "AttentionSpec",
    "ChunkedLocalAttention",
    "CrossAttention",
    "FullAttention",
    "MLAAttention",
    "Mamba",
    "ReferenceWindow",
    "SinkAttention",
    "SlidingWindow",
    "ceil_div",
]
