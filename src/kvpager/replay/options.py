"""What a replay can be told: frozen, checked here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..config import CacheConfig
from ..errors import ConfigError
from ..pool import EvictionOrder

__all__ = ["ReplayOptions", "StepTime"]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """How long a step takes, in milliseconds: linear in prefill tokens and in decoding requests."""

    base_ms: float = 10.0
    ms_per_prefill_token: float = 0.05
    ms_per_decoding_request: float = 0.02

    def __post_init__(self) -> None:
        for name in ("base_ms", "ms_per_prefill_token", "ms_per_decoding_request"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"StepTime.{name} must be a number of milliseconds of at least 0, got {value!r}")
        if not self.base_ms + self.ms_per_prefill_token:
            raise ConfigError("StepTime: a step must take some time; set base_ms above 0")

    def seconds(self, num_prefill_tokens: int, num_decoding: int) -> float:
        """The simulated length of one step."""
        prefill = self.ms_per_prefill_token * num_prefill_tokens
        return (self.base_ms + prefill + self.ms_per_decoding_request * num_decoding) / 1e3


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Cache, scheduler and clock of a replay.

    ``num_encoder_tokens``: what each request's encoder gives (encoder-decoder models).
    ``num_in_flight``: how many requests are kept in flight; None lets them arrive when the trace says.
    ``limit``: only the first so many requests. ``check_every``: all invariants each so many steps
    (0: never). ``expand_ids``: hash made-up tokens even where block ids would do as hashes.
    """

    config: CacheConfig
    max_model_len: int = 1 << 20
    max_num_batched_tokens: int = 8192
    max_num_running: int = 256
    num_lookahead_tokens: int = 0
    num_encoder_tokens: int = 0
    enable_chunked_prefill: bool = True
    full_sequence_must_fit: bool = True
    watermark: float = 0.0
    eviction_order: EvictionOrder = "dead_first"
    num_in_flight: int | None = None
    step_time: StepTime = field(default_factory=StepTime)
    limit: int | None = None
    check_every: int = 0
    expand_ids: bool = False

    def __post_init__(self) -> None:
        for name in ("num_in_flight", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"ReplayOptions.{name} must be at least 1, got {value!r}; leave it out for no limit")
        if self.num_encoder_tokens < 0:
            raise ConfigError(f"ReplayOptions.num_encoder_tokens must be at least 0, got {self.num_encoder_tokens!r}")
        if self.check_every < 0:
            raise ConfigError(f"ReplayOptions.check_every must be at least 0 steps, got {self.check_every!r}")
