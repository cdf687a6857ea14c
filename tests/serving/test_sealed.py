"""What a sealed tenant leaves in a real server: in memory, in files, in what others can see."""

from array import array
from pathlib import Path

import pytest

from sglang_ext.tiering.encryption import KeyRing, master_key
from sglang_ext.tiering.page_format import (
    HEADER_BYTES,
    PageHeader,
    associated_data,
    parse_header,
    read_tag,
)
from sglang_ext.types import Owner
from tests.serving.memory import found_in, scheduler_of
from tests.serving.server import Client
from tests.serving.tiered import LEAST, Tiers, ask, flood, flush, story, wait

pytestmark = pytest.mark.serving

OWNER = Owner("s:sealed")
CANARY = 77
WINDOW = 64
PAGES = 6


def pages_on_disk(folder: Path) -> list[memoryview]:
    """Return the pages of the sealed tenant as they lie in the files."""
    found = []
    for path in folder.glob("slabs/*/*.slab"):
        content = memoryview(bytearray(path.read_bytes()))
        size = int(path.stem.partition("-")[2])
        pages = [content[start : start + size] for start in range(0, len(content), size)]
        for page in pages:
            header = parse_header(page)
            if isinstance(header, PageHeader) and header.owner == OWNER:
                assert header.encrypted
                found.append(page)
    return found


def opened(tiers: Tiers, page: memoryview) -> bytes:
    """Return what a page says to who has the master key."""
    (folder,) = tiers.pages.iterdir()
    key = KeyRing(folder / "keys", master_key(str(tiers.master_key))).find(OWNER)
    header = parse_header(page)
    assert key is not None and isinstance(header, PageHeader)
    body = page[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
    data = associated_data(page)
    assert key.open(body, header.salt, header.nonce, read_tag(page), data)
    return bytes(body)


def windows(body: bytes) -> list[bytes]:
    """Return pieces of a page that are no chance: from its first layer, its last, K and V."""
    places = range(len(body) // 8, len(body), len(body) // 4)
    return [body[place : place + WINDOW] for place in places]


def token_ids(client: Client, text: str) -> list[bytes]:
    """Return the token ids of some whole pages of a text, as 32-bit and as 64-bit numbers."""
    answer = client.post("/tokenize", {"prompt": text})
    answer.raise_for_status()
    ids = answer.json()["tokens"]
    pages = [ids[start : start + 16] for start in range(16, 16 * 3, 16)]
    return [array(kind, page).tobytes() for page in pages for kind in "iq"]


def files(folder: Path) -> bytes:
    """Return the content of every file in the folder: slabs, index, its journal, keys."""
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_after_a_flush_nothing_of_a_sealed_tenant_is_left_in_memory_or_files(tiers: Tiers) -> None:
    """KV bytes anywhere in the process, KV bytes and token ids in files.

    What lies on the disk is unreadable, then gone. That pools hold no token ids shows where they
    can be looked at one by one (tests/sglang_ext/test_sealing.py); on Python's heap ids stay until
    their memory is used again (docs/security.md).
    """
    sealed, admin = tiers.client("sealed"), tiers.client("admin")
    (folder,) = tiers.pages.iterdir()
    pid = scheduler_of(tiers.server.pid)
    # Whoever holds most gives first: that must be the tenant itself.
    admin.post("/ext/v1/flush", {"all": True}).raise_for_status()
    ask(sealed, CANARY)
    wait(lambda: len(pages_on_disk(folder)) >= PAGES)
    pieces = [
        piece for page in pages_on_disk(folder)[:PAGES] for piece in windows(opened(tiers, page))
    ]
    assert len(set(pieces)) == len(pieces), "a piece that every page has proves nothing"
    unreadable = (*pieces, *token_ids(sealed, story(CANARY)))
    content = files(tiers.pages)
    assert not any(piece in content for piece in unreadable)
    flood(sealed, 900, 4)
    assert ask(sealed, CANARY).sources["host"] >= LEAST, "it went down and came back"
    assert all(found_in(pid, pieces).values()), "the scan must find what is there"
    wait(lambda: not any(flush(admin, "sealed")["in_use"].values()))
    left = {piece for piece, places in found_in(pid, pieces).items() if places}
    assert not left, f"{len(left)} of {len(pieces)} pieces are left"
    content = files(tiers.pages)
    assert not any(piece in content for piece in unreadable)
    assert not pages_on_disk(folder)
