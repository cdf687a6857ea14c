"""Opens the shared store for one engine rank, from the storage backend's configuration."""

from collections.abc import Callable, Mapping
from typing import Any

from sglang_ext.tiering.caps import Caps
from sglang_ext.tiering.nvme_store import StoreConfig
from sglang_ext.tiering.remote_config import RemoteConfig
from sglang_ext.tiering.remote_mooncake import P2P, MooncakeAddress, MooncakeObjects
from sglang_ext.tiering.remote_objects import Objects
from sglang_ext.tiering.remote_store import RemoteStore
from sglang_ext.types import Owner

__all__ = ["open_remote"]


def open_remote(
    given: Mapping[str, Any],
    local: StoreConfig,
    page_bytes: int,
    master_key: bytes | None,
    copies: Callable[[Owner], bool],
    lifetime_s: Callable[[Owner], float],
) -> RemoteStore:
    """Open what ``given`` names: ``master``, ``metadata``, ``admin``, ``total_bytes``.

    A store that does not answer is no error, it is asked again. Raises UnsupportedError where its
    client is not installed.
    """
    config = RemoteConfig(
        fingerprint=local.fingerprint,
        page_bytes=page_bytes,
        caps=Caps(total_bytes=int(given["total_bytes"])),
        encrypted=local.encrypted,
        copies=copies,
        lifetime_s=lifetime_s,
    )
    return RemoteStore(config, _objects(given), master_key)


def _objects(given: Mapping[str, Any]) -> Objects:
    return MooncakeObjects(
        MooncakeAddress(
            master=str(given["master"]),
            metadata=str(given.get("metadata") or P2P),
            admin=given.get("admin"),
        )
    )
