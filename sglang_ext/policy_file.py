"""The policy file of a running server: read again, and rewritten where nobody else changed it."""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from sglang_ext.errors import PolicyError
from sglang_ext.tenancy.loader import MAX_BYTES, policy_text

__all__ = ["PolicyFile"]

_CHANGED = "the policy file holds another policy than was in force; send SIGHUP to read it"


class PolicyFile:
    """Remembers the text that is in force, so that it never writes over somebody's edit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = b""

    def read(self) -> str:
        """Return the file's text. Raises PolicyError where it cannot be read as text.

        Call ``accept`` once it is in force: until then it is somebody's edit.
        """
        return policy_text(self._read())

    def accept(self, text: str) -> None:
        """Note that this text is in force."""
        self._known = text.encode("utf-8")

    def save(self, text: str) -> str | None:
        """Replace the file at one moment; the one before stays beside it as ``.bak``.

        Returns None, or why the file was left as it was.
        """
        # Where the path is a link, what it points to is replaced and the link stays.
        path = Path(os.path.realpath(self._path))
        data = text.encode("utf-8")
        try:
            if self._read() != self._known:
                return _CHANGED
            _replace(path, data)
        except (PolicyError, OSError) as error:
            return f"the policy file cannot be written: {error}"
        self._known = data
        return None

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                return file.read(MAX_BYTES + 1)
        except OSError as error:
            raise PolicyError("", f"cannot be read: {error.strerror}") from error


def _replace(path: Path, data: bytes) -> None:
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{path.name} is read-only")
    shutil.copy2(path, path.with_name(path.name + ".bak"))
    descriptor, fresh = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        shutil.copystat(path, fresh)
        os.replace(fresh, path)
    except OSError:
        Path(fresh).unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Make the new name outlive a power failure, where the file system can promise that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
