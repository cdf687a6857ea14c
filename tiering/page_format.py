"""What one page looks like on disk: a header that says when the bytes are valid, then the body.

    [0, 4096)                    header: fixed fields, then five names (see ``_FIXED``), then zeros
    [4096, 4096 + body_bytes)    body, as the engine wrote it, or its ciphertext

A header names the model, the format of the numbers, the rank, the owner and the key, so a page that
lies in the wrong place is refused even when it is whole. The checksum (xxh3, 128 bits) covers the
header and the body. It finds accidents; against a forger there is encryption, whose tag covers the
same bytes. Reading bad data is not an error: every check returns a ``Reject``.
"""

import struct
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from xxhash import xxh3_128

from sglang_ext.types import Owner

__all__ = [
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "MAX_KEY_BYTES",
    "Fingerprint",
    "PageHeader",
    "Reject",
    "associated_data",
    "check_page",
    "decode",
    "judge",
    "lay_out",
    "parse_header",
    "read_tag",
    "read_written_ms",
    "set_tag",
    "stamp",
]

HEADER_BYTES = 4096
"""One block, so that the body of an aligned page stays aligned for O_DIRECT."""
FORMAT_VERSION = 1
MAX_KEY_BYTES = 128
_MAGIC = b"sgl-ext\0"
# magic, version, bytes used, checksum, tag, salt, nonce, body bytes, written (ms), five lengths
_FIXED = struct.Struct("<8sII16s16s16s12sQQ5H")
_CHECKSUM = slice(16, 32)
_TAG = slice(32, 48)
_WRITTEN_MS = struct.Struct("<Q")
_WRITTEN_AT = struct.calcsize("<8sII16s16s16s12sQ")
_NO_SALT = bytes(16)
_NO_NONCE = bytes(12)


class Reject(StrEnum):
    """Why the bytes of a page are not used. Also the name of the counter that tells so."""

    EMPTY = "empty"
    """Nothing was ever written here, or it was deleted or filled with zeros."""
    NOT_A_PAGE = "not_a_page"
    VERSION = "version"
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    OTHER_MODEL = "other_model"
    """Computed by another model or by other weights."""
    OTHER_FORMAT = "other_format"
    """Another dtype, scale set, layout or page size."""
    OTHER_RANK = "other_rank"
    OTHER_OWNER = "other_owner"
    OTHER_KEY = "other_key"
    NOT_ENCRYPTED = "not_encrypted"
    """In the clear, though its owner asks for encryption."""
    NO_KEY = "no_key"
    """The owner's key was destroyed, or is not the one that sealed the page."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What makes the pages of one engine process interchangeable; constant while it runs.

    ``layout`` should name the shape too, so that pages of another shape are never read. ``scales``
    identifies the FP8 scale set (empty when there is none).
    """

    model_id: str
    weights_hash: str
    kv_dtype: str
    layout: str
    page_size: int
    scales: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @cached_property
    def groups(self) -> tuple[bytes, bytes, bytes]:
        """Model, format and rank as unambiguous bytes: what a header keeps and compares."""
        return (
            _join(self.model_id, self.weights_hash),
            _join(self.kv_dtype, self.scales, self.layout, self.page_size),
            _join(self.tp_rank, self.tp_size, self.pp_rank, self.pp_size),
        )


class PageHeader(NamedTuple):
    """The fields of a header. ``salt`` and ``nonce`` are all zero when the body is in the clear."""

    groups: tuple[bytes, bytes, bytes]
    owner: Owner
    key: bytes
    body_bytes: int
    written_ms: int
    salt: bytes = _NO_SALT
    nonce: bytes = _NO_NONCE

    @property
    def encrypted(self) -> bool:
        """Whether the body is ciphertext."""
        return self.salt != _NO_SALT


def lay_out(page: memoryview, header: PageHeader) -> None:
    """Write ``header`` into the first block of ``page``, its tag and checksum still zero.

    Raises ValueError when the names do not fit in the block.
    """
    names = [*header.groups, header.owner.encode(), header.key]
    used = _FIXED.size + sum(map(len, names))
    if used > HEADER_BYTES or len(header.key) > MAX_KEY_BYTES:
        raise ValueError(f"too long: header of {used} bytes, key of {len(header.key)} bytes")
    fixed = _FIXED.pack(
        _MAGIC,
        FORMAT_VERSION,
        used,
        bytes(16),
        bytes(16),
        header.salt,
        header.nonce,
        header.body_bytes,
        header.written_ms,
        *map(len, names),
    )
    page[:HEADER_BYTES] = b"".join([fixed, *names]).ljust(HEADER_BYTES, b"\0")


