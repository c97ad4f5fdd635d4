"""The command line. Turns arguments into options and prints report objects; decides nothing."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer.core import TyperGroup

from .config import CacheConfig
from .errors import ConfigError, InvariantError, KVPagerError
from .events import KVCacheEvent
from .planner import Plan, plan
from .planner.arguments import PlanArguments, with_options
from .planner.cli import plan_command
from .planner.units import parse_tokens
from .replay import (
    NUM_WORKLOAD_REQUESTS,
    Input,
    ReplayOptions,
    StepTime,
    builtin_workload,
    cache_config,
    count_requests,
    read_trace,
    replay,
    report_table,
    sweep,
    sweep_table,
)
from .replay.plot import check_plot_path, plot_replay, plot_sweep
from .replay.sources import STDIN

__all__ = ["app", "main"]

_APP: dict[str, Any] = {
    "add_completion": False,
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
}


class _Commands(TyperGroup):
    """All commands; ``generate`` is looked for when it is asked for: it needs PyTorch, which few installs have."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), "generate"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _generate() if cmd_name == "generate" else super().get_command(ctx, cmd_name)


def _generate() -> Any:
    alone = typer.Typer(**{**_APP, "no_args_is_help": False})
    try:
        from .engine.cli import generate_command
    except ModuleNotFoundError as missing:
        alone.command("generate", context_settings=_ANY_ARGUMENTS)(_without_engine(missing.name))
    else:
        alone.command("generate")(generate_command)
    return typer.main.get_command(alone)


_ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def _without_engine(missing: str | None) -> Callable[[], None]:
    def command() -> None:
        """Answer prompts with a real model (needs kvpager[engine])."""
        raise ConfigError(f"generate runs a real model and needs {missing}; install it: pip install 'kvpager[engine]'")

    return command


app = typer.Typer(cls=_Commands, **_APP)
app.command("plan")(plan_command)

_DEFAULT_STEP = 8192
_EXIT_INVARIANT = 1
_EXIT_BAD_INPUT = 2


def main() -> None:
    """Entry point of the ``kvpager`` command.

    Exit codes: 0; 2 with one message for anything wrong with the input; 1 for a broken invariant,
    which is a bug in kvpager.
    """
    try:
        with _plain_warnings():
            app()
    except InvariantError as error:
        _fail(f"broken invariant, a bug in kvpager: {error}", _EXIT_INVARIANT)
    except (KVPagerError, OSError) as error:
        _fail(str(error), _EXIT_BAD_INPUT)


@app.callback()
def _app(context: typer.Context) -> None:
    """The KV-cache manager of an LLM inference engine, at work on request traces."""
    context.obj = _lengths_of_trace  # for the planner, which knows no traces


def _lengths_of_trace(trace: str) -> Iterator[int]:
    """Tokens of each request, prompt and output."""
    for session in read_trace(trace):
        for request in session.requests:
            yield request.num_prompt_tokens + request.num_output_tokens


def _option(*names: str, help: str, **limits: Any) -> Any:
    return typer.Option(*names, help=help, show_default=True, **limits)


@dataclass(frozen=True, kw_only=True)
class _Common:
    """What replay and sweep share: one field an option, in the order of the help."""

    groups: Annotated[
        str,
        _option("--groups", help="full, mla, sliding:W, chunked:C, mamba[:mode], reference:W, sink:T; joined by +."),
    ] = "full"
    max_running: Annotated[int, _option("--max-running", help="Most requests that run at once.")] = 256
    model: Annotated[
        str | None, _option("--model", help="A model's config.json: its layout instead of --groups; with --memory.")
    ] = None
    lookahead: Annotated[
        int | None, _option("--lookahead", help="Slots kept ahead for a drafter, in tokens. Default: --speculative's.")
    ] = None
    chunked_prefill: Annotated[
        bool, typer.Option("--chunked-prefill/--no-chunked-prefill", help="Spread a prompt over several steps.")
    ] = True
    full_sequence_must_fit: Annotated[
        bool,
        typer.Option("--full-sequence/--first-chunk", help="Admit only what fits as a whole, or what fits for a step."),
    ] = True
    watermark: Annotated[float, _option("--watermark", help="Fraction of blocks that newcomers leave free.")] = 0.0
    eviction_order: Annotated[
        Literal["dead_first", "recency"], _option("--eviction-order", help="Who is evicted first.")
    ] = "dead_first"
    arrivals: Annotated[
        str, _option("--arrivals", help="trace: by the trace's clock; N: always N requests in flight.")
    ] = "trace"
    step_ms: Annotated[float, _option("--step-ms", help="Step time: constant part, in ms.")] = 10.0
    prefill_ms: Annotated[float, _option("--prefill-ms", help="Step time: ms for each prefill token.")] = 0.05
    decode_ms: Annotated[float, _option("--decode-ms", help="Step time: ms for each decoding request.")] = 0.02
    seed: Annotated[int, _option("--seed", help="Seed of the built-in workload.")] = 0
    limit: Annotated[int | None, _option("--limit", help="Only the first so many requests.")] = None
    expand_ids: Annotated[
        bool, typer.Option("--expand-ids", help="Hash made-up tokens even where block ids would do as hashes.")
    ] = False


