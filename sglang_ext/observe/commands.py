"""The subcommands ``top`` and ``usage`` of ``sglang-ext``, which ask a running server."""

import argparse
import json
import os
import sys
import time
from typing import Any

__all__ = ["add_commands"]

_KEY_VARIABLE = "SGLANG_EXT_KEY"
_KEY_HELP = f"the admin key; better in the environment variable {_KEY_VARIABLE}"
_OK = 0
_FAILED = 1
_PLAIN_WIDTH = 200
"""Columns of tables that go to a file or a pipe."""


class _RefusedError(Exception):
    """The server did not answer, or not with what was asked for."""


def add_commands(commands: Any) -> None:
    """Add the subcommands to argparse's ``commands``."""
    top = _command(commands, "top", "tenants, tiers and slow requests of a running server, live")
    top.add_argument("--interval", type=float, default=2.0, metavar="SECONDS")
    top.add_argument("--once", action="store_true", help="print one picture and end")
    top.add_argument("--json", action="store_true", help="with --once: as JSON")
    top.set_defaults(run=_top)

    usage = _command(commands, "usage", "tokens and token-seconds by tenant and hour, for bills")
    usage.add_argument("--from", dest="start", metavar="TIME", help="ISO 8601; UTC without a zone")
    usage.add_argument("--to", dest="end", metavar="TIME", help="the first hour that is not in it")
    usage.add_argument("--csv", action="store_true", help="CSV instead of JSON")
    usage.set_defaults(run=_usage)


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--key", default=os.environ.get(_KEY_VARIABLE, ""), help=_KEY_HELP)
    return parser


def _top(options: argparse.Namespace) -> int:
    once = options.once or not sys.stdout.isatty()
    try:
        return _print_once(options) if once else _watch(options)
    except _RefusedError as error:
        print(error, file=sys.stderr)
        return _FAILED


def _print_once(options: argparse.Namespace) -> int:
    from rich.console import Console

    from sglang_ext.observe.top import screen

    picture = _overview(options)
    if options.json:
        print(json.dumps(picture))
        return _OK
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if is_terminal else _PLAIN_WIDTH)
    console.print(screen(picture, None, plain=not is_terminal))
    return _OK


def _watch(options: argparse.Namespace) -> int:
    from rich.live import Live

    from sglang_ext.observe.top import screen

    picture = _overview(options)
    with Live(screen(picture, None, plain=False), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(max(options.interval, 0.2))
            before, picture = picture, _overview(options)
            live.update(screen(picture, before, plain=False), refresh=True)


def _overview(options: argparse.Namespace) -> dict[str, Any]:
    picture: dict[str, Any] = json.loads(_get(options, "/ext/v1/overview", {}))
    return picture


def _usage(options: argparse.Namespace) -> int:
    given = {"from": options.start, "to": options.end, "format": "csv" if options.csv else "json"}
    wanted = {name: value for name, value in given.items() if value is not None}
    try:
        text = _get(options, "/ext/v1/usage/export", wanted)
    except _RefusedError as error:
        print(error, file=sys.stderr)
        return _FAILED
    print(text, end="" if options.csv else "\n")
    return _OK


def _get(options: argparse.Namespace, path: str, wanted: dict[str, str]) -> str:
    import httpx

    headers = {"authorization": f"Bearer {options.key}"}
    try:
        answer = httpx.get(options.url + path, params=wanted, headers=headers, timeout=60)
        answer.raise_for_status()
    except httpx.HTTPStatusError as error:
        raise _RefusedError(f"{options.url}: {error.response.text}") from error
    except httpx.HTTPError as error:
        raise _RefusedError(f"{options.url}: {error}") from error
    return answer.text
