"""A naive model of the cache that is told nothing about trees: a dictionary of pages.

Each page of text is one entry under (namespace, text so far); public pages have no namespace.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.radix.texts import Text

__all__ = ["Model", "Page", "Path", "leading"]

Path = tuple[str, Text]


@dataclass
class Page:
    """One page: the slots of its copies by tier, and the step of its last use."""

    device: Text | None
    host: Text | None
    used: int


class Model:
    """Which pages there are, where, in use by whom, and when each was used last."""

    def __init__(self, page_size: int, public: Sequence[Text]) -> None:
        self.page_size, self.public = page_size, public
        self.step = 0
        self.pages: dict[Path, Page] = {}
        self.locks: list[tuple[Any, list[Path]]] = []

    def paths(self, text: Text, space: str) -> list[Path]:
        """Return the entry of each whole page of ``text``."""
        size = self.page_size
        shared = max((_common(text, prefix) for prefix in self.public), default=0) // size * size
        ends = range(size, len(text) + 1, size)
        return [("" if end <= shared else space, text[:end]) for end in ends]

    def expected(self, text: Text, space: str) -> tuple[int, int]:
        """Return (device, host) hits in pages."""
        pages = [self.pages.get(path) for path in self.paths(text, space)]
        device = leading(page is not None and page.device is not None for page in pages)
        host = leading(page is not None and page.host is not None for page in pages[device:])
        return device, host

    def locked(self, path: Path) -> bool:
        return any(path in paths for _, paths in self.locks)

    def device_leaves(self) -> dict[Path, Page]:
        """Return the pages that may leave the device: unlocked, nothing on the device below."""
        held = {path: page for path, page in self.pages.items() if page.device is not None}
        return self._ends(held, held)

    def host_leaves(self) -> dict[Path, Page]:
        """Return the pages that may leave the host: unlocked, only there, nothing below."""
        held = {path: page for path, page in self.pages.items() if page.device is None}
        return self._ends(held, self.pages)

    def _ends(self, held: dict[Path, Page], below: dict[Path, Page]) -> dict[Path, Page]:
        size = self.page_size
        covered = {(space, text[:-size]) for space, text in below}
        covered |= {("", text[:-size]) for _, text in below}
        return {
            path: page
            for path, page in held.items()
            if path not in covered and not self.locked(path)
        }

    def _forget_if_gone(self, path: Path) -> None:
        page = self.pages[path]
        if page.device is None and page.host is None:
            del self.pages[path]

    def _touch(self, paths: list[Path]) -> None:
        for path in paths:
            self.pages[path].used = self.step


def _common(left: Text, right: Text) -> int:
    return leading(a == b for a, b in zip(left, right, strict=False))


def leading(flags: Iterable[bool]) -> int:
    """Return how many flags hold before the first that does not."""
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count
