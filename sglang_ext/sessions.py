"""What can be done with one conversation, in the process that owns the tree."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_ext.namespace import parse
from sglang_ext.radix.order import Reason
from sglang_ext.radix.sessions import Session, text_of
from sglang_ext.removal import Flushed, free_nodes, is_there
from sglang_ext.types import Tier

__all__ = ["Return", "close", "held", "pause", "what_returns"]


class Return(NamedTuple):
    """What brings a conversation back: a request for these tokens, in this division of its space.

    ``tier``s say where the tokens are now; a text that has left every tier has none.
    """

    token_ids: list[int]
    client_key: str
    cache_salt: str | None
    tiers: dict[Tier, int]


def close(cache: Any, session: Session) -> Flushed:
    """Free what only this session uses, in every tier. O(its pages).

    The session is forgotten unless something of it is still in use; ask again then.
    """
    nodes = cache.sessions.alone(session)
    disk_bytes = 0
    if cache.store is not None:
        disk_bytes = cache.store.delete_pages(session.owner, _pages(cache, session, nodes))
    with cache.sessions.dropping():
        flushed = free_nodes(cache, nodes, (Tier.HBM, Tier.CPU), Reason.FLUSH)
    if not any(flushed.in_use.values()):
        cache.sessions.forget(session)
    return flushed._replace(disk_bytes=disk_bytes)


def pause(cache: Any, session: Session, to: Tier) -> Flushed:
    """Free the upper copies of what only this session uses, where the copy in ``to`` exists.

    ``to`` is CPU or NVME, a tier that the cache has. A missing copy in CPU is begun; the disk gets
    its copies by itself, soon after. What waits for its copy, or is locked, is counted as in use.
    """
    nodes = cache.sessions.alone(session)
    flushed = free_nodes(cache, nodes, (Tier.HBM,), Reason.FLUSH, copied=True)
    if to is Tier.CPU:
        return flushed
    on_disk = _on_disk(cache, nodes)
    below = free_nodes(cache, on_disk, (Tier.CPU,), Reason.FLUSH)
    there = [node for node in nodes if is_there(cache, node)]
    waiting = sum(len(node.key) for node in there if Tier.CPU in node.tiers)
    return Flushed({**flushed.freed, **below.freed}, {**flushed.in_use, Tier.CPU: waiting})


def held(cache: Any, session: Session) -> dict[Tier, int]:
    """Return the tokens that only this session uses, by tier. O(its pages)."""
    nodes = cache.sessions.alone(session)
    tokens = {Tier.HBM: 0, Tier.CPU: 0, Tier.NVME: 0}
    for node in nodes:
        for tier in node.tiers:
            tokens[tier] += len(node.key)
    if cache.store is not None:
        there = cache.store.holds(session.owner, _pages(cache, session, nodes))
        tokens[Tier.NVME] = sum(there) * cache.page_size
    return tokens


def what_returns(cache: Any, session: Session) -> Return | None:
    """Return the last text of a session as far as some tier has it; None when none has."""
    text = session.text
    if text is None:
        if not session.anchors:
            return None
        text = text_of(next(reversed(session.anchors)))
    tokens, extra_key, cache_salt = text
    key = RadixKey(tokens, extra_key, cache_salt=cache_salt)
    found = cache.match_prefix(MatchPrefixParams(key=key))
    tiers = {Tier.HBM: int(found.device_prefix_len), Tier.CPU: int(found.host_hit_length)}
    memory = sum(tiers.values())
    tiers[Tier.NVME] = cache.query_storage_hit_length(
        found.last_host_node, tokens[memory:], None, None, extra_key, cache_salt
    )
    there = sum(tiers.values())
    if there == 0:
        return None
    # The engine always computes the last token that it is asked for.
    return Return(tokens[: there + 1].tolist(), parse(extra_key).client_key, cache_salt, tiers)


def _pages(cache: Any, session: Session, nodes: Sequence[Any]) -> list[str]:
    """Return the hashes of what only this session uses, in memory or not."""
    in_memory = (page for node in nodes for page in node.hash_value or ())
    return list(dict.fromkeys([*in_memory, *cache.sessions.lost_alone(session)]))


def _on_disk(cache: Any, nodes: Sequence[Any]) -> list[Any]:
    """Return the nodes of which the disk of every rank has every page."""
    holds = cache.store.holds
    there = [bool(node.hash_value) and all(holds(node.owner, node.hash_value)) for node in nodes]
    missing = cache.most_of_all_ranks([int(not flag) for flag in there])
    return [node for node, gone in zip(nodes, missing, strict=True) if not gone]
