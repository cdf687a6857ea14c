"""Keys of owners: who can open what, and what is left when a key is destroyed."""

import threading
from pathlib import Path

import pytest

from sglang_ext.errors import KeyRingError
from sglang_ext.tiering.encryption import KeyRing, OwnerKey, master_key
from sglang_ext.tiering.workers import scratch
from sglang_ext.types import Owner
from tests.tiering.stores import ALICE, BOB, MASTER, body_of, get, make_store, put, refs_of

HEX = MASTER.hex()


def make_key(ring: KeyRing, owner: Owner) -> OwnerKey:
    key = ring.find_or_make(owner)
    assert key is not None
    return key


def sealed(key: OwnerKey, text: bytes = b"secret", data: bytes = b"header") -> tuple[bytes, ...]:
    body = memoryview(bytearray(text))
    salt, nonce = key.draw()
    tag = key.seal(body, nonce, data)
    return bytes(body), salt, nonce, tag


def opened(key: OwnerKey, parts: tuple[bytes, ...], data: bytes = b"header") -> bytes | None:
    body = memoryview(bytearray(parts[0]))
    return bytes(body) if key.open(body, *parts[1:], data) else None  # type: ignore[call-arg]


def test_what_is_sealed_opens_again_even_after_a_restart(tmp_path: Path) -> None:
    parts = sealed(make_key(KeyRing(tmp_path, MASTER), ALICE))
    assert parts[0] != b"secret"
    again = KeyRing(tmp_path, MASTER).find(ALICE)
    assert again is not None
    assert opened(again, parts) == b"secret"


@pytest.mark.parametrize("encrypted", [True, False])
def test_what_was_decrypted_does_not_stay_in_the_buffers_of_the_threads(
    encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: list[memoryview] = []

    def noted(size: int) -> memoryview:
        buffers.append(scratch(size))
        return buffers[-1]

    monkeypatch.setattr("sglang_ext.tiering.runs.scratch", noted)
    refs = refs_of(ALICE, range(12))
    store = make_store(tmp_path, encrypted=encrypted)
    try:
        assert all(put(store, refs))
        assert all(get(store, refs))
    finally:
        store.close()
    left = b"".join(bytes(buffer) for buffer in buffers)
    assert any(body_of(ref)[:64] in left for ref in refs) != encrypted


@pytest.mark.trial(72)
def test_the_key_of_another_owner_does_not_open(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path, MASTER)
    parts = sealed(make_key(ring, ALICE))
    assert opened(make_key(ring, BOB), parts) is None


def test_a_body_does_not_open_under_another_header(tmp_path: Path) -> None:
    key = make_key(KeyRing(tmp_path, MASTER), ALICE)
    assert opened(key, sealed(key), data=b"other header") is None


def test_a_body_that_does_not_open_is_wiped(tmp_path: Path) -> None:
    key = make_key(KeyRing(tmp_path, MASTER), ALICE)
    cipher, salt, nonce, tag = sealed(key)
    body = memoryview(bytearray(cipher))
    assert not key.open(body, salt, nonce, bytes(16), b"header")
    assert bytes(body) == bytes(len(cipher))


@pytest.mark.trial(72)
def test_a_destroyed_key_never_comes_back(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path, MASTER)
    parts = sealed(make_key(ring, ALICE))
    ring.destroy(ALICE)
    assert ring.find(ALICE) is None
    assert KeyRing(tmp_path, MASTER).find(ALICE) is None
    assert opened(make_key(ring, ALICE), parts) is None
    ring.destroy(BOB)  # who never had a key


def test_no_salt_and_nonce_twice(tmp_path: Path) -> None:
    make_key(KeyRing(tmp_path, MASTER), ALICE)
    drawn: list[tuple[bytes, bytes]] = []

    def draw(key: OwnerKey) -> None:
        drawn.extend(key.draw() for _ in range(500))

    for _ in range(3):  # as after a restart
        key = make_key(KeyRing(tmp_path, MASTER), ALICE)
        threads = [threading.Thread(target=draw, args=(key,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(drawn)) == len(drawn) == 6000


def test_blinded_names_differ_by_owner_and_are_stable(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path, MASTER)
    alice, bob = make_key(ring, ALICE), make_key(ring, BOB)
    assert alice.blind(b"page") == make_key(KeyRing(tmp_path, MASTER), ALICE).blind(b"page")
    assert len({b"page", alice.blind(b"page"), bob.blind(b"page"), alice.blind(b"gape")}) == 4


def test_another_master_key_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    parts = sealed(make_key(KeyRing(tmp_path, MASTER), ALICE))
    with pytest.raises(KeyRingError, match="another master key"):
        KeyRing(tmp_path, bytes(32))
    assert opened(make_key(KeyRing(tmp_path, MASTER), ALICE), parts) == b"secret"


def test_a_damaged_key_is_kept_and_not_replaced(tmp_path: Path) -> None:
    make_key(KeyRing(tmp_path, MASTER), ALICE)
    ring = KeyRing(tmp_path, MASTER)
    for path in tmp_path.glob("*/*.key"):
        path.write_bytes(path.read_bytes()[:-1])
    files = {path: path.read_bytes() for path in tmp_path.glob("*/*.key")}
    assert ring.find_or_make(ALICE) is None
    assert {path: path.read_bytes() for path in tmp_path.glob("*/*.key")} == files


def test_keys_on_disk_are_wrapped_and_private(tmp_path: Path) -> None:
    make_key(KeyRing(tmp_path / "keys", MASTER), ALICE)
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0
    for path in (tmp_path / "keys").glob("*/*.key"):
        assert path.stat().st_mode & 0o077 == 0


def test_master_key_from_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "master"
    path.write_text(HEX + "\n")
    path.chmod(0o600)
    assert master_key(str(path)) == MASTER


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_master_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "master"
    path.write_text(HEX)
    path.chmod(mode)
    with pytest.raises(KeyRingError, match="must be 0600"):
        master_key(str(path))


@pytest.mark.parametrize("text", ["", "00", HEX[:-2], HEX + "00", "z" * 64, "ä" * 64])
def test_malformed_master_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path = tmp_path / "master"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(KeyRingError, match="64 hexadecimal digits"):
        master_key(str(path))
    monkeypatch.setenv("MASTER", text)
    with pytest.raises(KeyRingError, match="64 hexadecimal digits"):
        master_key("env:MASTER")


def test_missing_master_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyRingError, match="No such file"):
        master_key(str(tmp_path / "none"))
    with pytest.raises(KeyRingError, match="NO_SUCH_NAME is not set"):
        master_key("env:NO_SUCH_NAME")


def test_master_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER", HEX)
    assert master_key("env:MASTER") == MASTER


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KeyRingError, match="folder of keys"):
        KeyRing(tmp_path / "file", MASTER)
