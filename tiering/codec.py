"""Turns a body into the bytes of a page and back, encrypted where the owner asks for it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from sglang_ext.tiering.encryption import OwnerKey
from sglang_ext.tiering.page_format import (
    HEADER_BYTES,
    Fingerprint,
    PageHeader,
    Reject,
    associated_data,
    lay_out,
    read_page,
    read_tag,
    set_tag,
    stamp,
)
from sglang_ext.types import Owner

__all__ = ["Opener", "OwnerKeys", "PageCodec", "Sealer"]

Sealer = Callable[[memoryview, bytes, int, int], None]
"""(page, filed name, body bytes, milliseconds since 1970): make it a whole page."""

Opener = Callable[[memoryview, bytes], memoryview | Reject]
"""(page, filed name): its body, or what is wrong with it."""


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

    def names(self, pages: Sequence[tuple[Owner, bytes]], writing: bool) -> list[bytes | None]:
        """Return the names under which pages, each an owner and a key, are filed.

        None when the owner's pages must be encrypted and it has no usable key. ``writing`` makes
        a key for an owner that has none.
        """
        owners = dict.fromkeys(owner for owner, _ in pages)
        naming = {owner: self._naming(owner, writing) for owner in owners}
        return [naming[owner](key) for owner, key in pages]

    def sealer(self, owner: Owner) -> Sealer | None:
        """Return what makes pages of ``owner`` whole; None without a key. It asks for no key again.

        ``page`` holds a body behind the header block, which is overwritten when it is encrypted.
        """
        if not self._encrypted(owner):
            return partial(self._seal, owner, None)
        key = self._owner_key(owner, writing=False)
        return None if key is None else partial(self._seal, owner, key)

    def opener(self, owner: Owner) -> Opener:
        """Return what reads pages of ``owner``; it asks for no key again. Decrypts in place.

        A page is good if it is whole and the one asked for.
        """
        encrypted = self._encrypted(owner)
        key = self._owner_key(owner, writing=False) if encrypted else None
        return partial(self._open, owner, encrypted, key)

    def _seal(
        self,
        owner: Owner,
        key: OwnerKey | None,
        page: memoryview,
        name: bytes,
        size: int,
        written_ms: int,
    ) -> None:
        header = PageHeader(self.fingerprint.groups, owner, name, size, written_ms)
        if key is None:
            lay_out(page, header)
        else:
            salt, nonce = key.draw()
            lay_out(page, header._replace(salt=salt, nonce=nonce))
            body = page[HEADER_BYTES : HEADER_BYTES + size]
            set_tag(page, key.seal(body, nonce, associated_data(page)))
        stamp(page, size)

    def _open(
        self, owner: Owner, encrypted: bool, key: OwnerKey | None, page: memoryview, name: bytes
    ) -> memoryview | Reject:
        header = read_page(page, self.fingerprint, owner, name)
        if isinstance(header, Reject):
            return header
        if encrypted and not header.encrypted:
            return Reject.NOT_ENCRYPTED
        body = page[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
        if not header.encrypted:
            return body
        fits = key is not None and key.open(
            body, header.salt, header.nonce, read_tag(page), associated_data(page)
        )
        return body if fits else Reject.NO_KEY

    def _naming(self, owner: Owner, writing: bool) -> Callable[[bytes], bytes | None]:
        if not self._encrypted(owner):
            return lambda key: key
        found = self._owner_key(owner, writing)
        return (lambda key: None) if found is None else found.blind

    def _owner_key(self, owner: Owner, writing: bool) -> OwnerKey | None:
        if self._keyring is None:
            return None
        return self._keyring.find_or_make(owner) if writing else self._keyring.find(owner)
