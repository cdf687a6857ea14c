"""Page hashes of the lower tiers, seeded again with the owner where a path turns private.

SGLang seeds a hash chain with the namespace at its first page only. Behind a public run that page
is the same for everybody, so without a second seed two tenants would share the keys of their
private pages.
"""

from hashlib import sha256
from typing import Any

from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

from sglang_ext.types import PUBLIC

__all__ = ["boundary_seed", "node_hashes", "text_hashes", "turns_private"]


def boundary_seed(last_public: str, extra_key: str, cache_salt: str | None) -> str:
    """Return the hash that the first private page is chained to: the public text and the owner."""
    seed = storage_namespace_seed(extra_key, cache_salt)
    return sha256(bytes.fromhex(seed) + bytes.fromhex(last_public)).hexdigest()


def turns_private(node: Any) -> bool:
    """Tell whether ``node`` is the first private run behind a public one."""
    parent = node.parent
    return parent.parent is not None and parent.owner == PUBLIC != node.owner


def node_hashes(node: Any, page_size: int) -> list[str]:
    """Return the page hashes of a node that turns private; its parent must be hashed."""
    key = node.key
    seed = boundary_seed(node.parent.hash_value[-1], key.extra_key, key.cache_salt)
    hashes: list[str] = get_hash_str(key, seed, page_size=page_size)
    return hashes


def text_hashes(key: Any, page_size: int) -> list[str]:
    """Return the page hashes of a whole text, whether or not a tree holds it. O(tokens)."""
    public = max(0, key.public)
    hashes: list[str] = []
    seed = storage_namespace_seed(key.extra_key, key.cache_salt)
    if public:
        hashes += get_hash_str(key[:public], None, page_size=page_size)
        if public < len(key):
            seed = boundary_seed(hashes[-1], key.extra_key, key.cache_salt)
    if public < len(key):
        hashes += get_hash_str(key[public:], seed, page_size=page_size)
    return hashes
