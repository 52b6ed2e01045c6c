"""`Weight`: one matrix of a checkpoint as a backend keeps it. Shapes are logical; `data` belongs to the backend."""

from dataclasses import dataclass, replace
from typing import Any

TILE = 16  # rows are packed in groups of 16; a slice of a packed weight starts on such a group


@dataclass(frozen=True)
class Weight:
    """y = x @ W.T for W: (rows, cols), rows = output features.

    dtype: "bf16" or "f32", as stored. layout: "plain" (rows, cols) or "packed" ([rows/16][cols][16] on the CPU;
    fragment order on a GPU). data: the backend's array. nbytes: what a pass over it reads.
    """

    rows: int
    cols: int
    dtype: str
    layout: str
    data: Any

    @property
    def shape(self):
        return self.rows, self.cols

    @property
    def nbytes(self):
        return self.rows * self.cols * (2 if self.dtype == "bf16" else 4)

    def slice(self, first, count):
        """Rows first .. first+count-1 as a view. Errors: ValueError when a packed slice cuts a group of 16."""
        if self.layout == "plain":
            return replace(self, rows=count, data=self.data[first : first + count])
        if first % TILE or (count % TILE and first + count != self.rows):
            raise ValueError(f"rows {first}..{first + count} cut a group of {TILE} of a packed weight")
        return replace(self, rows=count, data=self.data[first // TILE : -(-(first + count) // TILE)])
