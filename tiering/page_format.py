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
from functools import cached_property, lru_cache
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
    "read_page",
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
_BEGIN = struct.Struct("<8sII")
_CHECKSUM = slice(16, 32)
_TAG = slice(32, 48)
_SALT = slice(48, 64)
_NONCE = slice(64, 76)
_SIZES = struct.Struct("<QQ")
_SIZES_AT = 76
_LENGTHS = struct.Struct("<5H")
_NAMES_AT = 92
"""Where the lengths of the names begin, and then they themselves."""
_OWNERS_KEPT = 1024
"""Of so many owners it is remembered how their headers begin."""
_STENCILS_KEPT = 64
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


_OTHER = (
    Reject.OTHER_MODEL,
    Reject.OTHER_FORMAT,
    Reject.OTHER_RANK,
    Reject.OTHER_OWNER,
    Reject.OTHER_KEY,
)


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
    begin, names = _named(header.groups, header.owner, len(header.key))
    end = _NAMES_AT + len(names)
    used = end + len(header.key)
    if used > HEADER_BYTES or len(header.key) > MAX_KEY_BYTES:
        raise ValueError(f"too long: header of {used} bytes, key of {len(header.key)} bytes")
    page[:HEADER_BYTES] = _stencil(begin, names, header.body_bytes, header.written_ms)
    page[end:used] = header.key
    if header.encrypted:
        page[_SALT] = header.salt
        page[_NONCE] = header.nonce


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
    model, form, rank, owner, key = _split(bytes(page[_FIXED.size : used]), lengths)
    try:
        name = Owner(owner.decode())
    except UnicodeDecodeError:
        return Reject.CORRUPT
    return PageHeader((model, form, rank), name, key, body, written, salt, nonce)


def check_page(page: memoryview) -> PageHeader | Reject:
    """Read the header and check length and checksum; hashes the body (tens of GB/s)."""
    header = parse_header(page)
    return header if isinstance(header, Reject) else _whole(page, header)


def read_page(
    page: memoryview, fingerprint: Fingerprint, owner: Owner, key: bytes
) -> PageHeader | Reject:
    """Do the same, and refuse every page but the one that is asked for."""
    asked = _read_as(page, fingerprint.groups, owner, key)
    if asked is not None:
        return _whole(page, asked)
    header = check_page(page)
    if isinstance(header, Reject):
        return header
    return judge(header, fingerprint, owner, key) or header


def _read_as(
    page: memoryview, groups: tuple[bytes, bytes, bytes], owner: Owner, key: bytes
) -> PageHeader | None:
    """Return the header if it names exactly these, at a fraction of what it costs to take apart."""
    begin, names = _named(groups, owner, len(key))
    used = _NAMES_AT + len(names) + len(key)
    head = bytes(page[:used])
    fits = used <= HEADER_BYTES <= len(page)
    if not (fits and head.startswith(begin) and head[_NAMES_AT:] == names + key):
        return None
    body_bytes, written_ms = _SIZES.unpack_from(head, _SIZES_AT)
    return PageHeader(groups, owner, key, body_bytes, written_ms, head[_SALT], head[_NONCE])


def _whole(page: memoryview, header: PageHeader) -> PageHeader | Reject:
    if HEADER_BYTES + header.body_bytes > len(page):
        return Reject.TRUNCATED
    if page[_CHECKSUM] != _checksum(page, header.body_bytes):
        return Reject.CORRUPT
    return header


def judge(header: PageHeader, fingerprint: Fingerprint, owner: Owner, key: bytes) -> Reject | None:
    """Tell why a whole page is not the one that was asked for; None when it is."""
    found = (*header.groups, header.owner, header.key)
    wanted = (*fingerprint.groups, owner, key)
    if found == wanted:
        return None
    fields = zip(_OTHER, found, wanted, strict=True)
    return next(reason for reason, is_there, asked in fields if is_there != asked)


def decode(
    page: memoryview, fingerprint: Fingerprint, owner: Owner, key: bytes
) -> memoryview | Reject:
    """Return the stored body (ciphertext when encrypted) if it is whole and the one asked for."""
    header = read_page(page, fingerprint, owner, key)
    if isinstance(header, Reject):
        return header
    return page[HEADER_BYTES : HEADER_BYTES + header.body_bytes]


def read_tag(page: memoryview) -> bytes:
    """Return the authentication tag that ``set_tag`` wrote."""
    return bytes(page[_TAG])


def read_written_ms(page: memoryview) -> int:
    """Return when a page was written, as its header says, which may be damaged."""
    written: int = _SIZES.unpack_from(page, _SIZES_AT)[1]
    return written


def _checksum(page: memoryview, body_bytes: int) -> bytes:
    digest = xxh3_128(page[: _CHECKSUM.start])
    digest.update(page[_CHECKSUM.stop : HEADER_BYTES + body_bytes])
    return digest.digest()


@lru_cache(maxsize=_OWNERS_KEPT)
def _named(groups: tuple[bytes, bytes, bytes], owner: Owner, key_bytes: int) -> tuple[bytes, bytes]:
    """Return how a header begins, and the lengths of all names and those before the key."""
    names = (*groups, owner.encode())
    used = _FIXED.size + sum(map(len, names)) + key_bytes
    lengths = _LENGTHS.pack(*map(len, names), key_bytes)
    return _BEGIN.pack(_MAGIC, FORMAT_VERSION, used), lengths + b"".join(names)


@lru_cache(maxsize=_STENCILS_KEPT)
def _stencil(begin: bytes, names: bytes, body_bytes: int, written_ms: int) -> bytes:
    """Return a header block without its key; its checksum, tag, salt and nonce are zero."""
    sizes = _SIZES.pack(body_bytes, written_ms).rjust(_NAMES_AT - len(begin), b"\0")
    return (begin + sizes + names).ljust(HEADER_BYTES, b"\0")


def _split(names: bytes, lengths: list[int]) -> list[bytes]:
    found, start = [], 0
    for length in lengths:
        found.append(names[start : start + length])
        start += length
    return found


def _join(*fields: str | int) -> bytes:
    texts = [str(field) for field in fields]
    return "".join(f"{len(text)}:{text}" for text in texts).encode()
