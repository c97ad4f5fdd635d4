"""What a replay can be told: frozen, checked here."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..config import CacheConfig
from ..counts import as_count, as_number
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
            milliseconds = as_number(getattr(self, name), f"StepTime.{name} (milliseconds)", 0.0)
            object.__setattr__(self, name, milliseconds)
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
        if not isinstance(self.config, CacheConfig):
            raise ConfigError(f"ReplayOptions.config must be a CacheConfig, got {self.config!r}")
        if not isinstance(self.step_time, StepTime):
            raise ConfigError(f"ReplayOptions.step_time must be a StepTime, got {self.step_time!r}")
        for name, at_least in _COUNTS.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                object.__setattr__(self, name, as_count(value, f"ReplayOptions.{name}", at_least))
        object.__setattr__(self, "watermark", as_number(self.watermark, "ReplayOptions.watermark", 0.0))


_MAY_BE_NONE = {"num_in_flight", "limit"}
_COUNTS = {
    "max_model_len": 1,
    "max_num_batched_tokens": 1,
    "max_num_running": 1,
    "num_lookahead_tokens": 0,
    "num_encoder_tokens": 0,
    "num_in_flight": 1,
    "limit": 1,
    "check_every": 0,
}
