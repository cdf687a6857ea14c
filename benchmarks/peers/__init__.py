"""Engines to compare with, one adapter each: it installs, starts, waits and stops.

Every peer serves the same model with the same budget of KV: so many tokens in HBM, and where it has
more tiers so many in host memory, and a folder.
"""

from benchmarks.peers import ours, sglang, vllm
from benchmarks.peers.base import Budget, Peer, Running

__all__ = ["PEERS", "Budget", "Peer", "Running"]

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        ours.ONE_TIER,
        ours.THREE_TIERS,
        ours.FP8,
        sglang.DEFAULT,
        sglang.SAME_TOTAL,
        sglang.HICACHE,
        sglang.LMCACHE,
        vllm.DEFAULT,
        vllm.LMCACHE,
    )
}
"""By name, in the order of the table."""
