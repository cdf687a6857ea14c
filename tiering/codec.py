"""Turns a body into the bytes of a page and back, encrypted where the owner asks for it."""

from collections.abc import Callable
from typing import Protocol

from sglang_ext.tiering.encryption import OwnerKey
from sglang_ext.tiering.page_format import (
    HEADER_BYTES,
    Fingerprint,
    PageHeader,
    Reject,
    associated_data,
    check_page,
    judge,
    lay_out,
    read_tag,
    set_tag,
    stamp,
)
from sglang_ext.types import Owner

__all__ = ["OwnerKeys", "PageCodec"]


class OwnerKeys(Protocol):
    """Where the keys of owners come from; None where there is none, or it cannot be used."""

    def find(self, owner: Owner) -> OwnerKey | None: ...

    def find_or_make(self, owner: Owner) -> OwnerKey | None: ...


class PageCodec:
    """Seals and opens pages of one engine configuration. Thread-safe."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        keyring: OwnerKeys | None,
        encrypted: Callable[[Owner], bool],
    ) -> None:
        self.fingerprint = fingerprint
        self._keyring = keyring
        self._encrypted = encrypted

    def encrypts(self, owner: Owner) -> bool:
        """Tell whether pages of ``owner`` lie encrypted on the disk."""
        return self._encrypted(owner)

    def file_names(self, owner: Owner, keys: list[bytes], writing: bool) -> list[bytes] | None:
        """Return the names under which pages of ``owner`` are filed, in the order of ``keys``.

        None when the owner's pages must be encrypted and it has no usable key. ``writing`` makes
        a key for an owner that has none.
        """
        if not self._encrypted(owner):
            return keys
        key = self._owner_key(owner, writing)
        return None if key is None else [key.blind(name) for name in keys]

    def seal(self, page: memoryview, owner: Owner, name: bytes, size: int, written_ms: int) -> bool:
        """Make the ``size`` bytes behind the header block a whole page; False without a key.

        ``name`` is what ``file_names`` gave. The body is overwritten when it is encrypted.
        """
        header = PageHeader(self.fingerprint.groups, owner, name, size, written_ms)
        if self._encrypted(owner):
            key = self._owner_key(owner, writing=False)
            if key is None:
                return False
            salt, nonce = key.draw()
            lay_out(page, header._replace(salt=salt, nonce=nonce))
            body = page[HEADER_BYTES : HEADER_BYTES + size]
            set_tag(page, key.seal(body, nonce, associated_data(page)))
        else:
            lay_out(page, header)
        stamp(page, size)
        return True

    def open(self, page: memoryview, owner: Owner, name: bytes) -> memoryview | Reject:
        """Return the body if the page is whole and the one asked for; decrypts in place."""
        header = check_page(page)
        if isinstance(header, Reject):
            return header
        reason = judge(header, self.fingerprint, owner, name)
        if reason is not None:
            return reason
        if self._encrypted(owner):
            return self._decrypt(page, header) if header.encrypted else Reject.NOT_ENCRYPTED
        if header.encrypted:
            return Reject.NO_KEY
        return page[HEADER_BYTES : HEADER_BYTES + header.body_bytes]

    def _decrypt(self, page: memoryview, header: PageHeader) -> memoryview | Reject:
        key = self._owner_key(header.owner, writing=False)
        if key is None:
            return Reject.NO_KEY
        body = page[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
        data = associated_data(page)
        fits = key.open(body, header.salt, header.nonce, read_tag(page), data)
        return body if fits else Reject.NO_KEY

    def _owner_key(self, owner: Owner, writing: bool) -> OwnerKey | None:
        if self._keyring is None:
            return None
        return self._keyring.find_or_make(owner) if writing else self._keyring.find(owner)
