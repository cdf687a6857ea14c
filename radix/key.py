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
        self,
        token_ids: "array[int]",
        extra_key: str | None,
        owner: Owner,
        cache_salt: str | None = None,
        is_bigram: bool = False,
        limit: int | None = None,
        public: int = 0,
    ) -> None:
        super().__init__(token_ids, extra_key, is_bigram, limit, cache_salt)
        self.owner = owner
        self.public = public

    def __len__(self) -> int:
        if self.limit is not None:
            return int(super().__len__())
        count = len(self.token_ids)
        return count - 1 if self.is_bigram and count else count

    def __getitem__(self, idx: int | slice) -> "TenantKey":
        if isinstance(idx, int):
            idx = slice(idx, idx + 1)
        start, stop, _ = idx.indices(len(self))
        # Neighbouring bigrams share a token, so a run of them ends one token later.
        end = stop + 1 if self.is_bigram and stop > start else stop
        tokens, public = self.token_ids[start:end], self.public - start
        if public >= stop - start > 0:
            return TenantKey(tokens, None, PUBLIC, None, self.is_bigram, None, public)
        return TenantKey(
            tokens, self.extra_key, self.owner, self.cache_salt, self.is_bigram, None, public
        )

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
        if self.public > 0:
            return
        if self.extra_key != other.extra_key or self.cache_salt != other.cache_salt:
            super()._check_compatible(other)


def own(key: RadixKey, prefixes: PublicPrefixes, bigram: bool = False) -> TenantKey:
    """Return ``key`` with its owner and boundary; every key enters the tree through here.

    ``key`` starts at the root; it is not changed, and its token storage is shared. A LoRA adapter
    computes other KV from the same text, so its keys have no public part.
    """
    if isinstance(key, TenantKey):
        return key
    namespace = key.extra_key or SYSTEM_NAMESPACE
    owner, base_model = _standing(namespace)
    bigram = bigram or key.is_bigram
    owned = TenantKey(key.token_ids, namespace, owner, key.cache_salt, bigram, key.limit)
    if prefixes and base_model:
        owned.public = prefixes.boundary(key.token_ids, bigram)
        owned = owned[:] if owned.public >= len(owned) else owned
    return owned


@lru_cache(_NAMESPACES_KEPT)
def _standing(namespace: str) -> tuple[Owner, bool]:
    """Return the owner of a namespace and whether its KV is that of the base model."""
    parsed = parse(namespace)
    return parsed.owner, is_framed(namespace) and not parsed.lora
