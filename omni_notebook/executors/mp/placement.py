"""Which processors each rank may use, and how many threads: the usable ones, split evenly over a stage's ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from omni_notebook.memory.libc import HEAPS, HEAPS_VARIABLE
from omni_notebook.worker.threads import waiting_threads_sleep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.worker.reports import WorkerSpec

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""The first is always set; MKL and OpenBLAS follow it unless they are given their own."""


class Place(NamedTuple):
    """One rank's share; `cpus` is empty where there are fewer processors than ranks: the scheduler knows better."""

    cpus: tuple[int, ...]
    threads: int


def split(cpus: Sequence[int], index: int, ranks: int) -> Place:
    """The share of rank `index` of `ranks`; neighbours in number stay together, as they do on a socket."""
    if len(cpus) < ranks:
        return Place((), 1)
    low, high = (len(cpus) * n // ranks for n in (index, index + 1))
    return Place(tuple(cpus[low:high]), high - low)


def places(specs: Sequence[WorkerSpec]) -> list[Place]:
    """One place a rank of a replica; a stage's replicas share the machine, other stages take turns with it."""
    cpus = sorted(os.sched_getaffinity(0))
    ranks = len(specs) * specs[0].config.num_replicas
    first = specs[0].where.replica * len(specs)
    return [split(cpus, (first + n) % ranks, ranks) for n in range(len(specs))]


def environment(place: Place) -> dict[str, str]:
    """What libraries read when they load: at most the place's threads, waiting threads that sleep, few heaps.

    What the user has set (fewer threads, a wait policy, heaps) stays.
    """
    most = {name: place.threads for name in THREAD_VARIABLES if name in os.environ or name == THREAD_VARIABLES[0]}
    counts = {name: _at_most(os.environ.get(name, ""), threads) for name, threads in most.items()}
    heaps = {} if HEAPS_VARIABLE in os.environ else {HEAPS_VARIABLE: str(HEAPS)}
    return {**counts, **waiting_threads_sleep(os.environ), **heaps}


def _at_most(given: str, threads: int) -> str:
    return given if given.isdecimal() and 0 < int(given) < threads else str(threads)
