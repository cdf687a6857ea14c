"""The key of a path: public up to a boundary, one owner's from there on.

    units    0 ........ public ........ len(key)
             every tenant   only the namespace of this key

SGLang looks a child up by ``child_key_at`` and compares with ``match_at``; giving both the boundary
is enough for one tree in which tenants share the public run and nothing behind it.
"""

from array import array
from functools import lru_cache
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_ext.namespace import SYSTEM_OWNER, frame, is_framed, parse, shares_public
from sglang_ext.radix.public import PublicPrefixes, common_length
from sglang_ext.types import PUBLIC, Owner

__all__ = ["SYSTEM_NAMESPACE", "TenantKey", "own"]

SYSTEM_NAMESPACE = frame(SYSTEM_OWNER)
"""Stands for SGLang's "no namespace", which here means public and must be earned by the text."""

_NAMESPACES_KEPT = 1 << 16


class TenantKey(RadixKey):
    """A RadixKey that knows where its text stops being public.

    ``public`` counts units (tokens, or bigrams for EAGLE), is a multiple of the page size and may
    be negative or beyond the end in a slice. A key without private units has the public namespace:
    ``extra_key`` and ``cache_salt`` None, ``owner`` PUBLIC. ``size`` is the length in units and
    ``space`` what children of private text are told apart by; both are kept, since every step of a
    walk asks for them, and so the text must not change: ``token_ids`` is shared, never copied.
    """

    __slots__ = ("_first", "owner", "public", "size", "space")

    def __init__(
        self,
        token_ids: "array[int]",
        extra_key: str | None,
        owner: Owner,
        cache_salt: str | None = None,
        is_bigram: bool = False,
        public: int = 0,
    ) -> None:
        RadixKey.__init__(self, token_ids, extra_key, is_bigram, None, cache_salt)
        self.owner = owner
        self.public = public
        count = len(token_ids)
        self.size = count - 1 if is_bigram and count else count
        self.space: Any = (extra_key, cache_salt) if cache_salt else extra_key
        self._first: Any = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int | slice) -> "TenantKey":
        if isinstance(idx, int):
            idx = slice(idx, idx + 1)
        start, stop, _ = idx.indices(self.size)
        # Neighbouring bigrams share a token, so a run of them ends one token later.
        end = stop + 1 if self.is_bigram and stop > start else stop
        tokens, public = self.token_ids[start:end], self.public - start
        if public >= stop - start > 0:
            return TenantKey(tokens, None, PUBLIC, None, self.is_bigram, public)
        return TenantKey(
            tokens, self.extra_key, self.owner, self.cache_salt, self.is_bigram, public
        )

    def page_aligned(self, page_size: int) -> "TenantKey":
        excess = self.size % page_size
        return self[: self.size - excess] if excess else self

    def child_key(self, page_size: int = 1) -> Any:
        """Return what a parent files this text under; always asked with the same page size."""
        first = self._first
        if first is None:
            first = self._first = self.child_key_at(0, page_size)
        return first

    def child_key_at(self, offset: int, page_size: int = 1) -> Any:
        end = offset + page_size
        if offset < 0 or end > self.size:
            raise IndexError(f"no page of {page_size} at {offset} of a key of {self.size} units")
        page: Any = tuple(self.token_ids[offset:end])
        if self.is_bigram:
            page = tuple(zip(page, self.token_ids[offset + 1 : end + 1], strict=True))
        if page_size == 1:
            page = page[0]
        return page if offset < self.public or self.space is None else (self.space, page)

    def match_at(self, other: RadixKey, offset: int, page_size: int = 1) -> int:
        units = min(self.size, other.size - offset)
        if self.public > 0:
            # A public run is compared with keys of every namespace, but only up to their boundary.
            units = min(units, self.public, other.public - offset)
        elif self.space != other.space:
            self._check_compatible(other)
        if units <= 0:
            return 0
        if self.is_bigram:
            units = common_length(self.token_ids, other.token_ids, units + 1, offset) - 1
        else:
            units = common_length(self.token_ids, other.token_ids, units, offset)
        return max(units, 0) // page_size * page_size


def own(
    key: RadixKey, prefixes: PublicPrefixes, bigram: bool = False, page_size: int = 1
) -> TenantKey:
    """Return ``key`` with its owner and boundary; every key enters the tree through here.

    ``key`` starts at the root; it is not changed. What does not fill a page of ``page_size`` units
    is left out. Token storage is shared where nothing is. A LoRA adapter computes other KV from the
    same text, and a sealed owner shares with nobody, so their keys have no public part.
    """
    if isinstance(key, TenantKey):
        return key.page_aligned(page_size)
    namespace = key.extra_key or SYSTEM_NAMESPACE
    owner, may_share = _standing(namespace)
    tokens = key.token_ids if key.limit is None else key.raw_token_ids()
    owned = TenantKey(tokens, namespace, owner, key.cache_salt, bigram or key.is_bigram)
    if owned.size % page_size:
        owned = owned.page_aligned(page_size)
    if prefixes and may_share:
        owned.public = prefixes.boundary(owned.token_ids, owned.is_bigram)
        owned = owned[:] if owned.public >= owned.size else owned
    return owned


@lru_cache(_NAMESPACES_KEPT)
def _standing(namespace: str) -> tuple[Owner, bool]:
    """Return the owner of a namespace and whether the beginning of its text may be public."""
    parsed = parse(namespace)
    may_share = is_framed(namespace) and not parsed.lora and shares_public(parsed.owner)
    return parsed.owner, may_share
