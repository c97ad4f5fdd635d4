"""The caches that both managers are built for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .reference import Kind


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Groups and limits of one cache. Tiny, so that evictions and refusals are frequent."""

    name: str
    kinds: tuple[Kind, ...]
    use_eagle: bool = False
    num_blocks: tuple[int, ...] = (30, 52, 80)
    """Pool sizes, one a seed in turn."""
    max_model_len: int = 72
    step: int = 16
    """Most tokens that one step computes."""
    lookahead: int = 0
    drafts: int = 0
    caching: bool = True
    retention: int | None = None
    """Tokens between the checkpoints that window and Mamba groups keep; None: all of them."""
    preempts: bool = True
    """False where vLLM would hold what is dead in a hit beyond the prompt until the next step."""

    @property
    def alignment(self) -> int:
        """Tokens that hits are multiples of."""
        return math.lcm(*(kind.block for kind in self.kinds))

    @property
    def hash_size(self) -> int:
        """Tokens that one hash covers."""
        return math.gcd(*(kind.block for kind in self.kinds))

    @property
    def aligns_steps(self) -> bool:
        """Whether prefill steps should end at block boundaries."""
        return any(kind.name == "mamba-align" for kind in self.kinds)

    @property
    def flagged(self) -> tuple[Kind, ...]:
        """The groups with EAGLE's flag resolved: all of them when EAGLE is on and none is flagged."""
        if not self.use_eagle or any(kind.eagle for kind in self.kinds):
            return self.kinds
        return tuple(Kind(**{**kind.__dict__, "eagle": True}) for kind in self.kinds)


FULL = Kind(name="full")
WINDOW = Kind(name="window", window=10)

LAYOUTS = (
    Layout(name="full", kinds=(FULL,), lookahead=2, drafts=3, num_blocks=(18, 30, 48)),
    Layout(name="window", kinds=(WINDOW,), lookahead=2, drafts=3, num_blocks=(14, 22, 34)),
    Layout(name="full + window", kinds=(FULL, WINDOW), lookahead=2, drafts=3),
    Layout(
        name="full + 2 windows",
        kinds=(FULL, Kind(name="window", window=6), Kind(name="window", window=17)),
        lookahead=2,
        drafts=3,
        num_blocks=(40, 72, 110),
    ),
    Layout(name="full + chunk", kinds=(FULL, Kind(name="chunk", chunk=12)), lookahead=1, drafts=2),
    Layout(name="full + Mamba all", kinds=(FULL, Kind(name="mamba-all"))),
    Layout(name="full + Mamba align", kinds=(FULL, Kind(name="mamba-align"))),
    Layout(name="full + Mamba all with 2 speculative states", kinds=(FULL, Kind(name="mamba-all", states=2))),
    Layout(name="full + window, retention 16", kinds=(FULL, Kind(name="window", window=6)), lookahead=2, retention=16),
    Layout(name="full + Mamba align, retention 0", kinds=(FULL, Kind(name="mamba-align")), retention=0),
    Layout(
        name="reference window",
        kinds=(Kind(name="reference", kept=9),),
        lookahead=2,
        drafts=3,
        num_blocks=(18, 30, 48),
        preempts=False,
    ),
    Layout(name="full + window, no caching", kinds=(FULL, WINDOW), lookahead=2, drafts=3, caching=False),
    Layout(
        name="unequal block sizes",
        kinds=(
            Kind(name="full", block=8),
            Kind(name="window", block=4, window=7),
            Kind(name="window", block=2, window=9),
        ),
        lookahead=2,
        drafts=2,
        num_blocks=(52, 90, 140),
    ),
    Layout(name="EAGLE, full", kinds=(FULL,), use_eagle=True, lookahead=3, drafts=3, num_blocks=(18, 30, 48)),
    Layout(name="EAGLE, window", kinds=(WINDOW,), use_eagle=True, lookahead=3, drafts=3, num_blocks=(14, 22, 34)),
    Layout(name="EAGLE, full + window", kinds=(FULL, WINDOW), use_eagle=True, lookahead=3, drafts=3),
    Layout(
        name="EAGLE, unequal block sizes",
        kinds=(Kind(name="full", block=8), Kind(name="window", block=4, window=17, eagle=True)),
        use_eagle=True,
        lookahead=2,
        drafts=2,
        num_blocks=(32, 52, 80),
    ),
    Layout(name="EAGLE, full + Mamba all", kinds=(FULL, Kind(name="mamba-all")), use_eagle=True),
    Layout(
        name="EAGLE, flagged full + Mamba align",
        kinds=(Kind(name="full", eagle=True), Kind(name="mamba-align")),
        use_eagle=True,
    ),
)
