"""The engine: scheduler, manager, paged storage and a model, in one loop.

::

    add ──► Scheduler.schedule ──► ModelRunner.run ──► sample ──► Scheduler.update ──► Delta, Completion
                │                      │
          KVCacheManager          PagedStorage
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..check import check_manager
from ..config import CacheConfig
from ..errors import InvalidRequestError
from ..hashing import BlockHasher
from ..manager import KVCacheManager
from ..request import Request
from ..scheduler import Scheduler, SchedulerOutput
from .layers import cache_config_for, cached_layers
from .live import LiveRequest
from .poison import Poison
from .results import Completion, Delta, EngineStats
from .runner import ModelRunner
from .sampling import SamplingParams, sample

__all__ = ["Engine", "EngineOptions"]

Prompt = str | Sequence[int]
GREEDY = SamplingParams()


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine runs.

    A step computes at most ``max_num_batched_tokens`` tokens of at most ``max_num_running`` requests; a request has
    at most ``max_model_len`` tokens (None: the model's limit, or what the cache holds if that is less). ``poison``
    fills useless blocks with NaN, ``check`` tests all invariants after every step: both are slow.
    """

    max_num_batched_tokens: int = 512
    max_num_running: int = 64
    max_model_len: int | None = None
    enable_caching: bool = True
    poison: bool = False
    check: bool = False


