"""Readers: every format by its content, from every kind of source, and what they say of faults."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpager.errors import TraceError
from kvpager.replay import BlockIds, Session, TokenContent, TraceRequest, count_requests, read_trace

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes lines (dicts as JSON) under a name that says nothing about their format."""

    def write(*lines: object, name: str = "trace.data", pack: bool = False) -> str:
        text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines).encode()
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(text) if pack else text)
        return str(path)

    return write


def mooncake(timestamp: float, length: int, ids: list[int], output: int = 5) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": ids}


def session(*requests: dict[str, Any], block_size: int = 64) -> dict[str, Any]:
    return {"id": "s", "block_size": block_size, "requests": list(requests)}


def turn(t: float, length: int, runs: list[list[int]], out: int = 7) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": length, "out": out, "runs": runs}


MOONCAKE = (mooncake(1000, 513, [70, 71]), mooncake(1500, 1024, [70, 9], 8))
MOONCAKE_READ = [
    Session(0.0, (TraceRequest(0.0, 513, 5, BlockIds(512, ((0, 2),))),)),
    Session(0.5, (TraceRequest(0.0, 1024, 8, BlockIds(512, ((0, 1), (2, 1)))),)),
]


def test_mooncake_ids_become_small_numbers_and_time_starts_at_the_first_request(write: Write) -> None:
    assert list(read_trace(write(*MOONCAKE))) == MOONCAKE_READ


@pytest.mark.parametrize("pack", [False, True])
def test_packed_and_from_stdin(write: Write, monkeypatch: pytest.MonkeyPatch, pack: bool) -> None:
    path = write(*MOONCAKE, pack=pack)
    assert list(read_trace(path)) == MOONCAKE_READ
    stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(path)))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert list(read_trace("-")) == MOONCAKE_READ
    assert not stdin.closed
    stdin.close()


def test_azure(write: Write) -> None:
    path = write(
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    )
    first, second = read_trace(path)
    assert first.requests == (TraceRequest(0.0, 374, 44, None),)
    assert second.start == pytest.approx(4.314579)
    assert second.requests == (TraceRequest(0.0, 396, 109, None),)


def test_tokens_with_and_without_time(write: Write) -> None:
    path = write(
        {"prompt_token_ids": [5, 6], "output_length": 3, "timestamp": 2000},
        {"prompt_token_ids": [5], "output_length": 0},
        {"prompt_token_ids": [2**32 - 1], "output_length": 1, "timestamp": 2500},
    )
    assert list(read_trace(path)) == [
        Session(0.0, (TraceRequest(0.0, 2, 3, TokenContent([5, 6])),)),
        Session(0.0, (TraceRequest(0.0, 1, 0, TokenContent([5])),)),
        Session(0.5, (TraceRequest(0.0, 1, 1, TokenContent([2**32 - 1])),)),
    ]


NESTED = session(
    turn(0, 130, [[1, 2]]),
    {
        "t": 10.0,
        "type": "subagent",
        "agent_id": "a",
        "requests": [turn(0, 64, [[1, 1]]), turn(5, 200, [[1, 1], [7, 2]])],
    },
    turn(12, 192, [[1, 3]]),
)
NESTED_READ = [
    TraceRequest(0.0, 130, 7, BlockIds(64, ((1, 2),))),
    TraceRequest(10.0, 64, 7, BlockIds(64, ((1, 1),))),
    TraceRequest(12.0, 192, 7, BlockIds(64, ((1, 3),))),
    TraceRequest(15.0, 200, 7, BlockIds(64, ((1, 1), (7, 2)))),
]


def test_sub_agents_run_on_their_parents_clock(write: Write) -> None:
    [read] = read_trace(write(NESTED))
    assert read == Session(0.0, NESTED_READ)


def test_sessions_start_one_after_another_and_share_no_ids(write: Write) -> None:
    first, second = read_trace(write(NESTED, session(turn(1, 64, [[0, 1]]))))
    assert first.requests == NESTED_READ
    assert second == Session(30.0, [TraceRequest(1.0, 64, 7, BlockIds(64, ((9, 1),)))])  # ids up to 8 are the first's


