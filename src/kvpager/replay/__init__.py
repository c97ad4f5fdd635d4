"""Traces in, report out: the manager at work without a model."""

from .arrivals import Arrival, Arrivals, ClosedLoop, TraceClock
from .content import Prompt, PromptMaker
from .layout import DEFAULT_NUM_BLOCKS, cache_config, num_blocks_in, parse_groups
from .options import ReplayOptions, StepTime
from .records import BlockIds, Session, TokenContent, TraceRequest
from .report import QueueTime, ReplayOutcome, ReplayReport, report_table
from .simulate import replay
from .sweep import Input, sweep, sweep_table
from .traces import count_requests, read_trace
from .workload import NUM_WORKLOAD_REQUESTS, builtin_workload

__all__ = [
    "DEFAULT_NUM_BLOCKS",
    "NUM_WORKLOAD_REQUESTS",
    "Arrival",
    "Arrivals",
    "BlockIds",
    "ClosedLoop",
    "Input",
    "Prompt",
    "PromptMaker",
    "QueueTime",
    "ReplayOptions",
    "ReplayOutcome",
    "ReplayReport",
    "Session",
    "StepTime",
    "TokenContent",
    "TraceClock",
    "TraceRequest",
    "builtin_workload",
    "cache_config",
    "count_requests",
    "num_blocks_in",
    "parse_groups",
    "read_trace",
    "replay",
    "report_table",
    "sweep",
    "sweep_table",
]
