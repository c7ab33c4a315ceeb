"""How much of workers' gradients is noise, from how far they differ from each other."""

from __future__ import annotations

TRUST = 0.5
"""Power of the whole ratio by which steps are made shorter: with all of it they are as short as those of one gradient
after the other, and learn more slowly than they could; with none of it they are too long where much is noise."""


def noise_of(steps: int, workers: int, spread: float) -> float:
    """How many times larger the mean square of one step's mean gradient counts than that of several steps' mean.

    c = 1 + (s - 1) / (K - 1) * (spread - 1), from 1 to s; the square root of c is what is returned

    With a signal of square m and noise of variance v in one worker's gradient, a worker's mean over s steps has the
    square m + v/s, and the mean of K such has b = m + v/(s K). `spread` is the first over the second. What an optimizer
    that takes a step after each gradient would see is m + v/K = c b.

    Args:
        steps: s, whose gradients are summed in a contribution.
        workers: K, those that contributed.
        spread: mean square of a worker's contribution over that of the mean of all.

    >>> noise_of(9, 16, 16.0), noise_of(9, 16, 1.0), noise_of(1, 16, 16.0)
    (3.0, 1.0, 1.0)
    """
    if steps <= 1 or workers <= 1:
        return 1.0
    whole = min(float(steps), max(1.0, 1.0 + (steps - 1) / (workers - 1) * (spread - 1.0)))
    return float(whole**TRUST)


class Spread:
    """The mean square of a contribution over that of the mean, as recent rounds have it."""

    MEMORY = 0.95

    def __init__(self) -> None:
        self._each = self._mean = 0.0

    def see(self, each: float, mean: float) -> None:
        """A round's two squares."""
        self._each = self.MEMORY * self._each + each
        self._mean = self.MEMORY * self._mean + mean

    @property
    def value(self) -> float | None:
        """The ratio; None before the first round."""
        return self._each / self._mean if self._mean > 0 else None
