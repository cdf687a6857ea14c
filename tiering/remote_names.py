"""How objects of the REMOTE tier are called: which engine's page, whose, and which.

    sgx1-<fingerprint>-<bytes>/<owner>/<page key>     a page; it counts for so many ``bytes``
    sgx1-keys/<owner>                                 an owner's wrapped key
    sgx1-gone/<owner>/<milliseconds>-<word>           a notice that all of an owner was deleted then

So every machine can tell who holds how much from a list of names, and an owner's pages of all
models and ranks go in one call. Another format version, model, dtype, layout or rank is another
name: it is not found, before its header is looked at.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import quote, unquote

from sglang_ext.tiering.page_format import FORMAT_VERSION, Fingerprint
from sglang_ext.types import Owner

__all__ = [
    "HeldPage",
    "Notice",
    "held_pages",
    "key_name",
    "notice_name",
    "notices",
    "page_name",
    "page_prefix",
    "pages_of",
]

_ROOT = f"sgx{FORMAT_VERSION}"
_PAGE = re.compile(rf"{_ROOT}-[0-9a-f]{{16}}-([0-9]+)/([^/]*)/[0-9a-f]+")
_OWNERS_KEPT = 1024
"""Of so many owners it is remembered how they are written."""
_NOTICE = re.compile(rf"{_ROOT}-gone/([^/]*)/([0-9]{{1,15}})-[0-9a-f]+")


class HeldPage(NamedTuple):
    """A page of somebody, as its name tells."""

    name: str
    owner: Owner
    bytes: int


class Notice(NamedTuple):
    """That all pages of an owner were deleted at a time (seconds since 1970)."""

    name: str
    owner: Owner
    time: float


def page_prefix(fingerprint: Fingerprint, page_bytes: int) -> str:
    """Return what the names of one engine rank's pages begin with."""
    digest = sha256(b"\0".join(fingerprint.groups)).hexdigest()[:16]
    return f"{_ROOT}-{digest}-{page_bytes}/"


def page_name(prefix: str, owner: Owner, key: bytes) -> str:
    """Return the name of a page. ``key`` is blinded already where the owner is encrypted."""
    return f"{prefix}{_quoted(owner)}/{key.hex()}"


def key_name(owner: Owner) -> str:
    """Return the name of an owner's wrapped key."""
    return f"{_ROOT}-keys/{_quoted(owner)}"


def pages_of(owner: Owner) -> str:
    """Return a pattern that all pages of an owner fit, of every model and rank."""
    # Of what ``quote`` leaves, only the dot means something in a pattern.
    return rf"{_ROOT}-[0-9a-f]+-[0-9]+/{_quoted(owner).replace('.', '[.]')}/.*"


def held_pages(names: Iterable[str]) -> Iterator[HeldPage]:
    """Yield what of these names is a page of this format version."""
    for name in names:
        match = _PAGE.fullmatch(name)
        if match:
            yield HeldPage(name, Owner(unquote(match[2])), int(match[1]))


def notice_name(owner: Owner, time: float, word: str) -> str:
    """Return the name of a notice; ``word`` is hexadecimal, and nobody else's."""
    return f"{_ROOT}-gone/{_quoted(owner)}/{int(time * 1000)}-{word}"


def notices(names: Iterable[str]) -> Iterator[Notice]:
    """Yield what of these names is a notice."""
    for name in names:
        match = _NOTICE.fullmatch(name)
        if match:
            yield Notice(name, Owner(unquote(match[1])), int(match[2]) / 1000)


@lru_cache(maxsize=_OWNERS_KEPT)
def _quoted(owner: Owner) -> str:
    return quote(owner, safe="")
