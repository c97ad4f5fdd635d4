"""The options of a plan on the command line: one definition for plan, replay and sweep."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_type_hints

import typer

from ..errors import ConfigError
from .memory import KV_DTYPES
from .plan import PlanOptions
from .units import parse_bytes, parse_tokens

__all__ = ["PlanArguments", "with_options"]


@dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """One field an option, in the order of the help."""

    block_size: Annotated[int, typer.Option(help="Tokens in the smallest block.")] = 16
    max_model_len: Annotated[str | None, typer.Option(help="Longest sequence: 32k. Default: the model's.")] = None
    max_num_batched_tokens: Annotated[
        str | None,
        typer.Option(
            "--max-num-batched-tokens",
            "--max-batched-tokens",
            help="Most tokens in one step; windows need room for them. Default: 2k, in a replay 8k.",
        ),
    ] = None
    weights_memory: Annotated[
        str | None, typer.Option(help="What weights and the rest take of the memory: 16GiB. Default: an estimate.")
    ] = None
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Fraction of the memory that weights and cache may take.")
    ] = 1.0
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs that share each layer.")] = 1
    pipeline_parallel: Annotated[int, typer.Option(min=1, help="Stages that share the layers.")] = 1
    data_parallel: Annotated[int, typer.Option(min=1, help="Replicas, each with a cache of its own.")] = 1
    decode_context_parallel: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel GPUs that share the tokens of a block.")
    ] = 1
    prefill_context_parallel: Annotated[
        int, typer.Option(min=1, help="More GPUs that share the tokens of a block.")
    ] = 1
    kv_dtype: Annotated[
        str | None, typer.Option(help=f"auto, {', '.join(KV_DTYPES)}. Default: the checkpoint's, else the model's.")
    ] = None
    state_dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16 for recurrent states. Default: the model's.")
    ] = None
    state_mode: Annotated[str, typer.Option(help="States kept: align, all or none.")] = "align"
    speculative: Annotated[
        str | None, typer.Option(help="Drafter: mtp:TOKENS, eagle:CONFIG[:TOKENS] or draft:CONFIG[:TOKENS].")
    ] = None
    assume: Annotated[
        Literal["full"] | None, typer.Option(help="full: count a family that is not known as plain full attention.")
    ] = None

    def options(self, memory: str, *, default_step: int = 2048) -> PlanOptions:
        """The plan's options for a memory such as ``80GiB``. Raises ``ConfigError``."""
        return PlanOptions(
            memory_bytes=parse_bytes(memory),
            weights_bytes=None if self.weights_memory is None else parse_bytes(self.weights_memory),
            gpu_memory_utilization=self.gpu_memory_utilization,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            data_parallel=self.data_parallel,
            decode_context_parallel=self.decode_context_parallel,
            prefill_context_parallel=self.prefill_context_parallel,
            kv_dtype=self.kv_dtype,
            state_dtype=self.state_dtype,
            state_mode=self.state_mode,  # type: ignore[arg-type]  # PlanOptions checks it
            block_size=self.block_size,
            max_model_len=None if self.max_model_len is None else parse_tokens(self.max_model_len),
            max_step=self.step(default_step),
            speculative=self.speculative,
            assume_full=self.assume == "full",
        )

    def step(self, default: int) -> int:
        """Most tokens in one step. Raises ``ConfigError``."""
        return default if self.max_num_batched_tokens is None else parse_tokens(self.max_num_batched_tokens)

    def refuse_without_model(self) -> None:
        """Options that only say something of a model. Raises ``ConfigError`` naming the first that is given."""
        for field in fields(self)[3:]:
            if getattr(self, field.name) != field.default:
                raise ConfigError(f"--{field.name.replace('_', '-')} says something of a model; give --model too")


def with_options(**shared: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of dataclasses as options, instead of the parameters that are named here."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = {name: _options_of(cls) for name, cls in shared.items()}
        own = inspect.signature(command, eval_str=True).parameters

        def run(**arguments: Any) -> None:
            made = {
                name: shared[name](**{option.name: arguments.pop(option.name) for option in options[name]})
                for name in shared
            }
            command(**arguments, **made)

        functools.update_wrapper(run, command)
        del run.__wrapped__  # type: ignore[attr-defined]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, p in own.items() if name not in shared]
        for each in options.values():
            parameters += each
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _options_of(cls: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(cls, include_extras=True)
    return [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(cls)
    ]