_Trace = Annotated[
    str | None,
    typer.Argument(metavar="[TRACE]", help="Trace file or directory, - for stdin; none: a built-in workload."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("replay")
@with_options(common=_Common, layout=PlanArguments)
def _replay(
    *,
    trace: _Trace = None,
    common: _Common,
    layout: PlanArguments,
    num_blocks: Annotated[int | None, _option("--num-blocks", help="Cache size in blocks (default: 20000).")] = None,
    kv_memory: Annotated[str | None, _option("--kv-memory", help="Cache size as memory, like 40GiB.")] = None,
    kv_bytes_per_token: Annotated[
        int | None, _option("--kv-bytes-per-token", help="K/V bytes of a token, all layers together.")
    ] = None,
    memory: Annotated[str | None, _option("--memory", help="With --model: memory of one GPU, like 80GiB.")] = None,
    check: Annotated[int, _option("--check", help="Check all invariants each N steps (0: never).")] = 0,
    as_json: _Json = False,
    plot: Annotated[str | None, _option("--plot", help="Draw usage, requests and hit rate to a .png or .svg.")] = None,
    events: Annotated[str | None, _option("--events", help="Write the event stream as JSON lines.")] = None,
) -> None:
    """Drive scheduler and manager through a trace and report what the cache did."""
    sizes = {"num_blocks": num_blocks, "kv_memory": kv_memory, "kv_bytes_per_token": kv_bytes_per_token}
    if common.model is not None or memory is not None:
        options = _options_of_model(_plan_of(common, layout, memory, sizes), common, check_every=check)
    else:
        config = cache_config(common.groups, layout.block_size, **sizes)  # type: ignore[arg-type]
        options = _options_of_groups(config, common, layout, check_every=check)
    if plot is not None:
        check_plot_path(plot)
    sessions = builtin_workload(common.seed) if trace is None else read_trace(trace)
    with ExitStack() as stack:
        sink = None if events is None else _event_writer(stack.enter_context(open(events, "wb")))
        progress = stack.enter_context(_progress("replay", _num_requests(trace, common.limit)))
        outcome = replay(sessions, options, progress=progress, event_sink=sink)
    if plot is not None:
        plot_replay(outcome, plot)
    _print(outcome.report if as_json else report_table(outcome), as_json=as_json)


@app.command("sweep")
@with_options(common=_Common, layout=PlanArguments)
def _sweep(
    *,
    trace: _Trace = None,
    common: _Common,
    layout: PlanArguments,
    num_blocks: Annotated[
        str | None, _option("--num-blocks", help="Cache sizes in blocks, like 1000,2000,4000.")
    ] = None,
    memory: Annotated[
        str | None, _option("--memory", help="With --model: memories of one GPU, like 40GiB,80GiB.")
    ] = None,
    jobs: Annotated[int | None, _option("--jobs", help="Processes at once (default: one for each CPU).")] = None,
    as_json: _Json = False,
    plot: Annotated[str, _option("--plot", help="Where to draw hit rate against size, .png or .svg.")] = "sweep.png",
) -> None:
    """Replay a trace at several cache sizes and draw hit rate against size."""
    options, sizes = _swept(common, layout, num_blocks, memory)
    check_plot_path(plot)
    with _progress("sweep", len(sizes)) as progress:
        reports = sweep(Input(path=trace, seed=common.seed), options, sizes, num_processes=jobs, progress=progress)
    plot_sweep(reports, plot)
    rows = [{"num_blocks": size, **msgspec.to_builtins(report)} for size, report in reports]
    _print(rows if as_json else sweep_table(reports), as_json=as_json)


def _plan_of(common: _Common, layout: PlanArguments, memory: str | None, sizes: Mapping[str, object]) -> Plan:
    if common.model is None or memory is None:
        raise ConfigError("--model and --memory go together: the layout comes from the one, its size from the other")
    if common.groups != _Common.groups or any(size is not None for size in sizes.values()):
        raise ConfigError("--model says layout and size: leave out --groups, --num-blocks and --kv-…")
    return plan(common.model, layout.options(memory, default_step=_DEFAULT_STEP))


def _swept(
    common: _Common, layout: PlanArguments, num_blocks: str | None, memory: str | None
) -> tuple[ReplayOptions, list[int]]:
    """What is swept, and the sizes in blocks."""
    if common.model is not None or memory is not None:
        memories = [None] if memory is None else memory.split(",")
        plans = [_plan_of(common, layout, each, {"num_blocks": num_blocks}) for each in memories]
        return _options_of_model(plans[0], common), [each.num_blocks for each in plans]
    if num_blocks is None:
        raise ConfigError("a sweep needs sizes: give --num-blocks 1000,2000, or --model with --memory 40GiB,80GiB")
    sizes = _sizes(num_blocks)
    config = cache_config(common.groups, layout.block_size, num_blocks=max(sizes))
    return _options_of_groups(config, common, layout), sizes


def _options_of_model(planned: Plan, common: _Common, **more: Any) -> ReplayOptions:
    """A replay of one replica of the model: its layout, longest sequence, drafter and encoder tokens."""
    return _replay_options(
        common,
        config=planned.cache_config,
        max_model_len=planned.max_model_len,
        max_num_batched_tokens=planned.options.max_step,
        num_lookahead_tokens=planned.num_drafted if common.lookahead is None else common.lookahead,
        num_encoder_tokens=planned.num_encoder_tokens,
        **more,
    )


def _options_of_groups(config: CacheConfig, common: _Common, layout: PlanArguments, **more: Any) -> ReplayOptions:
    layout.refuse_without_model()
    return _replay_options(
        common,
        config=config,
        max_model_len=1 << 20 if layout.max_model_len is None else parse_tokens(layout.max_model_len),
        max_num_batched_tokens=layout.step(_DEFAULT_STEP),
        num_lookahead_tokens=common.lookahead or 0,
        **more,
    )


def _replay_options(common: _Common, **more: Any) -> ReplayOptions:
    return ReplayOptions(
        max_num_running=common.max_running,
        enable_chunked_prefill=common.chunked_prefill,
        full_sequence_must_fit=common.full_sequence_must_fit,
        watermark=common.watermark,
        eviction_order=common.eviction_order,
        num_in_flight=None if common.arrivals == "trace" else _whole_number("--arrivals", common.arrivals, "trace or "),
        step_time=StepTime(
            base_ms=common.step_ms,
            ms_per_prefill_token=common.prefill_ms,
            ms_per_decoding_request=common.decode_ms,
        ),
        limit=common.limit,
        expand_ids=common.expand_ids,
        **more,
    )


def _sizes(text: str) -> list[int]:
    return [_whole_number("--num-blocks", size.strip(), "numbers joined by commas, each ") for size in text.split(",")]


def _whole_number(name: str, text: str, also: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 2**31:
        raise ConfigError(f"{name} takes {also}a whole number of at least 1, got {text!r}")
    return int(text)


def _num_requests(trace: str | None, limit: int | None) -> int | None:
    """How many there will be, for the progress bar; unknown for stdin, which can be read only once."""
    if trace == STDIN:
        return limit
    if trace is None:
        return min(NUM_WORKLOAD_REQUESTS, limit or NUM_WORKLOAD_REQUESTS)
    return count_requests(trace, limit)


def _event_writer(file: BinaryIO) -> Callable[[Sequence[KVCacheEvent]], None]:
    encoder = msgspec.json.Encoder()

    def write(events: Sequence[KVCacheEvent]) -> None:
        file.write(encoder.encode_lines(events))

    return write


@contextmanager
def _progress(name: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done: bar.update(task, completed=done)


def _print(result: Any, *, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(result).decode())
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(result)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as one line on stderr, without the place in the source."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_, **__: typer.echo(f"warning: {message}", err=True)
        yield


def _fail(message: str, code: int) -> None:
    typer.echo(f"error: {message}", err=True)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
