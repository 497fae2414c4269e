"""Pages of the draft pools: who holds which. Plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jax_dflash.config import InputError

NULL_PAGE = 0


def pages_touched(num_keys: int, page_size: int) -> int:
    """Pages that `num_keys` successive positions lie in at most."""
    return (num_keys + page_size - 2) // page_size + 1


class PageAllocator:
    """Pages 1 to num_pages - 1 of a pool; page 0 is the null page."""

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise InputError(f"num_pages={num_pages}: page 0 is the null page, so pass at least 2")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages, lowest ids first in a fresh pool. The caller has checked `num_free`."""
        assert count <= len(self._free), "allocate() past num_free"
        return [self._free.pop() for _ in range(count)]

    def free(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))


@dataclass
class HeldPages:
    """A request's pages in one group: `ids` are the columns from `first` on of its block table. They hold its context from
    `stored_from` on."""

    first: int = 0
    ids: list[int] = field(default_factory=list)
    stored_from: int = 0

    def holds(self, first: int, stop: int) -> bool:
        """Whether the pages are those of columns first to stop - 1."""
        return first == self.first and stop == first + len(self.ids)

    def outside(self, first: int, stop: int) -> list[int]:
        """Pages of other columns than first to stop - 1."""
        start = max(first - self.first, 0)
        return self.ids[:start] + self.ids[max(start, stop - self.first) :]

    def drop(self, first: int, stop: int) -> None:
        """Forget the pages that are `outside`."""
        start = max(first - self.first, 0)
        self.ids = self.ids[start : max(start, stop - self.first)]
        self.first = max(first, self.first)

    def extend(self, first: int, new: list[int]) -> None:
        """Put new pages before and behind those that are held, from column `first` on."""
        before = self.first - first
        self.first, self.ids = first, new[:before] + self.ids + new[before:]
