"""``python -m benchmarks``: the table of docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .compare import Result, as_json, growth, run
from .peers import Kvpager, load_vllm

NARROWEST = 122
"""Columns that the table takes without breaking a name."""


def main() -> int:
    """Run the cases, print a table, write JSON. Exit status 1 if a wanted ratio is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="kvpager beside vLLM 0.25.1's manager")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains TEXT")
    parser.add_argument("--repetitions", type=int, default=15, metavar="N", help="paired samples a row (default 15)")
    parser.add_argument("--small", action="store_true", help="without the pools of 1,000,000 blocks")
    parser.add_argument("--alone", action="store_true", help="kvpager only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    options = parser.parse_args()

    console, log = Console(), Console(stderr=True)
    console.width = max(console.width, NARROWEST)
    peer, missing = (None, "kvpager alone, as asked") if options.alone else load_vllm()
    if missing:
        log.print(f"note: {missing}")
    header = {
        "machine": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "kvpager": Kvpager().version,
        "vllm": peer.version if peer else None,
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
        "repetitions": options.repetitions,
    }
    results = list(
        run(
            peer,
            repetitions=options.repetitions,
            big=not options.small,
            only=options.only,
            note=lambda text: log.print(f"[dim]{text}[/dim]", highlight=False),
        )
    )
    console.print(table(results))
    if grown := growth_table(results):
        console.print(grown)
    if options.json:
        options.json.write_text(json.dumps(as_json(results, header), indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(results, header))
    return int(any(result.holds is False for result in results))


def processor() -> str:
    """What the machine calls its processor."""
    names = Path("/proc/cpuinfo")
    if names.exists():
        for line in names.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def table(results: list[Result]) -> Table:
    """One line a row and pool size."""
    out = Table(title="kvpager beside vLLM 0.25.1: median of paired samples")
    for column in ("what", "blocks", "kvpager", "vLLM", "unit", "ratio", "middle half", "wanted"):
        out.add_column(column, justify="left" if column in ("what", "unit") else "right", no_wrap=True)
    for r in results:
        span = f"{r.ratio_low:.1f}-{r.ratio_high:.1f}" if r.ratio_low and r.ratio_high else ""
        wanted = f"≤ {r.at_most:g}" if r.at_most else f"{r.at_least:.3g}x" if r.at_least else ""
        colour = {True: "green", False: "red", None: ""}[r.holds]
        ratio = f"{r.ratio:.3g}x" if r.ratio else f"{r.ours:.3g}" if colour else ""
        ratio = f"[{colour}]{ratio}[/{colour}]" if colour and ratio else ratio
        theirs = "" if r.theirs is None else f"{r.theirs:.4g}"
        out.add_row(
            r.name, f"{r.num_blocks:,}" if r.num_blocks else "", f"{r.ours:.4g}", theirs, r.unit, ratio, span, wanted
        )
    return out


def markdown(results: list[Result], header: dict[str, Any]) -> str:
    """The same as a page."""
    lines = [f"{key}: {value}" for key, value in header.items()]
    rows = [["what", "blocks", "kvpager", "vLLM", "unit", "ratio (middle half)", "wanted"], ["---"] * 7]
    rows += [_cells(result) for result in results]
    parts = ["; ".join(lines) + ".", _lines(rows)]
    if times := growth(results):
        grown = [["what", "with", "time of kvpager", "time of vLLM"], ["---"] * 4]
        grown += [[g["name"], g["times"], f"{g['ours']:.2f}", f"{g['theirs'] or 0:.2f}"] for g in times]
        parts += ["Growth, as times of the plain row's time:", _lines(grown)]
    return "\n\n".join(parts) + "\n"


def _lines(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cells(r: Result) -> list[str]:
    theirs = f"{r.theirs:.4g}" if r.theirs else ""
    ratio = f"{r.ratio:.3g}x" if r.ratio else ""
    if r.ratio_low and r.ratio_high:
        ratio += f" ({r.ratio_low:.3g}-{r.ratio_high:.3g})"
    wanted = f"≤ {r.at_most:g}" if r.at_most else f"{r.at_least:.3g}x" if r.at_least else ""
    met = {True: "", False: " (missed)", None: ""}[r.holds]
    return [r.name, f"{r.num_blocks:,}" if r.num_blocks else "", f"{r.ours:.4g}", theirs, r.unit, ratio, wanted + met]


def growth_table(results: list[Result]) -> Table | None:
    """How the time of a row grows with the pool and with the requests."""
    grown = growth(results)
    if not grown:
        return None
    out = Table(title="growth: times of the plain row's time")
    for column in ("what", "with", "kvpager", "vLLM"):
        out.add_column(column, justify="left" if column in ("what", "with") else "right")
    for row in grown:
        theirs = "" if row["theirs"] is None else f"{row['theirs']:.2f}"
        out.add_row(row["name"], row["times"], f"{row['ours']:.2f}", theirs)
    return out


if __name__ == "__main__":
    sys.exit(main())
