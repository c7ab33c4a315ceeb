"""The end of a run: who has the final model, what of it has come in, and who comes too late to matter."""

from __future__ import annotations

from thinwire.coordinator.model_chunks import ModelChunks


class Ending:
    """What the coordinator knows of it, from the moment when all rows are done."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self.harvest = ModelChunks(group_size)
        self.since: float | None = None
        self.agreed: set[int] = set()
        """Workers that hold the final model, its verdict and all else that its checkpoint and the user get."""
        self.late: set[int] = set()
        """Members of groups that came since it began."""

    @property
    def closed(self) -> bool:
        """Whether nobody who comes now is needed: all who are there have done their rows, and can end without it.

        A group that has lost a member cannot do without a new one, unless another group holds the final model: a
        successor would make its last steps again, and its group would end on another model.
        """
        return self.harvest.whole or (self.since is not None and (self._group_size == 1 or self._agreed()))

    def _agreed(self) -> bool:
        """Whether all members of one group hold the final model."""
        groups = [worker // self._group_size for worker in self.agreed]
        return any(groups.count(group) == self._group_size for group in set(groups))

    def in_vain(self, present: set[int], working: set[int]) -> set[int]:
        """Workers that would be waited for in vain once the model has come in: the others are on their way out."""
        return (self.late & present) - self.agreed | (present - working) if self.harvest.whole else set()
