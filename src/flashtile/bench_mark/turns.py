"""Processes that prepare side by side and use the device one at a time, pass by pass.

What is to be measured gets a fresh process, so that no compiler's state is inherited; many may compile at once, but
what runs on the device holds :func:`turn`. A task says what its rows are, and whose passes should alternate with its.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeVar

from flashtile.bench_mark.measure import attempt
from flashtile.bench_mark.result import Row

# What a process says of itself. READY: all that is left is the clock, and it waits for leave.
STARTING, COMPILING, CHECKING, READY, TIMING = "starting", "compiling", "checking", "ready", "timing"
_GIVE_WAY = 0.003  # seconds between two turns of a process, for the others to wake up
_HURRY = 20.0  # seconds before the end from which on nobody waits for a partner


class Task(Protocol):
    """Something to be measured; it travels to its process pickled."""

    def rows(self, status: str, reason: str) -> list[Row]:
        """Return the task's rows without measurements."""
        ...

    def is_partner(self, other: Any) -> bool:
        """Return whether the passes of another task should alternate with this one's."""
        ...


AnyTask = TypeVar("AnyTask", bound=Task)
Measure = Callable[[Any, Callable[[str], None]], list[Row]]  # (task, tell): it tells its stages, READY before the clock


@contextlib.contextmanager
def turn(lock: str) -> Iterator[None]:
    """Have the device alone among the processes that know this file; one that dies gives the lock back as well."""
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    time.sleep(_GIVE_WAY)


def work(measure: Measure, task: Task, link: Connection) -> None:
    """Measure a task and send its rows; before the clock starts, wait for leave."""

    def tell(stage: str) -> None:
        link.send(stage)
        if stage == READY:
            link.recv()

    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has ended, and so do we
        rows, reason = attempt(lambda: measure(task, tell))
        link.send(task.rows("failed", reason) if rows is None else rows)


@dataclass(eq=False)
class Worker:
    """A running process, the stage that it is at, and since when."""

    task: Any
    process: Any
    link: Connection
    stage: str = STARTING
    since: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, measure: Measure, task: Task) -> Worker:
        context = multiprocessing.get_context("spawn")  # a forked child cannot use CUDA
        here, there = context.Pipe()
        process = context.Process(target=work, args=(measure, task, there), daemon=True)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business, which ends the others
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        there.close()  # so that the pipe ends with the process
        return cls(task, process, here)

    @property
    def prepares(self) -> bool:
        return self.stage not in (READY, TIMING)

    def enter(self, stage: str) -> None:
        self.stage, self.since = stage, time.monotonic()

    def hear(self) -> list[Row] | None:
        """Take in what the process says; return its rows if that is what it says, or if it is dead."""
        try:
            said = self.link.recv()
        except (EOFError, OSError):
            self.process.join(timeout=5)
            said = self.task.rows("failed", f"its process ended while {self.stage}: exit {self.process.exitcode}")
        if isinstance(said, list):
            self.link.close()
            return said
        self.enter(said)
        return None

    def give_leave(self) -> None:
        self.enter(TIMING)
        with contextlib.suppress(OSError):  # if it has died, that is heard next
            self.link.send("go")

    def stop(self) -> None:
        self.process.kill()  # a compiler need not listen to anything less
        self.process.join(timeout=5)
        self.link.close()


def gather(
    measure: Measure, tasks: Sequence[AnyTask], processes: int, seconds: float, patience: float
) -> Generator[tuple[AnyTask, list[Row]], None, None]:
    """Yield each task with its rows as they come; what dies, hangs or is not done in time has rows that say so.

    ``processes`` prepare at the same time; those that wait for the clock do not count. Whoever stays longer than
    ``patience`` seconds at one stage is ended.
    """
    end = time.monotonic() + seconds
    waiting: list[AnyTask] = list(tasks)
    running: list[Worker] = []
    try:
        while waiting or running:
            if time.monotonic() > end:
                over = "the time limit was over"
                yield from ((w.task, w.task.rows("skipped", f"{over} while it was {w.stage}")) for w in running)
                yield from ((task, task.rows("skipped", f"{over} before it began")) for task in waiting)
                return
            while waiting and sum(worker.prepares for worker in running) < processes:
                running.append(Worker.start(measure, waiting.pop(0)))
            news = wait([worker.link for worker in running], timeout=0.2)
            for worker in [worker for worker in running if worker.link in news]:
                rows = worker.hear()
                if rows is not None:
                    running.remove(worker)
                    yield worker.task, rows
            for worker in [w for w in running if w.stage != READY and time.monotonic() - w.since > patience]:
                running.remove(worker)
                worker.stop()
                yield worker.task, worker.task.rows("failed", f"was {worker.stage} for more than {patience:g} s")
            hurry = end - time.monotonic() < _HURRY
            to_come = [*waiting, *(worker.task for worker in running if worker.prepares)]
            for worker in running:
                if worker.stage == READY and (hurry or not any(map(worker.task.is_partner, to_come))):
                    worker.give_leave()
    finally:
        for worker in running:
            worker.stop()
