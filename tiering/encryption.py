"""Pages of an owner that only the owner's key opens, and only as long as that key exists.

A master key (file or environment variable) wraps one random data key per owner; the wrapped keys
lie in files of their own, outside the index, which may be deleted at any time. AES-256-GCM binds a
body to its whole header, so a page moved to another owner, key, model or rank does not open.

Why no nonce repeats under one key: every ``OwnerKey`` that is loaded draws a salt of 128 random
bits and seals with HKDF(data key, salt) alone, counting nonces 0, 1, 2, ... So two pages share key
and nonce only if two loads draw the same salt: after 2**32 restarts the odds are below 2**-64. The
process that loaded it must not fork and go on sealing in both halves; the store's lock on its
folder rules that out.

Destroying an owner's key overwrites and removes its file. What was sealed with it stays a miss for
ever, even for the same owner, who gets a new key with the next page. (A backup of the folder of
keys, together with the master key, would undo it: keep none.)
"""

import hmac
import itertools
import logging
import os
import stat
import threading
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sglang_ext.errors import KeyRingError
from sglang_ext.types import Owner

__all__ = ["KeyRing", "OwnerKey", "master_key"]

logger = logging.getLogger(__name__)

_KEY_BYTES = 32
_NONCE_BYTES = 12
_CHECK_OWNER = Owner("\0check")
_FROM_ENVIRONMENT = "env:"
_HOW = "64 hexadecimal digits (make one with: openssl rand -hex 32)"


def master_key(source: str) -> bytes:
    """Read the master key from a file of mode 0600, or from the variable of ``env:NAME``.

    Raises KeyRingError, which says what to do.
    """
    if source.startswith(_FROM_ENVIRONMENT):
        return _from_environment(source.removeprefix(_FROM_ENVIRONMENT))
    return _from_file(Path(source))