def associated_data(page: memoryview) -> bytes:
    """Return what encryption binds a body to: its header without tag and checksum."""
    return bytes(page[: _CHECKSUM.start]) + bytes(page[_TAG.stop : HEADER_BYTES])


def set_tag(page: memoryview, tag: bytes) -> None:
    """Write the authentication tag of an encrypted body into the header; ``stamp`` comes after."""
    page[_TAG] = tag


def stamp(page: memoryview, body_bytes: int) -> None:
    """Write the checksum over header and body: the last step before a page goes to disk."""
    page[_CHECKSUM] = _checksum(page, body_bytes)


def parse_header(page: memoryview) -> PageHeader | Reject:
    """Read the header block without looking at the body; costs a few microseconds."""
    if len(page) < HEADER_BYTES:
        return Reject.TRUNCATED
    magic, version, used, _, _, salt, nonce, body, written, *lengths = _FIXED.unpack_from(page)
    if magic != _MAGIC:
        return Reject.EMPTY if magic == bytes(len(_MAGIC)) else Reject.NOT_A_PAGE
    if version != FORMAT_VERSION:
        return Reject.VERSION
    if used != _FIXED.size + sum(lengths) or used > HEADER_BYTES:
        return Reject.CORRUPT
    model, form, rank, owner, key = _split(page, lengths)
    try:
        name = Owner(owner.decode())
    except UnicodeDecodeError:
        return Reject.CORRUPT
    return PageHeader((model, form, rank), name, key, body, written, salt, nonce)


def check_page(page: memoryview) -> PageHeader | Reject:
    """Read the header and check length and checksum; hashes the body (tens of GB/s)."""
    header = parse_header(page)
    if isinstance(header, Reject):
        return header
    if HEADER_BYTES + header.body_bytes > len(page):
        return Reject.TRUNCATED
    if page[_CHECKSUM] != _checksum(page, header.body_bytes):
        return Reject.CORRUPT
    return header


def judge(header: PageHeader, fingerprint: Fingerprint, owner: Owner, key: bytes) -> Reject | None:
    """Tell why a whole page is not the one that was asked for; None when it is."""
    reasons = (
        (header.groups[0], fingerprint.groups[0], Reject.OTHER_MODEL),
        (header.groups[1], fingerprint.groups[1], Reject.OTHER_FORMAT),
        (header.groups[2], fingerprint.groups[2], Reject.OTHER_RANK),
        (header.owner, owner, Reject.OTHER_OWNER),
        (header.key, key, Reject.OTHER_KEY),
    )
    return next((reason for found, wanted, reason in reasons if found != wanted), None)


def decode(
    page: memoryview, fingerprint: Fingerprint, owner: Owner, key: bytes
) -> memoryview | Reject:
    """Return the stored body (ciphertext when encrypted) if it is whole and the one asked for."""
    header = check_page(page)
    if isinstance(header, Reject):
        return header
    reason = judge(header, fingerprint, owner, key)
    return reason or page[HEADER_BYTES : HEADER_BYTES + header.body_bytes]


def read_tag(page: memoryview) -> bytes:
    """Return the authentication tag that ``set_tag`` wrote."""
    return bytes(page[_TAG])


def read_written_ms(page: memoryview) -> int:
    """Return when a page was written, as its header says, which may be damaged."""
    written: int = _WRITTEN_MS.unpack_from(page, _WRITTEN_AT)[0]
    return written


def _checksum(page: memoryview, body_bytes: int) -> bytes:
    digest = xxh3_128(page[: _CHECKSUM.start])
    digest.update(page[_CHECKSUM.stop : HEADER_BYTES + body_bytes])
    return digest.digest()


def _split(page: memoryview, lengths: list[int]) -> list[bytes]:
    names, start = [], _FIXED.size
    for length in lengths:
        names.append(bytes(page[start : start + length]))
        start += length
    return names


def _join(*fields: str | int) -> bytes:
    texts = [str(field) for field in fields]
    return "".join(f"{len(text)}:{text}" for text in texts).encode()
