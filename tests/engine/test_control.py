"""The controls that must fail: with one wrong block in a table, the answers are wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import kvpager.engine.runner
from kvpager.attention import Mamba
from kvpager.block_table import BlockTable

from .harness import ask, engine, reference, tokens
from .tiny import ARCHITECTURES

FIRST_WRONG_STEP = 3  # a prompt takes one step, or two when a state is left behind at a block's end
PROMPTS = [tokens(30, seed=1), tokens(30, seed=2)]


class SwappedTable(BlockTable):
    """From `FIRST_WRONG_STEP` on, two requests have each other's block in one place of one group."""

    group = 0
    from_end = 2

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.num_steps = 0

    def add_row(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        super().add_row(row, block_ids)
        self.num_steps += row == 0
        if row == 1 and self.num_steps > FIRST_WRONG_STEP - 1:
            column = self.num_blocks(0, self.group) - self.from_end
            rows = self.rows(self.group)
            rows[[0, 1], column] = rows[[1, 0], column]


class NullTable(SwappedTable):
    """One request has the null block there instead."""

    def add_row(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        BlockTable.add_row(self, row, block_ids)
        self.num_steps += row == 0
        if row == 1 and self.num_steps > FIRST_WRONG_STEP - 1:
            self.rows(self.group)[1, self.num_blocks(1, self.group) - self.from_end] = 0


def _groups(name: str) -> list[tuple[int, int]]:
    """For each group, which block from the end of a table is read: the last state, or the last but one of K/V."""
    specs = engine(name).manager.kv_cache_config.specs
    return [(group, 1 if isinstance(spec, Mamba) else 2) for group, spec in enumerate(specs)]


@pytest.mark.parametrize("table", [SwappedTable, NullTable])
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_one_wrong_block_in_any_group_is_seen(
    name: str, table: type[SwappedTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [reference(name, tuple(prompt), 10) for prompt in PROMPTS]
    monkeypatch.setattr(kvpager.engine.runner, "BlockTable", table)
    for group, from_end in _groups(name):
        monkeypatch.setattr(table, "group", group)
        monkeypatch.setattr(table, "from_end", from_end)
        completions = ask(engine(name), PROMPTS)
        wrong = completions[1]
        assert wrong.logits is not None
        assert torch.allclose(wrong.logits[0], expected[1][1][0], atol=1e-4), "the first steps were right"
        if table is NullTable:
            assert wrong.logits[2].isnan().all(), "the null block is poisoned"
        else:
            difference = (wrong.logits[2:] - expected[1][1][2:]).abs().amax()
            assert difference > 1e-3, f"group {group}: {difference}"


def test_without_the_fault_the_same_harness_passes() -> None:
    for completion, prompt in zip(ask(engine("llama"), PROMPTS), PROMPTS, strict=True):
        assert completion.token_ids == reference("llama", tuple(prompt), 10)[0]
