"""From our own command line to that of each engine."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sglang_ext.errors import UnsupportedError
from sglang_ext.gateway.plan import EngineSpec
from sglang_ext.launch_flags import given_flags

__all__ = ["Address", "address_of", "check_flags", "engine_command"]

_ONE_ENGINE_ONLY = {
    "--nccl-port": "two engines would take one port; leave it out",
    "--dist-init-addr": "engines of several machines need a server for each",
    "--nnodes": "engines of several machines need a server for each",
    "--base-gpu-id": "the policy's gpus say which GPUs are whose",
    "--kv-events-config": "two engines would publish at one address; see tenants.*.engine.flags",
    "--ssl-keyfile": "the gateway speaks plain HTTP; put a proxy in front",
    "--ssl-certfile": "the gateway speaks plain HTTP; put a proxy in front",
}


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


def address_of(flags: Sequence[str]) -> Address:
    """Return what ``--host`` and ``--port`` say, SGLang's defaults where they say nothing."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    try:
        found, _ = parser.parse_known_args(flags)
    except argparse.ArgumentError as error:
        raise UnsupportedError(f"{error}") from error
    return Address(found.host, found.port)


def check_flags(flags: Sequence[str]) -> None:
    """Raise UnsupportedError for what cannot hold for several engines at once."""
    given = given_flags(flags)
    for flag, reason in _ONE_ENGINE_ONLY.items():
        if flag in given:
            raise UnsupportedError(f"{flag} is refused with several engines: {reason}")
    written = {word.partition("=")[0] for word in flags}
    for flag in sorted({"--host", "--port"} & given - written):
        raise UnsupportedError(f"{flag} belongs on the command line with several engines")


def engine_command(
    spec: EngineSpec, policy: Path, port: int, own: argparse.Namespace, flags: Sequence[str]
) -> list[str]:
    """Return the command of one engine; of a flag that is given twice the last counts."""
    options = ["--tenant-policy", str(policy)]
    for name, path in (("--usage-db", own.usage_db), ("--audit-log", own.audit_log)):
        options += [] if path is None else [name, str(path)]
    options += ["--log-json"] if own.log_json else []
    address = ["--host", "127.0.0.1", "--port", str(port)]
    module = [sys.executable, "-m", "sglang_ext.launch_server"]
    return [*module, *options, *flags, *spec.flags, *address]