def test_ids_spelled_out_are_the_same_as_runs(write: Write) -> None:
    spelled = turn(3, 5 * 64, [])
    del spelled["runs"]
    spelled["hash_ids"] = [4, 5, 6, 2, 9]
    [read] = read_trace(write(session(spelled)))
    assert read.requests == [TraceRequest(3.0, 320, 7, BlockIds(64, ((4, 3), (2, 1), (9, 1))))]


def test_one_pretty_printed_session(write: Write) -> None:
    [read] = read_trace(write(json.dumps(NESTED, indent=2)))
    assert read == Session(0.0, NESTED_READ)


def test_a_directory_of_sessions(write: Write, tmp_path: Path) -> None:
    write(json.dumps(NESTED, indent=2), name="dir/b.json")
    write(session(turn(0, 64, [[3, 1]])), session(turn(0, 64, [[3, 1]])), name="dir/a.jsonl.gz", pack=True)
    write("not a trace", name="dir/.hidden")
    starts = [(s.start, len(s.requests)) for s in read_trace(str(tmp_path / "dir"))]
    assert starts == [(0.0, 1), (30.0, 1), (60.0, 4)]


def test_counting_stops_at_the_limit(write: Write) -> None:
    path = write(NESTED, NESTED, "{broken")
    assert count_requests(path, 8) == 8
    assert count_requests(path, 5) == 5
    with pytest.raises(TraceError):
        count_requests(path)


def test_reading_streams() -> None:
    """The first request is there before the rest of the file is."""

    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            line = json.dumps(mooncake(0, 1, [3])).encode() + b"\n"
            buffer[: len(line)] = line
            return len(line)

    sessions = read_trace("-")
    with pytest.MonkeyPatch.context() as patch:
        stdin = io.TextIOWrapper(io.BufferedReader(Endless()))
        patch.setattr(sys, "stdin", stdin)
        assert [next(sessions).start for _ in range(1000)] == [0.0] * 1000


GOOD = mooncake(0, 512, [1])


@pytest.mark.parametrize(
    ("lines", "line", "fault"),
    [
        ((GOOD, "{"), 2, "truncated"),
        ((GOOD, "", "[]"), 3, "array"),
        ((GOOD, mooncake(0, 0, [])), 2, "input_length"),
        ((GOOD, mooncake(0, 513, [1])), 2, "1 hash_ids for an input_length of 513"),
        ((GOOD, {**GOOD, "output_length": "9"}), 2, "output_length"),
        ((mooncake(7, 1, [1]), GOOD), 2, "timestamp is before"),
        (({"prompt_token_ids": [1, -1], "output_length": 1},), 1, r"prompt_token_ids\[1|\.\.\.\]"),
        (({"prompt_token_ids": [2**32], "output_length": 1},), 1, "prompt_token_ids"),
        (({"prompt_token_ids": [], "output_length": 1},), 1, "prompt_token_ids"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,1"), 2, "2 columns"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,1"), 2, "yesterday"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-13-16 18:15:46,1,1"), 2, "month"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,x,1"), 2, "ContextTokens 'x'"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,0,1"), 2, "ContextTokens is 0"),
        (("TIMESTAMP,Tokens",), 1, "columns TIMESTAMP,Tokens"),
        ((NESTED, session(turn(0, 128, [[1, 1]]))), 2, "1 block ids for 128 tokens"),
        ((NESTED, session()), 2, "without requests"),
        ((NESTED, session(turn(0, 64, [[2**24 - 1, 1], [2**24, 0]]))), 2, "runs"),
        ((NESTED, session(turn(0, 128, [[2**24 - 1, 2]]))), 2, "block ids up to"),
        ((NESTED, session({"t": 0, "in": 64, "out": 1})), 2, "either as runs or as hash_ids"),
        ((NESTED, session({"t": 0, "runs": [[1, 1]]})), 2, "in and out"),
        ((NESTED, {"block_size": 0, "requests": []}), 2, "block_size"),
    ],
)
def test_one_fault_is_told_with_its_line(write: Write, lines: tuple[object, ...], line: int, fault: str) -> None:
    path = write(*lines)
    with pytest.raises(TraceError, match=fault) as error:
        list(read_trace(path))
    assert f"{path}, line {line}: " in str(error.value)
    assert "expected " in str(error.value)
    assert "\n" not in str(error.value)


