"""How a weight is cut among ranks: what a layer declares, and which rows and columns of a matrix a rank then has.

Knows neither files nor tensors. One rank, the default, has everything.
"""

from dataclasses import dataclass
from typing import Literal

from octavo.errors import ConfigError

__all__ = ["ONE_RANK", "Ranks", "Shard"]

Shard = Literal["replicated", "column", "row", "vocabulary", "expert"]
"""column: a rank computes some of the outputs, so that it has rows of each matrix and its part of the bias.
row: it multiplies some of the inputs, so that it has columns, the results are added, and rank 0 adds the bias.
vocabulary: rows, as many as possible in all ranks but the last.
expert: whole matrices of a stack. replicated: everything."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank among those that share a model."""

    rank: int = 0
    world_size: int = 1

    def rows(self, shard: Shard, size: int) -> slice:
        """The rank's rows of a matrix, or entries of a bias, of `size`."""
        if shard == "column":
            return self._even(size, "outputs")
        if shard == "vocabulary":
            each = -(-size // self.world_size)
            return slice(min(self.rank * each, size), min((self.rank + 1) * each, size))
        return slice(0, size)

    def columns(self, shard: Shard, size: int, group: int = 1) -> slice:
        """The rank's columns of a matrix of `size` columns, of which `group` have a scale in common."""
        if shard != "row":
            return slice(0, size)
        columns = self._even(size, "inputs")
        if columns.start % group or (columns.stop % group and columns.stop != size):
            raise ConfigError(
                f"{size} inputs, quantised in groups of {group}, can't be cut evenly among {self.world_size} ranks."
            )
        return columns

    def experts(self, count: int) -> range:
        """The rank's matrices of a stack of `count`."""
        part = self._even(count, "experts")
        return range(part.start, part.stop)

    def adds_bias(self, shard: Shard) -> bool:
        """Whether this rank adds the bias, whole or in part, to its results."""
        return shard != "row" or self.rank == 0

    def _even(self, size: int, what: str) -> slice:
        if size % self.world_size:
            raise ConfigError(f"{size} {what} can't be cut evenly among {self.world_size} ranks.")
        each = size // self.world_size
        return slice(self.rank * each, (self.rank + 1) * each)


ONE_RANK = Ranks()
