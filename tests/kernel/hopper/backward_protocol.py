"""The roles of the backward kernels for Hopper as Python generators, to find deadlocks and overwritten buffers.

A model of ``hopper/backward_*.py``, line by line where a role waits, lets go, reads or writes shared memory; what is
computed is left out. ``run`` lets the roles take steps in random order, copies land late, and raises AssertionError
where a buffer does not hold what a role reads, where arrivals are left over, where nobody can go on, or where programs
that take turns at a tile of dQ come in another order than that of their work.
"""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

SLOTS, READERS = 2, 4
Q_FREE, DO_FREE, DS_READY, DQ_READY = 6, 8, 10, 14
P_READY, P_READ = DS_READY + 2, DS_READY + 3
THREADS = {Q_FREE: 288, Q_FREE + 1: 288, DO_FREE: 288, DO_FREE + 1: 288, DQ_READY: 160, DQ_READY + 1: 160}


class Form(NamedTuple):
    """What of ``Sizes`` the protocol depends on."""

    wide: bool
    stages: int
    stages_do: int
    dk_late: bool
    parts: tuple[int, int]
    entries: int = 0  # buffers for a score's entries


class Queue:
    """The work of all programs: which tiles of dQ each piece visits, in order; and whose turn it is at each tile."""

    def __init__(self, walks: list[list[Any]]) -> None:
        self.walks, self.drawn = walks, 0
        visits: dict[Any, list[int]] = {}
        for work, walk in enumerate(walks):
            for tile in walk:
                visits.setdefault(tile, []).append(work)
        self.visits = visits
        self.added: dict[Any, list[int]] = {}  # by (tile, consumer, part)
        self.turns: Counter[Any] = Counter()  # how many turns are over, by (tile, consumer)

    def draw(self) -> int:
        self.drawn += 1
        return self.drawn - 1


class Machine:
    """Shared memory, mbarriers and named barriers of one program."""

    def __init__(self, form: Form, queue: Queue, chance: random.Random) -> None:
        self.form, self.queue, self.chance = form, queue, chance
        self.taken: list[int] = []  # pieces of work
        self.holds: dict[Any, Any] = {}
        self.arrivals: Counter[Any] = Counter()
        self.phases: Counter[Any] = Counter()
        self.named: Counter[int] = Counter()
        self.passed: Counter[int] = Counter()
        self.copies: list[tuple[Any, Any]] = []
        self.leaving: dict[int, list[Any]] = {0: [], 1: []}  # copies out of shared memory, by role
        self.written: list[Any] = []

    # mbarriers
    def arrive(self, signal: Any, count: int = 1) -> None:
        self.arrivals[signal] += 1
        assert self.arrivals[signal] <= count
        if self.arrivals[signal] == count:
            self.arrivals[signal] = 0
            self.phases[signal] += 1

    def wait(self, signal: Any, phase: int) -> Iterator[str]:
        # Phase p is over when an odd or even number of phases is complete; a waiter may be one phase late, not two.
        while self.phases[signal] % 2 == phase:
            yield "waits"

    # named barriers
    def bar_arrive(self, number: int, threads: int = 128) -> None:
        wanted = THREADS.get(number, 256)
        self.named[number] += threads
        assert self.named[number] <= wanted, f"more arrive at {number} than it waits for"
        if self.named[number] == wanted:
            self.named[number] = 0
            self.passed[number] += 1

    def bar_sync(self, number: int, threads: int = 128) -> Iterator[str]:
        before = self.passed[number]
        self.bar_arrive(number, threads)
        while self.passed[number] == before:
            yield "waits"

    # copies
    def copy_in(self, place: Any, what: Any) -> None:
        self.holds[place] = "on its way"
        self.copies.append((place, what))

    def copy_out(self, role: int, place: Any, what: Any) -> None:
        self.leaving[role].append((place, what))

    def land(self) -> None:
        outgoing = [(role, i) for role, list_ in self.leaving.items() for i in range(len(list_))]
        if outgoing and (not self.copies or self.chance.random() < 0.5):
            role, i = self.chance.choice(outgoing)
            place, what = self.leaving[role].pop(i)
            self.reads(place, what)
            self.written.append(what)
        elif self.copies:
            place, what = self.copies.pop(self.chance.randrange(len(self.copies)))
            self.holds[place] = what
            self.arrive(place)

    def store_wait(self, role: int) -> Iterator[str]:
        while self.leaving[role]:
            yield "waits"

    def reads(self, place: Any, what: Any) -> None:
        assert self.holds.get(place) == what, f"{place} holds {self.holds.get(place)}, wanted {what}"


