"""Shared stores over small pages."""

from collections.abc import Callable

from sglang_ext.tiering.caps import Caps
from sglang_ext.tiering.page_format import Fingerprint
from sglang_ext.tiering.remote_config import RemoteConfig
from sglang_ext.tiering.remote_objects import Objects
from sglang_ext.tiering.remote_store import RemoteStore
from sglang_ext.types import Owner
from tests.tiering.stores import FINGERPRINT, MASTER, FakeClock

__all__ = ["LARGEST_BYTES", "make_remote"]

LARGEST_BYTES = 200_000
"""The largest body that a test stores."""


def make_remote(
    objects: Objects,
    *,
    encrypted: bool = False,
    caps: Caps | None = None,
    clock: Callable[[], float] | None = None,
    fingerprint: Fingerprint = FINGERPRINT,
    page_bytes: int = LARGEST_BYTES,
    timeout_s: float = 30.0,
    lifetime_s: Callable[[Owner], float] = lambda owner: float("inf"),
    copies: Callable[[Owner], bool] = lambda owner: True,
    master: bytes = MASTER,
) -> RemoteStore:
    """Open one machine's view of a store, all owners encrypted or none, without a thread."""
    config = RemoteConfig(
        fingerprint=fingerprint,
        page_bytes=page_bytes,
        caps=caps or Caps(total_bytes=2**30),
        timeout_s=timeout_s,
        encrypted=lambda owner: encrypted,
        lifetime_s=lifetime_s,
        copies=copies,
    )
    key = master if encrypted else None
    store = RemoteStore(config, objects, key, clock or FakeClock(), background=False)
    store.start()
    return store
