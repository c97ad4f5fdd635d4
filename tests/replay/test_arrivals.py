"""When requests arrive: the trace's clock, and N in flight."""

from __future__ import annotations

from kvpager.replay import ClosedLoop, Session, TraceClock, TraceRequest


def requests(*offsets: float) -> list[TraceRequest]:
    return [TraceRequest(offset, 1, 1, None) for offset in offsets]


def test_sessions_are_merged_by_time() -> None:
    clock = TraceClock([Session(0.0, requests(0, 50, 60)), Session(30.0, requests(0, 20, 100)), Session(31.0, [])])
    assert clock.next_time == 0.0
    assert [arrival.time for arrival in clock.poll(49.9)] == [0.0, 30.0]
    assert clock.next_time == 50.0
    assert [arrival.time for arrival in clock.poll(1e9)] == [50.0, 50.0, 60.0, 130.0]
    assert clock.next_time is None


def test_sessions_are_read_when_their_time_comes() -> None:
    read = []

    def sessions() -> object:
        for number in range(100):
            read.append(number)
            yield Session(30.0 * number, requests(0, 10))

    clock = TraceClock(sessions())  # type: ignore[arg-type]
    list(clock.poll(65.0))
    assert len(read) <= 5


def test_the_clock_heeds_the_limit() -> None:
    assert len(list(TraceClock([Session(0.0, requests(*range(9)))], limit=4).poll(1e9))) == 4


def test_a_closed_loop_keeps_n_sessions_in_flight_each_with_one_request_at_a_time() -> None:
    first, second, third = requests(0, 1), requests(0), requests(0, 1)
    loop = ClosedLoop([Session(0.0, s) for s in (first, second, [], third)], 2)
    running = {arrival.slot: arrival.request for arrival in loop.poll(0.0)}
    assert list(running.values()) == [first[0], second[0]]
    assert list(loop.poll(5.0)) == []
    slots = {id(request): slot for slot, request in running.items()}
    loop.finish(slots[id(second[0])])
    [arrival] = loop.poll(6.0)
    assert (arrival.request, arrival.time) == (third[0], 6.0)
    loop.finish(slots[id(first[0])])
    assert [a.request for a in loop.poll(7.0)] == [first[1]]
    loop.finish(slots[id(first[0])])
    assert list(loop.poll(8.0)) == []  # no session is left to start
    loop.finish(arrival.slot)
    assert [a.request for a in loop.poll(9.0)] == [third[1]]
    assert loop.next_time is None


def test_a_slot_without_work_does_not_stop_the_others() -> None:
    one = requests(0, 1, 2)
    loop = ClosedLoop([Session(0.0, one)], 3)
    given = []
    while arrivals := list(loop.poll(0.0)):
        given += [arrival.request for arrival in arrivals]
        for arrival in arrivals:
            loop.finish(arrival.slot)
    assert given == one


def test_a_closed_loop_heeds_the_limit() -> None:
    loop = ClosedLoop([Session(0.0, requests(*range(9)))] * 3, 2, limit=3)
    given = 0
    while arrivals := list(loop.poll(0.0)):
        given += len(arrivals)
        for arrival in arrivals:
            loop.finish(arrival.slot)
    assert given == 3
