"""What is poisoned and what is not."""

from __future__ import annotations

import torch

from kvpager.engine import Engine, SamplingParams

from .harness import ask, engine, tokens


def _nan_blocks(subject: Engine) -> set[int]:
    """Blocks that are NaN in every layer."""
    storage = subject._runner.storage
    names = [name for group in subject.manager.kv_cache_config.groups for name in group.layer_names]
    pages = torch.cat([tensor.flatten(1) for name in names for tensor in storage.tensors(name)], dim=1)
    return set(pages.isnan().all(1).nonzero().flatten().tolist())


def test_what_was_freed_without_a_hash_is_poisoned() -> None:
    subject = engine("llama", num_blocks=20, enable_caching=False)
    ask(subject, [tokens(30, 1)])
    subject.add(tokens(3, 2), SamplingParams(max_tokens=5))
    subject.step()
    (table,) = subject.manager.get_block_ids("1")
    assert _nan_blocks(subject) == set(range(20)) - set(table)


def test_what_may_be_hit_keeps_its_content() -> None:
    subject = engine("llama", num_blocks=20)
    ask(subject, [tokens(30, 1)])
    ask(subject, [tokens(3, 2)], num_tokens=1)
    pool = subject.manager.block_pool
    cached = {block for block in range(20) if pool.block_hash(block) is not None}
    assert len(cached) == (30 + 9) // 4
    assert not cached & _nan_blocks(subject)


def test_a_block_is_poisoned_when_it_is_handed_out() -> None:
    """So that nothing is left of whoever had it before, beyond what is written."""
    subject = engine("llama", num_blocks=4)
    ask(subject, [tokens(11, 1)], num_tokens=1)
    subject.add(tokens(9, 2), SamplingParams(max_tokens=2))
    subject.step()
    (table,) = subject.manager.get_block_ids("1")
    keys, _ = subject._runner.storage.tensors("layers.0.self_attn")
    assert keys[table[-1], 0].isfinite().all()
    assert keys[table[-1], 1:].isnan().all()
