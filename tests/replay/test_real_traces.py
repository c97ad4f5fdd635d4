"""Whole traces of real services against counts that know no manager."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpager.replay import BlockIds, PromptMaker, read_trace

from .helpers import exact_figures, run, shared_trace, with_short_outputs

MOONCAKE = "mooncake-conversation.jsonl"
NUM_BLOCKS = {512: 200_000, 64: 1_600_000, 16: 6_200_000}


def tokens_hit_by_counting(path: str, block_size: int) -> tuple[int, int]:
    """(tokens hit, prompt tokens) with nothing but a set of the prefixes that came before."""
    number: dict[tuple[int, int], int] = {}
    seen: set[tuple[int, int]] = set()
    hit = total = 0
    for line in Path(path).read_text().splitlines():
        record = json.loads(line)
        length, prefix, blocks = record["input_length"], -1, []
        for block_id in record["hash_ids"]:
            prefix = number.setdefault((prefix, block_id), len(number))
            blocks += [(prefix, part) for part in range(512 // block_size)]
        blocks = blocks[: length // block_size]
        known = next((n for n, block in enumerate(blocks) if block not in seen), len(blocks))
        hit += min(known, (length - 1) // block_size) * block_size
        total += length
        seen.update(blocks)
    return hit, total


@pytest.mark.parametrize("block_size", [512, 64, 16])
def test_the_whole_mooncake_trace_hits_exactly_what_came_before(block_size: int) -> None:
    """Blocks for everything, one request at a time; one generated token each, which no hit depends on."""
    path = shared_trace(MOONCAKE)
    report = run(
        with_short_outputs(read_trace(path)), num_blocks=NUM_BLOCKS[block_size], block_size=block_size, num_in_flight=1
    )
    assert (report.hit_tokens, report.prompt_tokens) == tokens_hit_by_counting(path, block_size)
    assert report.ideal_hit_rate == report.hit_rate
    assert (report.requests, report.refused, report.evicted_blocks) == (12_031, 0, 0)


def test_made_up_tokens_give_the_same_hits_on_real_traces() -> None:
    for name, block_size in ((MOONCAKE, 512), ("coding-agents.jsonl.gz", 64)):
        reports = [
            run(
                with_short_outputs(read_trace(shared_trace(name))),
                num_blocks=2_000_000 // block_size,
                block_size=block_size,
                limit=60,
                expand_ids=expand,
            )
            for expand in (False, True)
        ]
        assert exact_figures(reports[0]) == exact_figures(reports[1])
        assert reports[0].hit_tokens > 0


def test_ids_of_coding_agents_stand_for_prefixes() -> None:
    """So they serve as hashes: an id never comes up behind others than before. Counted over the whole trace."""
    maker = PromptMaker(64)
    requests = hits = tokens = 0
    for session in read_trace(shared_trace("coding-agents.jsonl.gz")):
        parents: dict[int, int] = {}  # of the first id of each run: inside a run an id's parent is the one before
        for request in session.requests:
            assert isinstance(request.content, BlockIds)
            last = -1
            for first, count in request.content.runs:
                assert parents.setdefault(first, last) == last
                last = first + count - 1
            requests += 1
            tokens += request.num_prompt_tokens
            if requests <= 2000:
                hits += min(maker.make(request).num_known_tokens, request.num_prompt_tokens - 1)
    assert (requests, tokens) == (49_334, 6_037_445_403)
    assert hits > 0


def test_azure_has_no_prefixes() -> None:
    report = run(read_trace(shared_trace("azure-conv.csv")), num_blocks=20_000, limit=300, check_every=100)
    assert (report.requests, report.hit_tokens, report.ideal_hit_rate) == (300, 0, 0.0)


def test_mooncake_under_pressure_breaks_no_invariant() -> None:
    report = run(read_trace(shared_trace(MOONCAKE)), num_blocks=20_000, limit=250, check_every=50)
    assert report.evicted_blocks > 0
    assert report.requests == 250
    assert 0 < report.hit_rate < report.ideal_hit_rate
