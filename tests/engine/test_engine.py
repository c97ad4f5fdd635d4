"""The engine's own ways: sampling, stopping, streaming, aborting, and what it refuses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from kvpager.engine import Engine, EngineOptions, SamplingParams, cache_config_for
from kvpager.engine.sampling import sample
from kvpager.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidRequestError,
    RequestTooLargeError,
    UnknownRequestError,
)

from .harness import ask, engine, layers, model, reference, tokens

PROMPT = tokens(13, seed=1)
GREEDY = reference("llama", tuple(PROMPT), 10)[0]


class Letters:
    """A tokenizer that spells: token 65 is A. Bytes that are no UTF-8 yet come out as the replacement character."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode(errors="replace")


def _with_tokenizer() -> Engine:
    return Engine(model("llama"), Letters(), cache_config_for(layers("llama"), num_blocks=100, block_size=4))


def test_sampling_with_a_seed_does_not_depend_on_the_neighbours() -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, top_p=0.9, seed=7)
    (alone,) = engine("llama").generate([PROMPT], params)
    among = engine("llama", num_blocks=12, max_num_running=3).generate(
        [tokens(9, 2), PROMPT, tokens(5, 3)], [SamplingParams(max_tokens=10), params, SamplingParams(max_tokens=10)]
    )
    assert among[1].token_ids == alone.token_ids
    assert alone.token_ids != GREEDY
    (other,) = engine("llama").generate([PROMPT], replace(params, seed=8))
    assert other.token_ids != alone.token_ids


def test_sampling_draws_by_probability() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(3000, 3)

    def shares(**options: float) -> list[float]:
        params = SamplingParams(seed=1, **options)  # type: ignore[arg-type]
        generator = params.generator("cpu")
        counts = Counter(sample(logits, [(params, generator)] * 3000))
        return [counts[token] / 3000 for token in range(3)]

    assert shares(temperature=1.0) == pytest.approx([0.5, 0.3, 0.2], abs=0.03)
    assert shares(temperature=1.0, top_p=0.6) == pytest.approx([0.625, 0.375, 0], abs=0.03)
    assert shares(temperature=0.5) == pytest.approx([0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38], abs=0.03)
    assert shares(temperature=1.0, top_p=0.1) == [1, 0, 0]
    assert shares(temperature=0.0) == [1, 0, 0]


def test_a_stop_token_ends_the_answer_and_is_part_of_it() -> None:
    stop = GREEDY[4]
    length = GREEDY.index(stop) + 1
    params = SamplingParams(max_tokens=10, stop_token_ids=(stop,))
    (completion,) = engine("llama").generate([PROMPT], params)
    assert completion.token_ids == GREEDY[:length]
    assert completion.finish_reason == "stop"


def test_the_tokenizers_end_token_stops_unless_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "eos_token_id", GREEDY[4])
    subject = _with_tokenizer()
    stopped, not_stopped = subject.generate(
        [PROMPT, PROMPT], [SamplingParams(max_tokens=10), SamplingParams(max_tokens=10, ignore_eos=True)]
    )
    assert stopped.finish_reason == "stop" and stopped.token_ids == GREEDY[: GREEDY.index(GREEDY[4]) + 1]
    assert not_stopped.token_ids == GREEDY


def test_a_stream_gives_every_token_and_the_text_without_broken_characters() -> None:
    subject = _with_tokenizer()
    deltas = list(subject.stream(["abc", "Grüße"], SamplingParams(max_tokens=9)))
    completions = {delta.request_id: delta.completion for delta in deltas if delta.completion}
    assert len(completions) == 2
    for request_id, completion in completions.items():
        own = [delta for delta in deltas if delta.request_id == request_id]
        assert tuple(delta.token_id for delta in own) == completion.token_ids
        assert "".join(delta.text for delta in own) == completion.text
        assert all(not delta.text.endswith("\ufffd") for delta in own[:-1])


def test_closing_a_stream_aborts_what_is_left() -> None:
    subject = engine("llama")
    stream = subject.stream([PROMPT, tokens(20, 5)], SamplingParams(max_tokens=50))
    next(stream)
    assert subject.has_unfinished
    stream.close()
    assert not subject.has_unfinished
    assert subject.manager.block_pool.num_held == 0
    assert ask(subject, [PROMPT])[0].token_ids == GREEDY


