"""The parameter table: how parameters become tuples on servers, when an update counts, when a read may be answered."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from thinwire.parameters import Fragment


def tuples(borders: Sequence[int], most: int) -> tuple[Fragment, ...]:
    """The vector cut into tuples of at most `most` elements: small neighbours share one, a large parameter has several.

    `borders` are the parameters' offsets and the vector's end. A parameter that has to be cut is cut evenly.

    >>> [tuple(t) for t in tuples([0, 10, 14, 16, 40], 16)]
    [(0, 16), (16, 28), (28, 40)]

    SINGA (Wang et al. 2015) §5.3: a vector of parameters under one key; §6.4: the tuple size threshold.
    """
    found: list[Fragment] = []
    for start, stop in itertools.pairwise(borders):
        size = stop - start
        if found and found[-1].stop == start and stop - found[-1].start <= most:
            found[-1] = Fragment(found[-1].start, stop)
            continue
        count = max(1, -(-size // most))
        cuts = [start + i * size // count for i in range(count + 1)]
        found += [Fragment(a, b) for a, b in itertools.pairwise(cuts) if b > a]
    return tuple(found)


def deal(sizes: Sequence[int], servers: int) -> tuple[int, ...]:
    """The server of each tuple: the largest first, each to the server that has least.

    >>> deal([4, 9, 5, 4], 2)
    (1, 0, 1, 0)

    SINGA (Wang et al. 2015) §5.3: each server is in charge of a partition of the table.
    """
    load, owner = [0] * servers, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        server = min(range(servers), key=lambda s: (load[s], s))
        owner[index] = server
        load[server] += sizes[index]
    return tuple(owner)


def hosts(servers: int, members: Sequence[int], first: int = 0) -> tuple[int, ...]:
    """The worker on which each server lives: the one of its number, counted from `first`, or else the next there is.

    >>> hosts(4, [0, 2, 3])
    (0, 2, 2, 3)
    >>> hosts(3, [1])
    (1, 1, 1)
    >>> hosts(1, [0, 1, 2], first=2), hosts(1, [0, 1], first=2)
    ((2,), (0,))
    """
    there = sorted(members)
    return tuple(next((m for m in there if m >= first + server), there[0]) for server in range(servers))


def keeper(host: int, members: Sequence[int]) -> int:
    """The worker that keeps copies of a host's checkpoints: the next one, which takes over when the host dies.

    >>> [keeper(host, [0, 2, 3]) for host in (0, 2, 3)]
    [2, 3, 0]
    """
    there = sorted(members)
    return there[(there.index(host) + 1) % len(there)]


def ready(heard: Mapping[int, Collection[int]], wanted: Mapping[int, Collection[int]], strict: bool) -> tuple[int, ...]:
    """The groups whose gradients are to be applied now, given the workers heard of each and those wanted of each.

    Under strict consistency all groups at once, when every worker has been heard; else each group that is whole.

    >>> ready({0: {1, 2}, 1: set()}, {0: {1, 2}, 1: {3}}, strict=False)
    (0,)
    >>> ready({0: {1, 2}, 1: set()}, {0: {1, 2}, 1: {3}}, strict=True)
    ()
    >>> ready({0: {1, 2}, 1: {3}}, {0: {1, 2}, 1: {3}}, strict=True)
    (0, 1)

    SINGA (Wang et al. 2015), Algorithm 3, lines 4 and 11: with the threshold a group's size, or that of all.
    """
    whole = tuple(sorted(g for g, workers in wanted.items() if workers and set(workers) <= set(heard.get(g, ()))))
    if strict:
        live = [g for g, workers in wanted.items() if workers]
        return whole if len(whole) == len(live) else ()
    return whole


def may_get(asked: int, version: int, pending: int) -> bool:
    """Whether a read may be answered: the version asked for exists, and the reader's own group has nothing pending.

    >>> may_get(3, 3, 0), may_get(4, 3, 0), may_get(3, 3, 1)
    (True, False, False)

    SINGA (Wang et al. 2015), Algorithm 4.
    """
    return asked <= version and pending == 0


def may_run_ahead(clock: int, slowest: int, bound: int | None) -> bool:
    """Whether a worker that made `clock` updates may go on, when the slowest has made so many; None is no bound.

    >>> may_run_ahead(7, 4, 3), may_run_ahead(8, 4, 3), may_run_ahead(99, 0, None)
    (True, False, True)

    Stale synchronous parallel (Ho et al. 2013).
    """
    return bound is None or clock - slowest <= bound


def last_complete(kept: Iterable[Collection[tuple[int, int]]]) -> tuple[int, int] | None:
    """The newest checkpoint that every server has; each is a line of updates and a version in it.

    >>> last_complete([{(1, 10), (1, 20)}, {(1, 10)}])
    (1, 10)
    >>> last_complete([{(1, 10)}, set()]) is None
    True

    SINGA (Wang et al. 2015) §5.5: all servers roll back to the last checkpoint of the one that was lost.
    """
    sets = [set(k) for k in kept]
    common = set.intersection(*sets) if sets else set()
    return max(common, default=None)
