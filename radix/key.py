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

from sglang_ext.namespace import SYSTEM_OWNER, frame, is_framed, parse
from sglang_ext.radix.public import PublicPrefixes
from sglang_ext.types import PUBLIC, Owner

__all__ = ["SYSTEM_NAMESPACE", "TenantKey", "own"]

SYSTEM_NAMESPACE = frame(SYSTEM_OWNER)
"""Stands for SGLang's "no namespace", which here means public and must be earned by the text."""

_NAMESPACES_KEPT = 1 << 16


class TenantKey(RadixKey):
    """A RadixKey that knows where its text stops being public.

    ``public`` counts units (tokens, or bigrams for EAGLE), is a multiple of the page size and may
    be negative or beyond the end in a slice. A key without private units has the public namespace:
    ``extra_key`` and ``cache_salt`` None, ``owner`` PUBLIC.
    """

    __slots__ = ("owner", "public")

    def __init__(
        self, token_ids: "array[int]", extra_key: str, cache_salt: str | None = None
    ) -> None:
        super().__init__(token_ids, extra_key, cache_salt=cache_salt)
        self.owner = _standing(extra_key)[0]
        self.public = 0

    def __getitem__(self, idx: int | slice) -> "TenantKey":
        if isinstance(idx, int):
            idx = slice(idx, idx + 1)
        start, stop, _ = idx.indices(len(self))
        end = stop + 1 if self.is_bigram and stop > start else stop
        piece = TenantKey.__new__(TenantKey)
        piece.token_ids = self.token_ids[start:end]
        piece.is_bigram = self.is_bigram
        piece.limit = None
        piece.public = self.public - start
        if piece.public >= stop - start > 0:
            piece.extra_key, piece.cache_salt, piece.owner = None, None, PUBLIC
        else:
            piece.extra_key = self.extra_key
            piece.cache_salt = self.cache_salt
            piece.owner = self.owner
        return piece

    def child_key_at(self, offset: int, page_size: int = 1) -> Any:
        child = super().child_key_at(offset, page_size)
        if offset < self.public and self.extra_key is not None:
            return child[1]
        return child

    def match_at(self, other: RadixKey, offset: int, page_size: int = 1) -> int:
        matched = super().match_at(other, offset, page_size)
        if self.public > 0:
            return min(matched, self.public, other.public - offset)
        return matched

    def _check_compatible(self, other: RadixKey) -> None:
        # A public run is compared with keys of every namespace, but only up to their boundary.
        if self.public <= 0:
            super()._check_compatible(other)


def own(key: RadixKey, prefixes: PublicPrefixes, bigram: bool = False) -> TenantKey:
    """Return ``key`` with its owner and boundary; every key enters the tree through here.

    ``key`` starts at the root; it is not changed, and its token storage is shared. A LoRA adapter
    computes other KV from the same text, so its keys have no public part.
    """
    if isinstance(key, TenantKey):
        return key
    owned = TenantKey(key.token_ids, key.extra_key or SYSTEM_NAMESPACE, key.cache_salt)
    owned.is_bigram = bigram or key.is_bigram
    owned.limit = key.limit
    if prefixes and _standing(owned.extra_key)[1]:
        owned.public = prefixes.boundary(key.token_ids, owned.is_bigram)
        owned = owned[:] if owned.public >= len(owned) else owned
    return owned


@lru_cache(_NAMESPACES_KEPT)
def _standing(namespace: str) -> tuple[Owner, bool]:
    """Return the owner of a namespace and whether its KV is that of the base model."""
    parsed = parse(namespace)
    return parsed.owner, is_framed(namespace) and not parsed.lora
