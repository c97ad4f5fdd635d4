"""The manager at work with a real model: a small inference engine over PyTorch and transformers.

Needs ``pip install kvpager[engine]``. Readable before fast; from the top: ``engine`` (one loop), ``runner`` (one
forward pass), ``step`` (how it is packed), ``attention`` and ``states`` (how layers reach the blocks), ``storage`` (the
memory).
"""

from .engine import Engine, EngineOptions
from .layers import CachedLayer, cache_config_for, cached_layers
from .results import Completion, Delta, EngineStats
from .sampling import SamplingParams

__all__ = [
    "CachedLayer",
    "Completion",
    "Delta",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "SamplingParams",
    "cache_config_for",
    "cached_layers",
]
