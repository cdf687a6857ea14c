"""Keys of encrypted owners that all machines share: they lie in the store itself, wrapped.

The first machine that writes for an owner makes its key; whoever comes second reads that one. A
key that another machine destroyed is noticed after ``_TRUSTED_S`` at the latest. What was sealed
with it is lost for ever, as on the disk; see ``encryption``. All machines need the same master key.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sglang_ext.tiering.encryption import OwnerKey
from sglang_ext.tiering.remote_names import key_name
from sglang_ext.tiering.remote_objects import Objects, Reply, StoreSilent
from sglang_ext.types import Owner

__all__ = ["SharedKeys"]

logger = logging.getLogger(__name__)

_TRUSTED_S = 10.0
_KEY_BYTES = 32
_NONCE_BYTES = 12
_WRAPPED_BYTES = _NONCE_BYTES + _KEY_BYTES + 16


class _Known(NamedTuple):
    wrapped: bytes
    key: OwnerKey
    asked: float


class SharedKeys:
    """The owners' keys, as ``PageCodec`` asks for them. Thread-safe."""

    def __init__(
        self, objects: Objects, master: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._objects = objects
        self._wrap = AESGCM(master)
        self._clock = clock
        self._known: dict[Owner, _Known] = {}
        self._lock = threading.Lock()
        self._buffer = objects.buffer(_WRAPPED_BYTES)

    def find(self, owner: Owner) -> OwnerKey | None:
        """Return the owner's key; None when it has none, or the store is silent."""
        with self._lock:
            return self._find(owner)

    def find_or_make(self, owner: Owner) -> OwnerKey | None:
        """Return the owner's key, a new one if it has none; None when that fails.

        A key that is there but that our master key does not open is never replaced.
        """
        with self._lock:
            key = self._find(owner)
            if key is None:
                self._offer(owner)
                key = self._find(owner)
            return key

    def destroy(self, owner: Owner) -> None:
        """Make every page of ``owner`` unreadable for ever. Raises StoreSilent."""
        with self._lock:
            self._known.pop(owner, None)
            self._objects.remove([key_name(owner)])

    def _find(self, owner: Owner) -> OwnerKey | None:
        known, now = self._known.get(owner), self._clock()
        if known is not None and now - known.asked < _TRUSTED_S:
            return known.key
        wrapped = self._read(owner)
        if wrapped is None:
            self._known.pop(owner, None)
            return None
        if known is not None and known.wrapped == wrapped:
            self._known[owner] = known._replace(asked=now)
            return known.key
        return self._open(owner, wrapped, now)

    def _open(self, owner: Owner, wrapped: bytes, now: float) -> OwnerKey | None:
        nonce, sealed = wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:]
        try:
            key = OwnerKey(self._wrap.decrypt(nonce, sealed, owner.encode()))
        except (InvalidTag, ValueError):
            logger.warning("the remote key of %s was made with another master key", owner)
            return None
        self._known[owner] = _Known(wrapped, key, now)
        return key

    def _read(self, owner: Owner) -> bytes | None:
        try:
            (reply,) = self._objects.get([key_name(owner)], [self._buffer])
        except StoreSilent:
            return None
        return None if isinstance(reply, Reply) else bytes(self._buffer[:reply])

    def _offer(self, owner: Owner) -> None:
        nonce = os.urandom(_NONCE_BYTES)
        data_key = os.urandom(_KEY_BYTES)
        self._buffer[:] = nonce + self._wrap.encrypt(nonce, data_key, owner.encode())
        try:
            self._objects.put([key_name(owner)], [self._buffer])
        except StoreSilent:
            logger.warning("cannot store the remote key of %s: the store does not answer", owner)
