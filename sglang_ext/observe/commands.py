"""The subcommands ``top`` and ``usage`` of ``sglang-ext``, which ask a running server."""

import argparse
import json
import sys
import time
from typing import Any

from sglang_ext.console import OK, PLAIN_WIDTH, add_server_command, ask_server

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add the subcommands to argparse's ``commands``."""
    top = add_server_command(
        commands, "top", "tenants, tiers and slow requests of a running server, live"
    )
    top.add_argument("--interval", type=float, default=2.0, metavar="SECONDS")
    top.add_argument("--once", action="store_true", help="print one picture and end")
    top.add_argument("--json", action="store_true", help="with --once: as JSON")
    top.set_defaults(run=_top)

    usage = add_server_command(
        commands, "usage", "tokens and token-seconds by tenant and hour, for bills"
    )
    usage.add_argument("--from", dest="start", metavar="TIME", help="ISO 8601; UTC without a zone")
    usage.add_argument("--to", dest="end", metavar="TIME", help="the first hour that is not in it")
    usage.add_argument("--csv", action="store_true", help="CSV instead of JSON")
    usage.set_defaults(run=_usage)


def _top(options: argparse.Namespace) -> int:
    once = options.once or not sys.stdout.isatty()
    return _print_once(options) if once else _watch(options)


def _print_once(options: argparse.Namespace) -> int:
    from rich.console import Console

    from sglang_ext.observe.top import screen

    picture = _overview(options)
    if options.json:
        print(json.dumps(picture))
        return OK
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if is_terminal else PLAIN_WIDTH)
    console.print(screen(picture, None, plain=not is_terminal))
    return OK


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
    picture: dict[str, Any] = json.loads(ask_server(options, "/ext/v1/overview", {}))
    return picture


def _usage(options: argparse.Namespace) -> int:
    given = {"from": options.start, "to": options.end, "format": "csv" if options.csv else "json"}
    wanted = {name: value for name, value in given.items() if value is not None}
    text = ask_server(options, "/ext/v1/usage/export", wanted)
    print(text, end="" if options.csv else "\n")
    return OK
