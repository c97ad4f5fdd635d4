"""The command line. Turns arguments into options and prints report objects; decides nothing."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Annotated, Any, BinaryIO, Literal, get_type_hints

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer.core import TyperGroup

from .config import CacheConfig
from .errors import ConfigError, InvariantError, KVPagerError
from .events import KVCacheEvent
from .planner import PlanOptions, load_cache_config
from .planner.cli import plan_command
from .planner.units import parse_bytes
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
def _app() -> None:
    """The KV-cache manager of an LLM inference engine, at work on request traces."""


def _option(*names: str, help: str, **limits: Any) -> Any:
    return typer.Option(*names, help=help, show_default=True, **limits)


@dataclass(frozen=True, kw_only=True)
class _Common:
    """What replay and sweep share: one field an option, in the order of the help."""

    block_size: Annotated[int, _option("--block-size", help="Tokens in a block.")] = 16
    groups: Annotated[
        str,
        _option("--groups", help="full, mla, sliding:W, chunked:C, mamba[:mode], reference:W, sink:T; joined by +."),
    ] = "full"
    max_model_len: Annotated[int, _option("--max-model-len", help="Longest sequence, in tokens.")] = 1 << 20
    max_batched_tokens: Annotated[int, _option("--max-batched-tokens", help="Token budget of a step.")] = 8192
    max_running: Annotated[int, _option("--max-running", help="Most requests that run at once.")] = 256
    lookahead: Annotated[int, _option("--lookahead", help="Slots kept ahead for a drafter, in tokens.")] = 0
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


def _with_common(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `_Common` instead of its parameter ``common``."""
    hints = get_type_hints(_Common, include_extras=True)
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(_Common)
    ]
    own = inspect.signature(command, eval_str=True).parameters

    def run(**arguments: Any) -> None:
        common = _Common(**{parameter.name: arguments.pop(parameter.name) for parameter in shared})
        command(common=common, **arguments)

    functools.update_wrapper(run, command)
    del run.__wrapped__  # type: ignore[attr-defined]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, p in own.items() if name != "common"]
    run.__signature__ = inspect.Signature(parameters + shared)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters + shared}
    return run


_Trace = Annotated[
    str | None,
    typer.Argument(metavar="[TRACE]", help="Trace file or directory, - for stdin; none: a built-in workload."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("replay")
@_with_common
def _replay(
    *,
    trace: _Trace = None,
    common: _Common,
    num_blocks: Annotated[int | None, _option("--num-blocks", help="Cache size in blocks (default: 20000).")] = None,
    kv_memory: Annotated[str | None, _option("--kv-memory", help="Cache size as memory, like 40GiB.")] = None,
    kv_bytes_per_token: Annotated[
        int | None, _option("--kv-bytes-per-token", help="K/V bytes of a token, all layers together.")
    ] = None,
    model: Annotated[
        str | None, _option("--model", help="A model's config.json: its layout instead of --groups; with --memory.")
    ] = None,
    memory: Annotated[str | None, _option("--memory", help="With --model: memory for K/V, like 40GiB.")] = None,
    check: Annotated[int, _option("--check", help="Check all invariants each N steps (0: never).")] = 0,
    as_json: _Json = False,
    plot: Annotated[str | None, _option("--plot", help="Draw usage, requests and hit rate to a .png or .svg.")] = None,
    events: Annotated[str | None, _option("--events", help="Write the event stream as JSON lines.")] = None,
) -> None:
    """Drive scheduler and manager through a trace and report what the cache did."""
    sizes = {"num_blocks": num_blocks, "kv_memory": kv_memory, "kv_bytes_per_token": kv_bytes_per_token}
    if model is not None or memory is not None:
        config = _config_of_model(model, memory, common, sizes)
    else:
        config = cache_config(common.groups, common.block_size, **sizes)  # type: ignore[arg-type]
    options = _replay_options(common, config=config, check_every=check)
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
@_with_common
def _sweep(
    *,
    trace: _Trace = None,
    common: _Common,
    num_blocks: Annotated[str, _option("--num-blocks", help="Cache sizes in blocks, like 1000,2000,4000.")],
    jobs: Annotated[int | None, _option("--jobs", help="Processes at once (default: one for each CPU).")] = None,
    as_json: _Json = False,
    plot: Annotated[str, _option("--plot", help="Where to draw hit rate against size, .png or .svg.")] = "sweep.png",
) -> None:
    """Replay a trace at several cache sizes and draw hit rate against size."""
    sizes = _sizes(num_blocks)
    config = cache_config(common.groups, common.block_size, num_blocks=max(sizes))
    options = _replay_options(common, config=config)
    check_plot_path(plot)
    with _progress("sweep", len(sizes)) as progress:
        reports = sweep(Input(path=trace, seed=common.seed), options, sizes, num_processes=jobs, progress=progress)
    plot_sweep(reports, plot)
    rows = [{"num_blocks": size, **msgspec.to_builtins(report)} for size, report in reports]
    _print(rows if as_json else sweep_table(reports), as_json=as_json)


def _config_of_model(
    model: str | None, memory: str | None, common: _Common, sizes: Mapping[str, object]
) -> CacheConfig:
    if model is None or memory is None:
        raise ConfigError("--model and --memory go together: the layout comes from the one, its size from the other")
    if common.groups != _Common.groups or any(size is not None for size in sizes.values()):
        raise ConfigError("--model says layout and size: leave out --groups, --num-blocks and --kv-…")
    return load_cache_config(
        model,
        PlanOptions(memory_bytes=parse_bytes(memory), block_size=common.block_size, max_step=common.max_batched_tokens),
    )


def _replay_options(common: _Common, **more: Any) -> ReplayOptions:
    return ReplayOptions(
        max_model_len=common.max_model_len,
        max_num_batched_tokens=common.max_batched_tokens,
        max_num_running=common.max_running,
        num_lookahead_tokens=common.lookahead,
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
