"""Where kvpager differs from vLLM 0.25.1 on purpose: one named entry each.

A run that meets one asserts its direction, counts it under its name and goes on with both sides at the
same decision. Anything else that differs is a failure.
"""

from __future__ import annotations

DIFFERENCES = {
    # -- met in random walks --------------------------------------------------------------------
    "never fits": "kvpager refuses what could never finish; vLLM starts it, or lets it wait for ever",
    "gate: lookahead and reserved": "vLLM's full-sequence check ignores lookahead and reserved blocks: it admits more",
    "gate: under-counted": "vLLM caps the need before it subtracts a hit's nulls, or forgets states: it admits more",
    "gate: over-counted": "vLLM counts blocks that are dead by the time others are taken: it admits less",
    "step: under-counted": "vLLM forgets the state loaded for Mamba align: it would run out half-way",
    "step: over-counted": "vLLM counts hit or external positions that are dead: it refuses what fits",
    "older copy of a state": "vLLM lets a hit wait whose hash was committed in this step, though an older copy serves",
    "align commit": "vLLM commits a Mamba state under a boundary that no step ended at",
    "reference window commit": "vLLM commits decoded tokens whose K/V depends on where the prompt ended",
    "junctions": "with sparse retention vLLM keeps no checkpoint where two prompts part, kvpager does",
    "one BlockStored per hash": "vLLM tells every copy of a hash, kvpager the first stored and the last removed",
    "event tokens": "vLLM's BlockStored spells the tokens of skipped blocks too: tokens and hashes do not pair up",
    "nulls in popped blocks": "vLLM hands out null blocks with the popped ones",
    "delayed tokens": "vLLM's next ordinary call commits the tokens of a load that is still under way",
    "statistics per retry": "vLLM counts a request at every look-up, kvpager once, when it is admitted",
    "hit thrown away": "vLLM aligns before and after EAGLE's drop and loses valid hits",
    "hit not covered": "vLLM's hit is longer than what one of its groups can serve",
    # -- one scenario each ----------------------------------------------------------------------
    "LoRA named like a salt": "vLLM's extra keys are untagged: a LoRA's name and a salt give the same hash",
    "double free": "vLLM counts below zero, kvpager refuses",
    "tokens in flight": "vLLM frees window blocks by optimistic counts, kvpager by processed tokens",
    "failed load": "vLLM evicts the failed blocks only; later blocks computed from them still hit",
    "duplicate request id": "vLLM lets a second live request use an id, kvpager refuses",
    "queries write": "vLLM's look-up leaves a hint in the coordinator that another request may read",
    "chunk not a multiple of the block": "vLLM rounds a chunk's start down, kvpager refuses the configuration",
    "never fits: told": "vLLM answers None for ever, kvpager says never and what would fit",
}
"""Name to what vLLM does that kvpager does not."""
