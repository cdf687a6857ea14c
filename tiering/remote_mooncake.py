"""The shared store on Mooncake (``pip install sglang-ext[remote]``).

A master knows where objects are; machines lend memory to hold them. This process lends nothing.
Transfers and questions to the master release the interpreter's lock, but Mooncake's ``setup`` keeps
it, and tries again for minutes where no master answers. So a master is tried with a bare connection
first, and only then is ``setup`` called. Afterwards the client finds a master that came back.
"""

import ctypes
import importlib
import logging
import os
import socket
import threading
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ext.errors import UnsupportedError
from sglang_ext.tiering.file_io import aligned_buffer
from sglang_ext.tiering.remote_objects import Reply, StoreSilent

__all__ = ["P2P", "MooncakeAddress", "MooncakeObjects", "check_installed"]

logger = logging.getLogger(__name__)

P2P = "P2PHANDSHAKE"
"""Instead of a metadata service: machines ask each other."""

_ADMIN_PORT = 9003
_LOCAL_BUFFER_BYTES = 16 * 2**20
_NO_ANSWER = -900
_REPLIES = {0: Reply.DONE, -200: Reply.FULL, -704: Reply.ABSENT, -800: Reply.LOST}
_SETTINGS = {
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "500",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "3",
}
"""How long Mooncake waits for others, unless the environment says otherwise.

It is told to log next to nothing: its messages name pages, so owners and hashes of prompts.
"""


@dataclass(frozen=True, kw_only=True)
class MooncakeAddress:
    """Where the store is. ``admin``: the master's HTTP port; by default 9003 of its machine."""

    master: str
    metadata: str = P2P
    admin: str | None = None
    protocol: str = "tcp"
    device: str = ""
    timeout_s: float = 2.0

    @property
    def host_port(self) -> tuple[str, int]:
        """The master's machine and port."""
        host, _, port = self.master.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def admin_url(self) -> str:
        """The master's HTTP port."""
        return self.admin or f"http://{self.master.rpartition(':')[0]}:{_ADMIN_PORT}"


def check_installed() -> None:
    """Raise UnsupportedError, which says what to install, where Mooncake cannot be loaded."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        importlib.import_module("mooncake.store")
    except (ImportError, OSError) as error:
        raise UnsupportedError(
            f"tiers.remote: Mooncake's client cannot be loaded ({error}); pip install "
            "'sglang-ext[remote]' and, on Debian, apt-get install libibverbs1 librdmacm1 libnuma1 "
            "liburing2"
        ) from error


class MooncakeObjects:
    """A client of one Mooncake store. See ``remote_objects.Objects``."""

    def __init__(self, address: MooncakeAddress) -> None:
        """Raises UnsupportedError without Mooncake; a store that does not answer is no error."""
        check_installed()
        self._address = address
        self._client: Any = None
        self._buffers: list[memoryview] = []
        self._lock = threading.Lock()

    def buffer(self, size: int) -> memoryview:
        buffer = aligned_buffer(size)
        with self._lock:
            self._buffers.append(buffer)
            if self._client is not None:
                self._register(self._client, buffer)
        return buffer

    def put(self, names: Sequence[str], values: Sequence[memoryview]) -> list[Reply]:
        once = dict(zip(names, values, strict=True))
        sizes = [len(value) for value in once.values()]
        codes = self._connected().batch_put_from([*once], _addresses(once.values()), sizes)
        replies = dict(zip(once, _answered(codes), strict=True))
        return [_reply(replies[name]) for name in names]

    def get(self, names: Sequence[str], targets: Sequence[memoryview]) -> list[int | Reply]:
        # Of a name that is given twice, Mooncake fills one target only.
        once = dict(zip(names, targets, strict=True))
        sizes = [len(target) for target in once.values()]
        codes = self._connected().batch_get_into([*once], _addresses(once.values()), sizes)
        found = dict(zip(once, _answered(codes), strict=True))
        for name, target in zip(names, targets, strict=True):
            if found[name] > 0 and target is not once[name]:
                target[: found[name]] = once[name][: found[name]]
        return [code if code >= 0 else _reply(code) for code in map(found.__getitem__, names)]

    def exist(self, names: Sequence[str]) -> list[bool]:
        return [code == 1 for code in _answered(self._connected().batch_is_exist(list(names)))]

    def remove(self, names: Sequence[str]) -> int:
        # By force: a page that somebody reads right now is a miss for him.
        return _answered(self._connected().batch_remove(list(names), True)).count(0)

    def remove_matching(self, pattern: str) -> int:
        (count,) = _answered([self._connected().remove_by_regex(f"^{pattern}$", True)])
        if count < 0:
            raise StoreSilent(f"Mooncake cannot remove by pattern (code {count})")
        return count

    def names(self) -> list[str]:
        self._connected()
        url = f"{self._address.admin_url}/get_all_keys"
        try:
            with urllib.request.urlopen(url, timeout=self._address.timeout_s) as answer:
                text: str = answer.read().decode("utf-8", "replace")
        except (OSError, ValueError) as error:
            raise StoreSilent(f"{url}: {error}") from error
        return text.splitlines()

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _connect(self) -> Any:
        address = self._address
        host = _own_address(address)
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        code = store.setup(
            host,
            address.metadata,
            0,
            _LOCAL_BUFFER_BYTES,
            address.protocol,
            address.device,
            address.master,
        )
        if code:
            raise StoreSilent(f"Mooncake at {address.master}: setup failed (code {code})")
        for buffer in self._buffers:
            self._register(store, buffer)
        return store

    @staticmethod
    def _register(store: Any, buffer: memoryview) -> None:
        code = store.register_buffer(*_addresses([buffer]), len(buffer))
        if code:
            logger.warning("Mooncake cannot register %d bytes (code %d)", len(buffer), code)


def _own_address(address: MooncakeAddress) -> str:
    """Return the address of this machine that the master's network sees; needs a live master."""
    try:
        with socket.create_connection(address.host_port, timeout=address.timeout_s) as probe:
            name: str = probe.getsockname()[0]
            return name
    except OSError as error:
        raise StoreSilent(f"Mooncake master {address.master}: {error}") from error


def _addresses(views: Iterable[memoryview]) -> list[int]:
    return [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in views]


def _answered(codes: list[int]) -> list[int]:
    """Return the codes of a call that the master answered."""
    if _NO_ANSWER in codes:
        raise StoreSilent("Mooncake's master does not answer")
    return codes


def _reply(code: int) -> Reply:
    return _REPLIES.get(code, Reply.FAILED)
