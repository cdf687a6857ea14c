"""Engines on other machines: the file that names them, and the secret that they share.

    secret: /etc/sglang-ext/gateway.secret
    nodes:
      node-1: http://10.0.0.11:30000
      node-2: https://kv2.example.org:30000

A node is started where it runs, with ``--gateway-secret`` and the same secret.
"""

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sglang_ext.errors import NodesError, PolicyError
from sglang_ext.tenancy.fields import MapOf, Section, text, wrong
from sglang_ext.tenancy.loader import policy_text
from sglang_ext.tenancy.yaml_text import read_yaml

__all__ = ["Nodes", "read_nodes", "read_secret"]

_LEAST_CHARACTERS = 32
_SECRET = "one line of at least 32 letters and digits, such as openssl rand -hex 32 gives"
_URL = "http://HOST:PORT or https://HOST:PORT, without a path"
_OURS = "shared"


@dataclass(frozen=True)
class Nodes:
    """What the file says. ``urls``: where each node listens, by name."""

    secret: str = field(default="", repr=False)
    urls: Mapping[str, str] = field(default_factory=dict)


def read_nodes(path: Path) -> Nodes:
    """Return what the file says, its secret read. Raises NodesError."""
    try:
        found = _FILE(read_yaml(policy_text(path.read_bytes())), "")
        _check_names(found["nodes"])
    except OSError as error:
        raise NodesError(f"{path}: {error.strerror}") from error
    except PolicyError as error:
        raise NodesError(f"{path}: {error}") from error
    return Nodes(read_secret(path.parent / found["secret"]), found["nodes"])


def read_secret(path: Path) -> str:
    """Return what a gateway and its nodes share. Raises NodesError where others can read it."""
    try:
        mode = path.stat().st_mode
        secret = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise NodesError(f"gateway secret {path}: {error.strerror}, expected {_SECRET}") from error
    if not stat.S_ISREG(mode) or mode & 0o077:
        found = f"{stat.S_IMODE(mode):04o}"
        advice = f"must be 0600 (chmod 600 {path})"
        raise NodesError(f"gateway secret {path}: mode is {found}, {advice}")
    if len(secret) < _LEAST_CHARACTERS or not (secret.isascii() and secret.isalnum()):
        raise NodesError(f"gateway secret {path}: expected {_SECRET}")
    return secret


def _check_names(urls: Mapping[str, str]) -> None:
    """A name stands in metrics and routes beside those of our own engines."""
    if not urls:
        raise PolicyError("nodes", "none, expected one at least")
    for name in urls:
        if name == "gateway" or name == _OURS or name.startswith(f"{_OURS}-"):
            raise PolicyError(f"nodes.{name}", "a name of the server's own parts; choose another")
    if len(set(urls.values())) < len(urls):
        raise PolicyError("nodes", "two have one URL; each is a server of its own")


def _url(value: object, path: str) -> str:
    try:
        found = urlsplit(value if isinstance(value, str) else "")
        port = found.port
    except ValueError:
        raise wrong(path, value, _URL) from None
    bare = not (found.path.strip("/") or found.query or found.fragment or found.username)
    if found.scheme not in ("http", "https") or not found.hostname or port is None or not bare:
        raise wrong(path, value, _URL)
    return f"{found.scheme}://{found.netloc}"


_FILE: Section[dict[str, Any]] = Section(
    dict, {"secret": text, "nodes": MapOf(_url)}, required=("secret", "nodes")
)
