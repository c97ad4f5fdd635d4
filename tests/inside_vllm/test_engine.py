"""The real engine with and without the plug-in: the same answers, the same hits, nothing left behind.

Each kind of run happens once; the tests look at what came of it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from .harness import SHARED, Outcome, run, scenarios

MODELS = ["smollm2", "gemma3"]
SCENARIOS = ["roomy", "tight", "abort"]
AT_LEAST_REFUSED = 20

pytestmark = [pytest.mark.parametrize("in_child", [False, True], ids=["one process", "core in a child"])]


class Runs:
    """Outcomes by model, manager, eviction order and process, each had once."""

    def __init__(self, folders: dict[str, str], probes: Path) -> None:
        self._folders, self._probes = folders, probes
        self.of = cache(self._run)

    def _run(self, model: str, manager: str, eviction: str, in_child: bool) -> dict[str, Outcome]:
        todo = scenarios(model, self._folders[model])
        probe = self._probes / f"{model}-{manager}-{eviction}-{in_child}"
        outcomes = run(list(todo.values()), manager=manager, in_child=in_child, probe=probe, eviction=eviction)
        print(f"\n{model}, {manager}, {eviction}, {'child' if in_child else 'one process'}:", end="")
        for name, outcome in zip(todo, outcomes, strict=True):
            cached = sum(number or 0 for number in outcome.cached)
            print(f" {name}: {outcome.counts['refused']} refused, {cached} tokens cached;", end="")
        return dict(zip(todo, outcomes, strict=True))


@pytest.fixture(scope="module")
def runs(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(models, tmp_path_factory.mktemp("probes"))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("eviction", ["recency", "dead_first"])
def test_same_tokens(runs: Runs, model: str, eviction: str, in_child: bool) -> None:
    ours, theirs = runs.of(model, "kvpager", eviction, in_child), runs.of(model, "vLLM", "recency", in_child)
    for name in ("roomy", "tight"):
        assert ours[name].tokens == theirs[name].tokens, name
        assert None not in ours[name].tokens


@pytest.mark.parametrize("model", MODELS)
def test_recency_has_the_same_hits_twice_in_a_row(runs: Runs, model: str, in_child: bool) -> None:
    ours, theirs = runs.of(model, "kvpager", "recency", in_child), runs.of(model, "vLLM", "recency", in_child)
    for name in ("roomy", "tight"):
        assert ours[name].cached == theirs[name].cached, name
    first, second = ours["roomy"].cached[:8], ours["roomy"].cached[8:]
    assert first == [0] + [SHARED // 16 * 16] * 7
    assert min(second) > max(first)  # the prompts' own tails are cached by then


@pytest.mark.parametrize("model", MODELS)
def test_dead_first_hits_at_least_as_much(runs: Runs, model: str, in_child: bool) -> None:
    ours, theirs = runs.of(model, "kvpager", "dead_first", in_child), runs.of(model, "vLLM", "recency", in_child)
    for name in ("roomy", "tight"):
        assert sum(ours[name].cached) >= sum(theirs[name].cached), name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("eviction", ["recency", "dead_first"])
def test_one_manager_of_the_right_kind_and_nothing_held_at_the_end(
    runs: Runs, model: str, eviction: str, in_child: bool
) -> None:
    for name, outcome in runs.of(model, "kvpager", eviction, in_child).items():
        counts = outcome.counts
        assert counts["kvpager"] >= 1 and counts["vLLM"] == 0
        assert counts["held"] == 0 and counts["checks"] > 0 and counts["steps"] > 10, name
    assert runs.of(model, "vLLM", "recency", in_child)["roomy"].counts["kvpager"] == 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("eviction", ["recency", "dead_first"])
def test_pressure_was_felt(runs: Runs, model: str, eviction: str, in_child: bool) -> None:
    assert runs.of(model, "kvpager", eviction, in_child)["tight"].counts["refused"] >= AT_LEAST_REFUSED


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("eviction", ["recency", "dead_first"])
def test_who_was_not_aborted_answers_as_ever(runs: Runs, model: str, eviction: str, in_child: bool) -> None:
    ours, theirs = runs.of(model, "kvpager", eviction, in_child), runs.of(model, "vLLM", "recency", in_child)
    answers = ours["abort"].tokens
    assert answers[::3] == [None, None]
    assert [tokens for tokens in answers if tokens] == [tokens for tokens in theirs["abort"].tokens if tokens]