def _from_file(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise KeyRingError(f"master key {path}: {error.strerror}, expected {_HOW}") from error
    if not stat.S_ISREG(mode) or mode & 0o077:
        found = f"{stat.S_IMODE(mode):04o}"
        raise KeyRingError(f"master key {path}: mode is {found}, must be 0600 (chmod 600 {path})")
    return _parsed(text, f"master key {path}")


def _from_environment(name: str) -> bytes:
    text = os.environ.get(name)
    if text is None:
        problem = f"the environment variable {name} is not set"
        raise KeyRingError(f"master key: {problem}, expected {_HOW}")
    return _parsed(text, f"master key in {name}")


def _parsed(text: str, where: str) -> bytes:
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise KeyRingError(f"{where}: expected {_HOW}")
    return key


class OwnerKey:
    """Seals and opens the pages of one owner. Thread-safe."""

    def __init__(self, data_key: bytes) -> None:
        self._data_key = data_key
        self._blind_key = _derive(data_key, b"", b"page keys")
        self._salt = os.urandom(16)
        self._sealing_key = _derive(data_key, self._salt, b"pages")
        self._nonces = itertools.count()
        self._opening_key = lru_cache(maxsize=64)(
            lambda salt: _derive(self._data_key, salt, b"pages")
        )

    def blind(self, key: bytes) -> bytes:
        """Return the name under which a page is filed: page keys are hashes of prompts.

        Whoever reads the disk could otherwise confirm a guessed prompt.
        """
        return hmac.digest(self._blind_key, key, sha256)

    def draw(self) -> tuple[bytes, bytes]:
        """Return salt and nonce for one page, never the same pair again."""
        return self._salt, next(self._nonces).to_bytes(_NONCE_BYTES, "big")

    def seal(self, body: memoryview, nonce: bytes, data: bytes) -> bytes:
        """Encrypt ``body`` in place, bound to ``data``; returns the tag (16 bytes)."""
        encryptor = Cipher(AES(self._sealing_key), GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(data)
        encryptor.update_into(body, body)
        encryptor.finalize()
        return encryptor.tag

    def open(self, body: memoryview, salt: bytes, nonce: bytes, tag: bytes, data: bytes) -> bool:
        """Decrypt ``body`` in place; False (and zeros in ``body``) when the key does not fit."""
        decryptor = Cipher(AES(self._opening_key(salt)), GCM(nonce, tag)).decryptor()
        decryptor.authenticate_additional_data(data)
        decryptor.update_into(body, body)
        try:
            decryptor.finalize()
        except InvalidTag:
            body[:] = bytes(len(body))
            return False
        return True


class KeyRing:
    """The owners' keys in ``folder``, wrapped by ``master``. Thread-safe."""

    def __init__(self, folder: Path, master: bytes) -> None:
        """Open or create the folder; raises KeyRingError when ``master`` is not its master key."""
        self._folder = folder
        self._wrap = AESGCM(master)
        self._keys: dict[Owner, OwnerKey] = {}
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._check_master()
        except OSError as error:
            raise KeyRingError(f"folder of keys {folder}: {error}") from error

    def holds(self, owner: Owner) -> bool:
        """Tell whether ``owner`` has a key, readable or not."""
        return self._path(owner).exists()

    def find(self, owner: Owner) -> OwnerKey | None:
        """Return the owner's key; None when it has none, it was destroyed or cannot be read."""
        with self._lock:
            return self._loaded(owner)

    def find_or_make(self, owner: Owner) -> OwnerKey | None:
        """Return the owner's key, a new one if it has none; None when that fails (logged).

        A key that is there but cannot be read is never replaced: its pages would be lost.
        """
        with self._lock:
            key = self._loaded(owner)
            if key is not None or self._path(owner).exists():
                return key
            try:
                self._write(owner, os.urandom(_KEY_BYTES))
            except OSError as error:
                logger.warning("cannot write the key of %s: %s", owner, error)
                return None
            return self._loaded(owner)

    def destroy(self, owner: Owner) -> None:
        """Make every page of ``owner`` unreadable for ever. Raises OSError if it cannot be done."""
        with self._lock:
            self._keys.pop(owner, None)
            path = self._path(owner)
            if not path.exists():
                return
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, os.urandom(os.fstat(fd).st_size))
                os.fsync(fd)
            finally:
                os.close(fd)
            path.unlink()
            _sync_folder(path.parent)

    def _loaded(self, owner: Owner) -> OwnerKey | None:
        key = self._keys.get(owner)
        if key is None and (data_key := self._read(owner)) is not None:
            key = self._keys[owner] = OwnerKey(data_key)
        return key

    def _read(self, owner: Owner) -> bytes | None:
        path = self._path(owner)
        try:
            wrapped = path.read_bytes()
            nonce, sealed = wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:]
            return self._wrap.decrypt(nonce, sealed, owner.encode())
        except FileNotFoundError:
            return None
        except (OSError, InvalidTag, ValueError) as error:
            logger.warning("cannot read the key of %s in %s: %r", owner, path, error)
            return None

    def _write(self, owner: Owner, data_key: bytes) -> None:
        """Publish a wrapped key: whole or not at all, and never over one that is there."""
        path = self._path(owner)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        nonce = os.urandom(_NONCE_BYTES)
        draft = path.with_suffix(f".{os.getpid()}.new")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(nonce + self._wrap.encrypt(nonce, data_key, owner.encode()))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
        _sync_folder(path.parent)

    def _check_master(self) -> None:
        if not self._path(_CHECK_OWNER).exists():
            self._write(_CHECK_OWNER, bytes(_KEY_BYTES))
        if self._read(_CHECK_OWNER) is None:
            raise KeyRingError(
                f"folder of keys {self._folder}: made with another master key;"
                " use that one, or remove the folder (and with it all encrypted pages)"
            )

    def _path(self, owner: Owner) -> Path:
        # 256 folders keep each of them small even with a million owners.
        name = sha256(owner.encode()).hexdigest()
        return self._folder / name[:2] / f"{name[2:]}.key"


def _derive(key: bytes, salt: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), _KEY_BYTES, salt=salt, info=b"sglang_ext " + purpose).derive(key)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
