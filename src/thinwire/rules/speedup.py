"""What several machines gain over one, as the papers have it.

Symbols: N iterations of one machine to a target, C seconds of a step, S seconds of an exchange of the whole model,
K (or n) machines, τ steps between exchanges, M rounds to the target, d what asynchrony costs.
"""

from __future__ import annotations

from collections.abc import Mapping

PERIODS = (1, 2, 5, 10, 25, 100, 500, 1000, 2500)
"""The values of τ that SparkNet's Fig. 3 and 4 look at."""


def serial_s(iterations: float, step_s: float) -> float:
    """Time of one machine to the target.

    N C

    >>> serial_s(1000, 2.0)
    2000.0

    SparkNet, eq. 1.
    """
    return iterations * step_s


def rounds_s(rounds: float, period: int, step_s: float, exchange_s: float) -> float:
    """Time to the target in rounds of τ steps and an exchange.

    (τ C + S) M

    >>> rounds_s(10, 50, 2.0, 20.0)
    1200.0

    SparkNet, eq. 2.
    """
    return (period * step_s + exchange_s) * rounds


def naive_speedup(workers: int, step_s: float, exchange_s: float) -> float:
    """Gain of K machines that share each batch and add up its gradients: Amdahl's law, S being what is not shared.

    C / (C / K + S)

    >>> naive_speedup(5, 1.0, 0.0), naive_speedup(5, 1.0, 0.8)
    (5.0, 1.0)

    SparkNet §3.1.1.
    """
    return step_s / (step_s / workers + exchange_s)


def rounds_speedup(
    iterations: float, rounds: Mapping[int, float], step_s: float, exchange_s: float
) -> tuple[float, int]:
    """Gain by rounds under the best τ, and that τ; `rounds` has M for each τ that was tried.

    max_τ N C / ((τ C + S) M(τ))

    >>> rounds_speedup(1000, {1: 250, 10: 30}, 1.0, 0.0)
    (4.0, 1)
    >>> gain, period = rounds_speedup(1000, {1: 250, 10: 30}, 1.0, 20.0)
    >>> round(gain, 2), period
    (1.11, 10)

    SparkNet §3.1.2, as plotted in Fig. 4.
    """
    alone = serial_s(iterations, step_s)
    return max((alone / rounds_s(count, period, step_s, exchange_s), period) for period, count in rounds.items())


def discrepancy(iterations: float, alone: float, workers: int) -> float:
    """What asynchrony costs: steps of all workers together to the target, over those of one alone.

    d(a, τ, n) = n N' / N

    >>> discrepancy(500, 1000, 4)
    2.0

    DeepSpark §5: the d that makes its eq. 2 true for a run whose workers took N' steps each.
    """
    return workers * iterations / alone


def asynchronous_s(
    iterations: float, step_s: float, exchange_s: float, *, workers: int, period: int, penalty: float
) -> tuple[float, float]:
    """Seconds spent computing and communicating by n workers that exchange with one server in turn.

    T_comp = N C d / n,   T_comm = n d N S / τ

    >>> asynchronous_s(1000, 2.0, 1.0, workers=4, period=100, penalty=2.0)
    (1000.0, 80.0)

    DeepSpark, eq. 2.
    """
    return iterations * step_s * penalty / workers, workers * penalty * iterations * exchange_s / period


def asynchronous_speedup(step_s: float, exchange_s: float, *, workers: int, period: int, penalty: float) -> float:
    """Gain of n workers that exchange with one server in turn; n / d for a τ that is large enough.

    C / (d (C / n + n S / τ))

    >>> asynchronous_speedup(2.0, 0.0, workers=4, period=100, penalty=2.0)
    2.0

    DeepSpark, eq. 3 and 4.
    """
    return 1.0 / sum(asynchronous_s(1.0 / step_s, step_s, exchange_s, workers=workers, period=period, penalty=penalty))


def busy_share(period: int, step_s: float, exchange_s: float) -> float:
    """Share of the time that is spent stepping in rounds of τ steps and an exchange.

    τ C / (τ C + S)

    >>> round(busy_share(58, 0.095, 1.1), 3)
    0.834

    MPCA SGD §3.1.2: 83.3 % is what a ratio of 1 to 5 comes to.
    """
    return period * step_s / (period * step_s + exchange_s)