class Engine:
    """Generates text with ``model`` over the blocks of ``cache_config``.

    ``model`` is a transformers causal language model in eval mode, on any device; several engines may share it.
    ``cache_config`` is made with `cache_config_for` (None: 1,024 blocks of 16 tokens). Without a ``tokenizer``,
    prompts are token ids and texts are empty. ``clock`` gives seconds. Not thread-safe.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        cache_config: CacheConfig | None = None,
        options: EngineOptions | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        options = options or EngineOptions()
        layers = cached_layers(model)
        config = cache_config or cache_config_for(layers, num_blocks=1024)
        max_model_len = options.max_model_len or _longest_request(model, config)
        self.options = options
        self.tokenizer = tokenizer
        self.stats = EngineStats()
        self.manager = KVCacheManager(
            config,
            max_model_len=max_model_len,
            max_num_batched_tokens=options.max_num_batched_tokens,
            enable_caching=options.enable_caching,
        )
        self.scheduler = Scheduler(self.manager, max_num_running=options.max_num_running)
        self._runner = ModelRunner(
            model, layers, config, max_num_running=options.max_num_running, max_model_len=max_model_len
        )
        self._poison = Poison(self.manager, self._runner.storage) if options.poison else None
        self._hasher = BlockHasher.for_config(config)
        self._device = model.device
        self._clock = clock
        self._live: dict[str, LiveRequest] = {}
        self._ids = itertools.count()

    # -- whole answers -------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = GREEDY
    ) -> list[Completion]:
        """Answer all prompts, in their order. ``params`` is for all of them, or one each."""
        done: dict[str, Completion] = {}
        request_ids = self._add_all(prompts, params)
        for delta in self._run(set(request_ids)):
            if delta.completion is not None:
                done[delta.request_id] = delta.completion
        return [done[request_id] for request_id in request_ids]

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = GREEDY
    ) -> Iterator[Delta]:
        """Answer all prompts; gives every token when it is there.

        Request ids count up from ``"0"`` in the order in which the engine got its prompts. What is not finished when
        the iterator is closed is aborted.
        """
        request_ids = self._add_all(prompts, params)
        return self._run(set(request_ids))

    # -- one request, one step -----------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._live)

    def add(self, prompt: Prompt, params: SamplingParams = GREEDY, request_id: str | None = None) -> str:
        """Queue a prompt; gives its id. Raises what `Scheduler.add` raises."""
        token_ids = self._encode(prompt)
        request = Request(
            str(next(self._ids)) if request_id is None else request_id,
            token_ids,
            block_hasher=self._hasher,
            max_tokens=params.max_tokens,
        )
        self.scheduler.add(request)
        self._live[request.request_id] = LiveRequest(
            request, params, params.generator(self._device), self.tokenizer, self._clock()
        )
        return request.request_id

    def abort(self, request_id: str) -> Completion:
        """End a request now; gives what there is of its answer. Raises ``UnknownRequestError``."""
        self.scheduler.abort(request_id)
        return self._live.pop(request_id).completion(self._clock())

    def step(self) -> list[Delta]:
        """Run one step; gives a token for each request that got one, and every answer that ended."""
        started = self._clock()
        output = self.scheduler.schedule()
        self.stats.peak_usage = max(self.stats.peak_usage, self.manager.usage)
        sampled = self._compute(output) if output.scheduled else {}
        stopped = {id_ for id_, token in sampled.items() if self._live[id_].is_stop(token)}
        finished = self.scheduler.update(output, {id_: [token] for id_, token in sampled.items()}, stopped=stopped)
        now = self._clock()
        self._count(output, len(sampled), now - started)
        if self.options.check:
            check_manager(self.manager)
        return self._deltas(sampled, {request.request_id for request in finished}, now)

    # -- inside a step -------------------------------------------------------------------------

    def _compute(self, output: SchedulerOutput) -> dict[str, int]:
        """Run the model; gives the next token of each request that samples."""
        if self._poison is not None:
            self._poison.before(output)
        logits = self._runner.run(output)
        sampling = [self._live[s.request.request_id] for s in output.scheduled if s.samples]
        tokens = sample(logits, [(live.params, live.generator) for live in sampling])
        now = self._clock()
        for live, row in zip(sampling, logits, strict=True):
            live.take(row, now)
        return {live.request.request_id: token for live, token in zip(sampling, tokens, strict=True)}

    def _count(self, output: SchedulerOutput, num_generated: int, seconds: float) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.num_generated_tokens += num_generated
        stats.num_preemptions += len(output.preempted)
        stats.seconds += seconds
        for scheduled in output.scheduled:
            if scheduled.is_prefill:
                stats.num_prefill_tokens += scheduled.num_tokens
            else:
                stats.num_decode_tokens += scheduled.num_tokens
            live = self._live[scheduled.request.request_id]
            if scheduled.num_cached_tokens is not None:
                stats.num_cached_tokens += scheduled.num_cached_tokens
                live.admitted(scheduled.num_cached_tokens)

    def _deltas(self, sampled: dict[str, int], finished: set[str], now: float) -> list[Delta]:
        deltas = []
        for request_id in dict.fromkeys([*sampled, *finished]):
            live, is_last = self._live[request_id], request_id in finished
            deltas.append(
                Delta(
                    request_id=request_id,
                    token_id=sampled.get(request_id),
                    text=live.new_text(is_last=is_last),
                    completion=live.completion(now) if is_last else None,
                )
            )
        for request_id in finished:
            del self._live[request_id]
        return deltas

    # -- prompts -------------------------------------------------------------------------------

    def _add_all(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[str]:
        """Queue all prompts, or none."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if len(each) != len(prompts):
            raise InvalidRequestError(f"got {len(each)} sampling parameters for {len(prompts)} prompts; give one each")
        added: list[str] = []
        try:
            for prompt, its_params in zip(prompts, each, strict=True):
                added.append(self.add(prompt, its_params))
        except Exception:
            for request_id in added:
                self.abort(request_id)
            raise
        return added

    def _run(self, request_ids: set[str]) -> Iterator[Delta]:
        """Step until these requests are done; whatever else runs beside them goes on too."""
        try:
            while request_ids & self._live.keys():
                yield from (delta for delta in self.step() if delta.request_id in request_ids)
        finally:
            for request_id in request_ids & self._live.keys():
                self.abort(request_id)

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise InvalidRequestError("the engine has no tokenizer; give prompts as token ids")
        token_ids: list[int] = self.tokenizer.encode(prompt)
        return token_ids


def _longest_request(model: PreTrainedModel, config: CacheConfig) -> int:
    """What the model was made for, but not more than a request that has all groups' blocks to itself."""
    limit: int = model.config.get_text_config().max_position_embeddings
    return min(limit, (config.num_blocks - 1) * max(spec.block_size for spec in config.specs))
