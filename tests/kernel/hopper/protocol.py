"""The forward kernel's producer and consumers as Python generators, to find deadlocks without a GPU.

A model of ``hopper/forward.py``, line by line where it waits, lets go, reads or writes shared memory; what is computed
is left out. ``run`` lets the roles take steps in random order, copies land late, and raises AssertionError where a
buffer does not hold what a role reads, where arrivals are left over, or where nobody can go on.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any


class Machine:
    """Shared memory, mbarriers (phases that are complete, by buffer) and named barriers of one program."""

    def __init__(self, consumers: int, stages: int, q_buffers: int, entries: int, chance: random.Random) -> None:
        self.consumers, self.stages, self.q_buffers, self.slots = consumers, stages, q_buffers, stages + 4
        self.entries = entries
        sizes = {"k": stages, "v": stages, "q": q_buffers, "board": self.slots, "wanted": 1, "entries": entries}
        self.holds: dict[str, list[Any]] = {name: [None] * size for name, size in sizes.items()}
        self.phases = {name: [0] * size for name, size in sizes.items()}
        self.arrived: dict[tuple[str, int], int] = {}
        self.passed: dict[tuple[str, int], int] = {}
        self.copies: list[tuple[str, int, Any]] = []
        self.chance = chance

    def arrive(self, barrier: tuple[str, int], threads: int) -> None:
        wanted = {"turn": 256, "entries": 128 + 32}.get(barrier[0], 128 * self.consumers + 32)
        self.arrived[barrier] = self.arrived.get(barrier, 0) + threads
        assert self.arrived[barrier] <= wanted, f"more arrive at {barrier} than it waits for"
        if self.arrived[barrier] == wanted:
            self.arrived[barrier] = 0
            self.passed[barrier] = self.passed.get(barrier, 0) + 1

    def sync(self, barrier: tuple[str, int], threads: int) -> Generator:
        before = self.passed.get(barrier, 0)
        self.arrive(barrier, threads)
        while self.passed.get(barrier, 0) == before:
            yield "waits"

    def wait(self, name: str, index: int, phase: int) -> Generator:
        while self.phases[name][index] % 2 == phase:
            yield "waits"

    def copy(self, name: str, index: int, what: Any) -> None:
        self.holds[name][index] = "on its way"
        self.copies.append((name, index, what))

    def land(self) -> None:
        name, index, what = self.copies.pop(self.chance.randrange(len(self.copies)))
        self.holds[name][index] = what
        self.phases[name][index] += 1

    def post(self, slot: int, what: Any) -> None:
        self.holds["board"][slot] = what
        self.phases["board"][slot] += 1


def _copy_next(m: Machine, name: str, count: int, what: Any) -> Generator:
    if count >= m.stages:
        yield from m.sync((name, count % m.stages), 32)
    m.copy(name, count % m.stages, what)
    yield "runs"


def scheduler(m: Machine, tiles: list[int]) -> Generator:
    """``tiles``: how many key tiles each query tile has, 0 for one that is no tile."""
    slot, phase = 0, 0
    for tile, steps in enumerate(tiles):
        if steps:
            m.post(slot, (tile, steps))
            slot = (slot + 1) % m.slots
            yield from m.wait("wanted", 0, phase)
            phase ^= 1
        yield "runs"
    m.post(slot, None)


def producer(m: Machine, chance: random.Random) -> Generator:
    count, q_count, slot, slot_phase, values = 0, 0, 0, 0, "zeros"
    yield from m.wait("board", 0, 0)
    while posted := m.holds["board"][slot]:
        tile, steps = posted
        ask_at = chance.randrange(steps)
        for i in range(steps):
            if i == ask_at:
                m.phases["wanted"][0] += 1
            yield from _copy_next(m, "k", count, (tile, i))
            yield from _copy_next(m, "v", count, values)
            values = (tile, i)
            if i == 0:
                if q_count >= m.q_buffers:
                    yield from m.sync(("q", q_count % m.q_buffers), 32)
                m.copy("q", q_count % m.q_buffers, tile)
                q_count += 1
            for c in range(m.consumers if m.entries else 0):
                index = count * m.consumers + c
                if index >= m.entries:
                    yield from m.sync(("entries", index % m.entries), 32)
                m.copy("entries", index % m.entries, (tile, i, c))
                yield "runs"
            count += 1
            assert m.holds["board"][slot] == posted, "the walk goes on over another tile"
        slot, slot_phase = _next(slot, slot_phase, m.slots)
        yield from m.wait("board", slot, slot_phase)
    if count:
        yield from _copy_next(m, "v", count, values)
    for i in range(m.stages):
        if count + i >= m.stages:
            yield from m.sync(("k", (count + i) % m.stages), 32)
            if i > 0:
                yield from m.sync(("v", (count + i) % m.stages), 32)
    for i in range(m.q_buffers):
        if q_count + i >= m.q_buffers:
            yield from m.sync(("q", (q_count + i) % m.q_buffers), 32)
    for i in range(m.entries):
        index = count * m.consumers + i
        if index >= m.entries:
            yield from m.sync(("entries", index % m.entries), 32)


def _next(index: int, phase: int, count: int) -> tuple[int, int]:
    return (0, phase ^ 1) if index == count - 1 else (index + 1, phase)


def consumer(m: Machine, me: int, written: list[int]) -> Generator:
    holds = m.holds
    stage, phase, q_buffer, q_phase, slot, slot_phase, slot_before = 0, 0, 0, 0, 0, 0, 0
    entries, entries_phase = me, 0
    if me == m.consumers - 1:
        m.arrive(("turn", 0), 128)
    yield from m.wait("board", 0, 0)
    posted, i, writes, values, finished = holds["board"][0], 0, False, "zeros", -1
    any_tile = posted is not None
    if posted:
        yield from m.wait("q", 0, 0)
    while posted:
        tile, steps = posted
        is_last = i == steps - 1
        yield from m.wait("k", stage, phase)
        yield from m.sync(("turn", me), 128)
        yield "runs"
        assert (holds["k"][stage], holds["q"][q_buffer]) == ((tile, i), tile), "Q K^T reads something else"
        yield from m.wait("v", stage, phase)
        m.arrive(("turn", (me + 1) % m.consumers), 128)
        if m.entries:
            yield from m.wait("entries", entries, entries_phase)
        yield "runs"
        assert (holds["k"][stage], holds["q"][q_buffer]) == ((tile, i), tile), "overwritten during Q K^T"
        m.arrive(("k", stage), 128)
        if is_last:
            m.arrive(("q", q_buffer), 128)
        yield "runs"
        assert holds["board"][slot] == posted, "the mask is asked for another tile"
        if m.entries:  # read since they came, in registers only now
            assert holds["entries"][entries] == (tile, i, me), "entries of another tile, or overwritten"
            m.arrive(("entries", entries), 128)
            wraps = entries + m.consumers >= m.entries
            entries, entries_phase = (entries + m.consumers) % m.entries, entries_phase ^ wraps
            yield "runs"
        assert holds["v"][stage] == values, "overwritten during P V, or never there"
        m.arrive(("v", stage), 128)
        yield "runs"
        yield "runs"
        if writes:
            assert holds["board"][slot_before][0] == finished, "rows are written elsewhere"
            written.append(finished)
        values, writes = (tile, i), is_last
        stage, phase = _next(stage, phase, m.stages)
        i += 1
        if is_last:
            slot_before, finished = slot, tile
            slot, slot_phase = _next(slot, slot_phase, m.slots)
            q_buffer, q_phase = _next(q_buffer, q_phase, m.q_buffers)
            yield from m.wait("board", slot, slot_phase)
            posted, i = holds["board"][slot], 0
            if posted:
                yield from m.wait("q", q_buffer, q_phase)
    if any_tile:
        yield from m.wait("v", stage, phase)
        assert holds["v"][stage] == values
        assert holds["board"][slot_before][0] == finished
        written.append(finished)
    if me == 0:
        yield from m.sync(("turn", 0), 128)


def run(tiles: list[int], consumers: int, stages: int, q_buffers: int, seed: int, entries: int = 0) -> None:
    """Let one program do its tiles, in an order of steps that ``seed`` decides."""
    chance = random.Random(seed)
    m = Machine(consumers, stages, q_buffers, entries, chance)
    written: list[list[int]] = [[] for _ in range(consumers)]
    roles = {-2: scheduler(m, tiles), -1: producer(m, chance)}
    roles |= {me: consumer(m, me, written[me]) for me in range(consumers)}
    haste = {role: chance.choice((1, 1, 5, 20)) for role in roles}
    idle = 0
    while roles:
        if m.copies and chance.random() < 0.3:
            m.land()
            idle = 0
        role = chance.choices(list(roles), [haste[r] for r in roles])[0]
        step = next(roles[role], "ends")
        idle = idle + 1 if step == "waits" else 0
        if step == "ends":
            del roles[role]
        assert idle < 4000 or m.copies, f"nobody can go on: roles {sorted(roles)} wait"
    assert not any(m.arrived.values()), f"arrivals are left over: {m.arrived}"
    for rows in written:
        assert rows == [tile for tile, steps in enumerate(tiles) if steps]
