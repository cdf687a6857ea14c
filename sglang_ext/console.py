"""What subcommands of ``sglang-ext`` share: exit statuses, complaints, questions to a server."""

import argparse
import os
import sys
from typing import Any

from sglang_ext.errors import ServerError

__all__ = [
    "BAD_INPUT",
    "FAILED",
    "INTERRUPTED",
    "OK",
    "PLAIN_WIDTH",
    "add_server_command",
    "ask_server",
    "complain",
]

OK = 0
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
PLAIN_WIDTH = 200
"""Columns of a table that goes to a file or a pipe."""

_KEY_VARIABLE = "SGLANG_EXT_KEY"
_KEY_HELP = f"the admin key; better in the environment variable {_KEY_VARIABLE}"


def complain(problem: str, status: int) -> int:
    """Print what went wrong to stderr and return the exit status."""
    print(problem, file=sys.stderr)
    return status


def add_server_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Add a subcommand that asks a running server: with its address and a key."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--key", default=os.environ.get(_KEY_VARIABLE, ""), help=_KEY_HELP)
    parser.add_argument("--engine", metavar="NAME", help="one engine of a server with several")
    return parser


def ask_server(options: argparse.Namespace, path: str, wanted: dict[str, Any]) -> str:
    """Return what the server answers to GET; raises ServerError where that is a refusal."""
    # Loads slowly, and most subcommands do not need it.
    import httpx

    headers = {"authorization": f"Bearer {options.key}"}
    if options.engine:
        headers["x-engine"] = options.engine
    try:
        answer = httpx.get(options.url + path, params=wanted, headers=headers, timeout=60)
        answer.raise_for_status()
    except httpx.HTTPStatusError as error:
        raise ServerError(f"{options.url}: {error.response.text}") from error
    except httpx.HTTPError as error:
        raise ServerError(f"{options.url}: {error}") from error
    return answer.text
