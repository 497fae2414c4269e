"""Pages of the draft pools: who holds which. Plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

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
class CachedPage:
    """A page of a prefix: how many requests hold it, and whether the drafter's context lies in it as the target's does."""

    id: int
    serial: int  # names it as the parent of the pages after it; never used again
    drafted: bool
    holders: int = 0


class PrefixCache:
    """Full pages of K/V by their tokens and all before them, for prompts that begin alike. Pages that nobody holds stay
    until the allocator needs them, the longest unused first."""

    def __init__(self, allocator: PageAllocator, page_size: int):
        self.allocator, self.page_size = allocator, page_size
        self._pages: dict[tuple[int, tuple[int, ...]], CachedPage] = {}  # in the order of their last use
        self._serials = count(1)

    def _key(self, parent: int, tokens: Sequence[int], i: int) -> tuple[int, tuple[int, ...]]:
        return parent, tuple(tokens[i * self.page_size : (i + 1) * self.page_size])

    def hold(self, tokens: Sequence[int]) -> list[CachedPage]:
        """The pages that a prompt begins with, held until `release`; its last token always runs. Whether the drafter has
        them too says nothing about the hit."""
        found: list[CachedPage] = []
        keys = []
        for i in range((len(tokens) - 1) // self.page_size):
            key = self._key(found[-1].serial if found else 0, tokens, i)
            if key not in self._pages:
                break
            self._pages[key].holders += 1
            found.append(self._pages[key])
            keys.append(key)
        self._used(keys)
        return found

    def _used(self, keys: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Note a use: the first page of a prefix is needed longest, as without it nobody finds the others."""
        for key in reversed(keys):
            self._pages[key] = self._pages.pop(key)

    def release(self, tokens: Sequence[int], computed: int, pages: Sequence[int], context: range) -> None:
        """Give back a request's pages: those full of its first `computed` tokens stay. The drafter has the context of the
        positions in `context`."""
        full, parent, keys = min(computed, len(tokens)) // self.page_size, 0, []
        for i, page in enumerate(pages[:full]):
            key, first, stop = self._key(parent, tokens, i), i * self.page_size, (i + 1) * self.page_size
            if key not in self._pages:
                drafted = context.start <= first and stop <= context.stop
                self._pages[key] = CachedPage(page, next(self._serials), drafted)
            elif self._pages[key].id == page:
                self._pages[key].holders -= 1
            else:  # another request computed the same
                self.allocator.free([page])
            parent = self._pages[key].serial
            keys.append(key)
        self._used(keys)
        self.allocator.free(pages[full:])

    @property
    def num_idle(self) -> int:
        """Pages that `reclaim` could give."""
        return sum(not page.holders for page in self._pages.values())

    def reclaim(self, num_pages: int) -> None:
        """Give the allocator up to `num_pages` pages that nobody holds."""
        if num_pages <= 0:
            return
        idle = [key for key, page in self._pages.items() if not page.holders][:num_pages]
        self.allocator.free([self._pages.pop(key).id for key in idle])


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
