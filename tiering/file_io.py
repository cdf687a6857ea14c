"""Every system call that the store makes on its pages, so that a test can make any of them fail."""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["BLOCK_BYTES", "FileIO", "aligned_buffer", "round_up"]

BLOCK_BYTES = 4096
"""Alignment of buffers, offsets and lengths: the largest that O_DIRECT asks for in practice."""

_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def round_up(size: int) -> int:
    """Return ``size`` in bytes, rounded up to whole blocks."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def aligned_buffer(size: int) -> memoryview:
    """Return ``size`` writable bytes, zeroed and aligned for O_DIRECT."""
    return memoryview(mmap.mmap(-1, size))


class FileIO:
    """The real thing. Methods raise OSError; the store turns it into a miss and a counter."""

    def open(self, path: Path, size: int) -> int:
        """Open or create a file of ``size`` bytes, past the page cache where that is possible.

        An existing file that is shorter is extended (its missing pages read as empty); the parent
        folder is created. Returns a descriptor, which the caller closes.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fd = os.open(path, flags, 0o600)
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        return fd

    def close(self, fd: int) -> None:
        """Close a descriptor of ``open``."""
        os.close(fd)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        """Fill ``view`` from ``offset``; returns fewer bytes only at the end of the file."""
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset + done)
            done += count
            # An O_DIRECT read may end inside a block only at the end of the file.
            if count == 0 or done % BLOCK_BYTES:
                break
        return done

    def write(self, fd: int, view: memoryview, offset: int) -> None:
        """Write all of ``view`` at ``offset``."""
        done = 0
        while done < len(view):
            done += os.pwrite(fd, view[done:], offset + done)

    def reserve(self, fd: int, offset: int, length: int) -> None:
        """Give the range disk blocks ahead of its first write, which is slow without them."""
        self._fallocate(fd, _KEEP_SIZE, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        """Give the blocks of the range back: it reads as zeros. False where that is impossible."""
        return self._fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length)

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is gone already is fine."""
        path.unlink(missing_ok=True)

    def data_ranges(self, fd: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges [start, end) that hold data, in order, skipping holes."""
        end = 0
        while True:
            try:
                start = os.lseek(fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                raise
            end = os.lseek(fd, start, os.SEEK_HOLE)
            yield start, end

    def _fallocate(self, fd: int, mode: int, offset: int, length: int) -> bool:
        if _LIBC.fallocate(fd, mode, offset, length) == 0:
            return True
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return False
        raise OSError(code, os.strerror(code))