def test_nesting_without_end_is_a_fault(write: Write) -> None:
    deep: dict[str, Any] = turn(0, 64, [[1, 1]])
    text = '{"t": 0, "requests": [' * 3000 + json.dumps(deep) + "]}" * 3000
    with pytest.raises(TraceError, match=r"line 2: .*recursion"):
        list(read_trace(write(NESTED, f'{{"block_size": 64, "requests": [{text}]}}')))
    with pytest.raises(TraceError, match="known format"):
        list(read_trace(write("[" * 100_000)))


def test_several_faults_are_listed_together_and_nothing_is_given_out_behind_the_first(write: Write) -> None:
    path = write(GOOD, mooncake(0, 600, [1]), GOOD, "nonsense", GOOD)
    sessions = read_trace(path)
    next(sessions)
    with pytest.raises(TraceError) as error:
        next(sessions)
    head, *listed = str(error.value).splitlines()
    assert head.startswith(f"{path} has 2 faulty places; expected Mooncake lines")
    assert [line.split(":")[0] for line in listed] == ["  line 2", "  line 4"]


def test_the_first_ten_faults_are_listed(write: Write) -> None:
    path = write(GOOD, *["nonsense"] * 10, GOOD)
    with pytest.raises(TraceError) as error:
        list(read_trace(path))
    assert str(error.value).count("\n  line ") == 10
    path = write(GOOD, *["nonsense"] * 50)
    with pytest.raises(TraceError, match="more than 10 faulty places") as error:
        list(read_trace(path))
    assert [int(line.split()[1].strip(":")) for line in str(error.value).splitlines()[1:]] == list(range(2, 12))


def test_a_faulty_first_line_does_not_hide_the_format(write: Write) -> None:
    with pytest.raises(TraceError, match=r"line 1: .*expected Mooncake"):
        list(read_trace(write("{nonsense", GOOD)))


def test_faults_inside_a_pretty_printed_session_have_their_own_lines(write: Write) -> None:
    broken = session(turn(0, 64, [[1, 1]]), {"t": 1, "requests": [turn(0, 65, [])]}, turn(3, -1, []))
    text = json.dumps(broken, indent=1)
    path = write(text)
    with pytest.raises(TraceError) as error:
        list(read_trace(path))
    lines = [int(line.split()[1].strip(":")) for line in str(error.value).splitlines()[1:]]
    starts = [number for number, line in enumerate(text.splitlines(), 1) if line.strip() in "{"]
    assert lines == [starts[3], starts[4]]  # of the sub-agent's request and of the last one


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ("hello", "known format"),
        ('{"a": 1}', "none of the keys"),
        ('{\n"a": \n', "line 2"),
    ],
)
def test_what_is_no_trace(write: Write, text: str, fault: str) -> None:
    with pytest.raises(TraceError, match=fault) as error:
        list(read_trace(write(text)))
    for kind in ("Mooncake", "coding-agent", "Azure", "token lines"):
        assert kind in str(error.value)


def test_sources_that_cannot_be_read(write: Write, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        list(read_trace(str(tmp_path / "absent")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="no files"):
        list(read_trace(str(tmp_path / "empty")))
    write(GOOD, name="mixed/a")
    with pytest.raises(TraceError, match="in a directory every file must be coding-agent sessions"):
        list(read_trace(str(tmp_path / "mixed")))
    packed = gzip.compress(json.dumps(GOOD).encode() * 1000)
    (tmp_path / "short.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match="damaged gzip"):
        list(read_trace(str(tmp_path / "short.gz")))
    (tmp_path / "binary").write_bytes(b'{"input_length": "\xff\xfe"}\n' * 3)
    with pytest.raises(TraceError):
        list(read_trace(str(tmp_path / "binary")))