def loader(m: Machine) -> Generator:
    form, it = m.form, 0
    while (work := m.queue.draw()) < len(m.queue.walks):
        number, total = len(m.taken), len(m.queue.walks[work])
        m.taken.append(work)
        slot = number % SLOTS
        if number >= SLOTS:
            yield from m.wait(("read", slot), (number // SLOTS - 1) & 1)
        m.holds["board", slot] = (number, total)
        yield "runs"
        m.arrive(("posted", slot))
        if total == 0:
            yield from _load_keys(m, number)
        for i in range(total):
            if it >= form.stages:
                yield from m.bar_sync(Q_FREE + it % form.stages, 32)
            m.holds["tile", it % form.stages] = (number, i)
            m.copy_in(("q", it % form.stages), (number, i))
            yield "runs"
            if it >= form.stages_do:
                yield from m.bar_sync(DO_FREE + it % form.stages_do, 32)
            m.copy_in(("do", it % form.stages_do), (number, i))
            yield "runs"
            if form.entries:
                if it >= form.entries:
                    yield from m.wait(("entries free", it % form.entries), (it // form.entries - 1) & 1)
                m.copy_in(("entries", it % form.entries), (number, i))
                yield "runs"
            if i == 0:
                yield from _load_keys(m, number)
            it += 1
        yield "runs"
    number = len(m.taken)
    slot = number % SLOTS
    if number >= SLOTS:
        yield from m.wait(("read", slot), (number // SLOTS - 1) & 1)
    m.holds["board", slot] = (number, -1)
    m.arrive(("posted", slot))
    for i in range(max(it - form.stages, 0), it):
        yield from m.bar_sync(Q_FREE + i % form.stages, 32)
    for i in range(max(it - form.stages_do, 0), it):
        yield from m.bar_sync(DO_FREE + i % form.stages_do, 32)


def _load_keys(m: Machine, number: int) -> Generator:
    for name in ("v", "k"):
        if number > 0:
            yield from m.wait((name, "free"), (number - 1) & 1)
        m.copy_in((name, 0), number)
        yield "runs"


def _read_total(m: Machine, number: int) -> Generator:
    yield from m.wait(("posted", number % SLOTS), (number // SLOTS) & 1)
    got, total = m.holds["board", number % SLOTS]
    assert got == number
    return total


def _done(m: Machine, number: int) -> None:
    assert m.holds["board", number % SLOTS][0] == number
    m.arrive(("read", number % SLOTS), READERS)


def reducer(m: Machine, me: int) -> Generator:
    number = 0
    while (total := (yield from _read_total(m, number))) >= 0:
        work = m.taken[number]
        for i in range(total if m.form.parts[me] else 0):
            tile = m.queue.walks[work][i]
            while m.queue.visits[tile][m.queue.turns[tile, me]] != work:
                yield "waits"
            for part in range(m.form.parts[me]):
                yield from m.bar_sync(DQ_READY + me, 32)
                yield "runs"
                m.reads(("dq", me), (number, i, part))
                m.queue.added.setdefault((tile, me, part), []).append(work)
                m.arrive(("dq_free", me))
                yield "runs"
                if part == 0 and i > 0:
                    m.queue.turns[m.queue.walks[work][i - 1], me] += 1
        if total and m.form.parts[me]:
            m.queue.turns[m.queue.walks[work][-1], me] += 1
        _done(m, number)
        yield "runs"
        number += 1


def _store_dq(m: Machine, me: int, tile: Any, count: int) -> Generator:
    yield from m.wait(("dq_free", me), (count & 1) ^ 1)
    m.holds["dq", me] = tile
    yield "runs"
    m.bar_arrive(DQ_READY + me)


def _wait_for_entries(m: Machine, it: int) -> Generator:
    if m.form.entries:
        yield from m.wait(("entries", it % m.form.entries), (it // m.form.entries) & 1)


def _release_entries(m: Machine, it: int, now: Any) -> None:
    """They were read since they came, and are in registers only now."""
    if m.form.entries:
        m.reads(("entries", it % m.form.entries), now)
        m.arrive(("entries free", it % m.form.entries), 1 if m.form.wide else 2)


def narrow_consumer(m: Machine, me: int) -> Generator:
    form, it, number = m.form, 0, 0
    total = yield from _read_total(m, number)
    while total >= 0:
        if total > 0:
            m.bar_arrive(DS_READY + 2 * me + ((it & 1) ^ 1))
        yield from m.wait(("k", 0), number & 1)
        yield from m.wait(("v", 0), number & 1)
        for i in range(total):
            buffer, buffer_do, parity, now, last = (
                it % form.stages,
                it % form.stages_do,
                it & 1,
                (number, i),
                (number, i - 1),
            )
            yield from m.wait(("q", buffer), (it // form.stages) & 1)
            m.reads(("k", 0), number)
            m.reads(("q", buffer), now)
            yield from m.bar_sync(DS_READY + 2 * (1 - me) + (parity ^ 1))
            if i > 0:
                m.reads(("ds", 0, parity ^ 1), last)
                m.reads(("ds", 1, parity ^ 1), last)
            yield "runs"
            m.reads(("tile", buffer), now)
            m.reads(("board", number % SLOTS), (number, total))
            yield from _wait_for_entries(m, it)
            m.reads(("q", buffer), now)
            if form.dk_late and i > 0:
                m.reads(("q", (it - 1) % form.stages), last)
                m.bar_arrive(Q_FREE + (it - 1) % form.stages)
            yield "runs"
            if i > 0:
                m.reads(("ds", 0, parity ^ 1), last)
                m.reads(("ds", 1, parity ^ 1), last)
                m.reads(("k", 0), number)
                yield from _store_dq(m, me, (*last, 0), it - 1)
            yield from m.wait(("do", buffer_do), (it // form.stages_do) & 1)
            m.reads(("do", buffer_do), now)
            m.reads(("v", 0), number)
            _release_entries(m, it, now)
            yield "runs"
            m.reads(("v", 0), number)
            m.holds["ds", me, parity] = now
            yield "runs"
            m.bar_arrive(DS_READY + 2 * me + parity)
            yield "runs"
            m.reads(("do", buffer_do), now)
            m.bar_arrive(DO_FREE + buffer_do)
            if not form.dk_late:
                yield "runs"
                m.reads(("q", buffer), now)
                m.bar_arrive(Q_FREE + buffer)
            it += 1
        m.arrive(("v", "free"), 2)
        if total > 0:
            last, parity = (number, total - 1), (it - 1) & 1
            if form.dk_late:
                m.reads(("q", (it - 1) % form.stages), last)
                m.bar_arrive(Q_FREE + (it - 1) % form.stages)
            yield from m.bar_sync(DS_READY + 2 * (1 - me) + parity)
            yield "runs"
            m.reads(("ds", 0, parity), last)
            m.reads(("ds", 1, parity), last)
            m.reads(("k", 0), number)
            yield from _store_dq(m, me, (*last, 0), it - 1)
        m.arrive(("k", "free"), 2)
        yield from m.bar_sync(DS_READY + (it & 1))
        m.reads(("board", number % SLOTS), (number, total))
        for parity in (0, 1):
            m.holds["ds", me, parity] = ("dv", number, me)
        m.copy_out(me, ("ds", me, 0), ("dv", number, me))
        yield "runs"
        yield from m.wait(("dq_free", me), (it & 1) ^ 1)
        m.holds["dq", me] = ("dk", number, me)
        m.copy_out(me, ("dq", me), ("dk", number, me))
        yield "runs"
        _done(m, number)
        number += 1
        total = yield from _read_total(m, number)
        yield from m.store_wait(me)


def p_consumer(m: Machine) -> Generator:
    form, it, number = m.form, 0, 0
    parts = form.parts[0]
    total = yield from _read_total(m, number)
    while total >= 0:
        yield from m.wait(("k", 0), number & 1)
        for i in range(total):
            buffer, buffer_do, parity, now, last = (
                it % form.stages,
                it % form.stages_do,
                it & 1,
                (number, i),
                (number, i - 1),
            )
            yield from m.wait(("q", buffer), (it // form.stages) & 1)
            m.reads(("k", 0), number)
            yield from m.bar_sync(DS_READY + (parity ^ 1))
            yield "runs"
            m.reads(("q", buffer), now)
            m.reads(("tile", buffer), now)
            m.reads(("board", number % SLOTS), (number, total))
            yield from _wait_for_entries(m, it)
            yield "runs"
            if i > 0:
                m.reads(("ds", parity ^ 1), last)
                if parts > 0:
                    yield from _store_dq(m, 0, (*last, 0), (it - 1) * parts)
            yield from m.bar_sync(P_READ)
            m.holds["p"] = now
            yield "runs"
            m.bar_arrive(P_READY)
            m.bar_arrive(Q_FREE + buffer)
            _release_entries(m, it, now)
            yield from m.wait(("do", buffer_do), (it // form.stages_do) & 1)
            m.reads(("do", buffer_do), now)
            yield "runs"
            if parts > 1 and i > 0:
                m.reads(("ds", parity ^ 1), last)
                m.reads(("k", 0), number)
                yield from _store_dq(m, 0, (*last, 1), (it - 1) * parts + 1)
            yield "runs"
            m.reads(("do", buffer_do), now)
            m.bar_arrive(DO_FREE + buffer_do)
            it += 1
        if total > 0:
            yield from m.bar_sync(DS_READY + ((it - 1) & 1))
            yield from m.bar_sync(P_READ)
            yield from _last_dq(m, 0, number, total, it)
        yield from m.bar_sync(P_READY)
        m.arrive(("k", "free"), 2)
        yield from m.wait(("v", 0), number & 1)
        m.reads(("board", number % SLOTS), (number, total))
        m.reads(("v", 0), number)
        m.holds["v", 0] = ("dv", number)
        m.copy_out(0, ("v", 0), ("dv", number))
        _done(m, number)
        yield from m.store_wait(0)
        m.arrive(("v", "free"), 2)
        number += 1
        total = yield from _read_total(m, number)


def _last_dq(m: Machine, me: int, number: int, total: int, it: int) -> Generator:
    for part in range(m.form.parts[me]):
        m.reads(("ds", (it - 1) & 1), (number, total - 1))
        yield "runs"
        m.reads(("ds", (it - 1) & 1), (number, total - 1))
        m.reads(("k", 0), number)
        yield from _store_dq(m, me, (number, total - 1, part), (it - 1) * m.form.parts[me] + part)


def ds_consumer(m: Machine) -> Generator:
    form, it, number = m.form, 0, 0
    parts = form.parts[1]
    total = yield from _read_total(m, number)
    while total >= 0:
        if total > 0:
            m.bar_arrive(DS_READY + ((it & 1) ^ 1))
            m.bar_arrive(P_READ)
        yield from m.wait(("k", 0), number & 1)
        yield from m.wait(("v", 0), number & 1)
        for i in range(total):
            buffer, buffer_do, parity, now, last = (
                it % form.stages,
                it % form.stages_do,
                it & 1,
                (number, i),
                (number, i - 1),
            )
            yield from m.wait(("do", buffer_do), (it // form.stages_do) & 1)
            m.reads(("do", buffer_do), now)
            m.reads(("v", 0), number)
            yield "runs"
            m.reads(("do", buffer_do), now)
            m.reads(("v", 0), number)
            m.bar_arrive(DO_FREE + buffer_do)
            yield from m.bar_sync(P_READY)
            m.reads("p", now)
            yield "runs"
            m.reads("p", now)
            m.bar_arrive(P_READ)
            m.holds["ds", parity] = now
            yield "runs"
            m.bar_arrive(DS_READY + parity)
            yield "runs"
            if i > 0:
                m.reads(("ds", parity ^ 1), last)
                yield from _store_dq(m, 1, (*last, 0), (it - 1) * parts)
            yield from m.wait(("q", buffer), (it // form.stages) & 1)
            m.reads(("q", buffer), now)
            if parts > 1 and i > 0:
                yield "runs"
                m.reads(("ds", parity ^ 1), last)
                m.reads(("k", 0), number)
                yield from _store_dq(m, 1, (*last, 1), (it - 1) * parts + 1)
            yield "runs"
            m.reads(("q", buffer), now)
            m.bar_arrive(Q_FREE + buffer)
            it += 1
        if total > 0:
            yield from _last_dq(m, 1, number, total, it)
        yield from m.bar_sync(P_READY)
        m.arrive(("v", "free"), 2)
        m.reads(("board", number % SLOTS), (number, total))
        m.reads(("k", 0), number)
        m.holds["k", 0] = ("dk", number)
        m.copy_out(1, ("k", 0), ("dk", number))
        _done(m, number)
        yield from m.store_wait(1)
        m.arrive(("k", "free"), 2)
        number += 1
        total = yield from _read_total(m, number)


def run(form: Form, walks: list[list[Any]], seed: int, programs: int = 1) -> None:
    """Let programs do the work: ``walks[i]`` names piece i's tiles of dQ in order; ``seed`` decides who goes on."""
    chance, queue = random.Random(seed), Queue(walks)
    machines = [Machine(form, queue, chance) for _ in range(programs)]
    roles: dict[Any, Iterator[str]] = {}
    for program, m in enumerate(machines):
        consumers = (p_consumer(m), ds_consumer(m)) if form.wide else (narrow_consumer(m, 0), narrow_consumer(m, 1))
        for name, role in enumerate((loader(m), reducer(m, 0), reducer(m, 1), *consumers)):
            roles[program, ("loader", "reducer 0", "reducer 1", "consumer 0", "consumer 1")[name]] = role
    haste = {role: chance.choice((1, 1, 5, 20)) for role in roles}
    idle = 0
    while roles:
        for m in machines:
            if chance.random() < 0.3:
                m.land()
        role = chance.choices(list(roles), [haste[r] for r in roles])[0]
        step = next(roles[role], "ends")
        idle = idle + 1 if step == "waits" else 0
        if step == "ends":
            del roles[role]
        on_their_way = any(m.copies or any(m.leaving.values()) for m in machines)
        assert idle < 5000 * programs or on_their_way, f"nobody can go on: {sorted(roles)} wait"
    shares = [(me, part) for me in (0, 1) for part in range(form.parts[me])]
    assert queue.added == {(tile, *share): works for tile, works in queue.visits.items() for share in shares}
    assert sorted(work for m in machines for work in m.taken) == list(range(len(walks)))
    for m in machines:
        while any(m.leaving.values()):
            m.land()
        assert not any(m.named.values()), f"arrivals are left over: {m.named}"
        gradients = [(which, n) for which in ("dv", "dk") for n in range(len(m.taken))]
        if not form.wide:
            gradients = [(*gradient, me) for gradient in gradients for me in (0, 1)]
        assert sorted(m.written) == sorted(gradients)