def test_an_aborted_answer_ends_where_it_was() -> None:
    subject = engine("llama")
    request_id = subject.add(PROMPT, SamplingParams(max_tokens=10))
    waiting = subject.add(tokens(4, 6))
    for _ in range(3):
        subject.step()
    completion = subject.abort(request_id)
    assert (completion.finish_reason, completion.token_ids) == ("abort", GREEDY[:3])
    assert subject.abort(waiting).finish_reason == "abort"
    with pytest.raises(UnknownRequestError):
        subject.abort(request_id)


def test_what_is_counted() -> None:
    subject = engine("llama")
    first, second = ask(subject, [PROMPT, PROMPT])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 12)
    stats = subject.stats
    assert (stats.num_prefill_tokens, stats.num_decode_tokens) == (13 + 1, 2 * 9)
    assert (stats.num_generated_tokens, stats.num_cached_tokens, stats.num_steps) == (20, 12, 10)
    assert 0 < stats.peak_usage < 0.1 and stats.tokens_per_second > 0


def test_a_return_after_preemption_does_not_count_as_cached() -> None:
    subject = engine("llama", num_blocks=12, max_num_batched_tokens=16, max_num_running=4)
    completions = ask(subject, [tokens(9, seed) for seed in range(4)], num_tokens=20)
    assert any(completion.num_preemptions for completion in completions)
    assert subject.stats.num_cached_tokens > 0
    assert all(completion.num_cached_tokens == 0 for completion in completions), "no two prompts are alike"


def test_times_are_by_the_engines_clock() -> None:
    ticks = iter(range(1000))
    config = cache_config_for(layers("llama"), num_blocks=100, block_size=4)
    subject = Engine(model("llama"), None, config, EngineOptions(), clock=lambda: float(next(ticks)))
    (completion,) = subject.generate([PROMPT], SamplingParams(max_tokens=3))
    # add at 0; a step reads the clock when it starts, when the logits are there, and when it ends
    assert (completion.time_to_first_token, completion.time_to_last_token) == (2, 9)
    assert subject.stats.seconds == 6


def test_engines_may_share_a_model_and_leave_it_as_it_was() -> None:
    before = model("gemma3").config._attn_implementation
    one, other = engine("gemma3"), engine("gemma3", enable_caching=False)
    assert ask(one, [PROMPT])[0].token_ids == ask(other, [PROMPT])[0].token_ids
    assert model("gemma3").config._attn_implementation == before


def test_a_request_ends_at_the_models_length() -> None:
    (completion,) = engine("llama", max_model_len=20).generate([PROMPT], SamplingParams(max_tokens=None))
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 7)


def test_bad_requests_are_refused_and_change_nothing() -> None:
    subject = engine("llama", num_blocks=5)
    with pytest.raises(RequestTooLargeError, match="16 tokens"):
        subject.generate([PROMPT, tokens(30, 1)], SamplingParams(max_tokens=3))
    assert not subject.has_unfinished, "all prompts or none"
    few = SamplingParams(max_tokens=3)
    subject.add([1], few, request_id="a")
    with pytest.raises(DuplicateRequestError):
        subject.add([1], few, request_id="a")
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        subject.add("text")
    with pytest.raises(InvalidRequestError, match="2 sampling parameters for 1 prompts"):
        subject.generate([[1]], [SamplingParams(), SamplingParams()])
    with pytest.raises(InvalidRequestError):
        subject.add([])


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_bad_sampling_parameters_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_a_cache_for_another_model_is_refused() -> None:
    for other in ("qwen3_next", "mistral"):
        config = cache_config_for(layers(other), num_blocks=100)
        with pytest.raises(ConfigError, match=r"layers\.0\.self_attn"):
            Engine(model("llama"), None, config)
    with pytest.raises(ConfigError, match="the model lacks"):
        Engine(model("llama"), None, cache_config_for(layers("falcon_h1"), num_blocks=100))
