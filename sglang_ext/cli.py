"""The command ``sglang-ext``: check a policy, make a key, draw a tree, find the demo model."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_ext.calibration.command import add_calibrate
from sglang_ext.errors import PolicyError, SglangExtError
from sglang_ext.observe.commands import add_commands
from sglang_ext.tenancy.fields import name as read_name
from sglang_ext.tenancy.keys import digest, new_key
from sglang_ext.tenancy.loader import load_policy
from sglang_ext.tenancy.policy import Policy

__all__ = ["main"]

_DESCRIPTION = "Check a policy file, make an API key, draw a tree, find the demo model."
_OK = 0
_FAILED = 1
_BAD_INPUT = 2
_INTERRUPTED = 130
_PLAIN_WIDTH = 200
"""Columns of a table that goes to a file or a pipe."""
_KEY_VARIABLE = "SGLANG_EXT_KEY"
_KEY_HELP = f"the admin key; better in the environment variable {_KEY_VARIABLE}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status: 0 done, 1 failed, 2 wrong input."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        return _INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-ext", description=_DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    check = commands.add_parser("check-policy", help="check a policy file and show what it means")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(run=_check_policy)

    keygen = commands.add_parser("keygen", help="make an API key and its line for the policy file")
    whose = keygen.add_mutually_exclusive_group(required=True)
    whose.add_argument("tenant", nargs="?", metavar="TENANT")
    whose.add_argument("--admin", action="store_true", help="a key for the admin routes")
    keygen.set_defaults(run=_keygen)

    tree = commands.add_parser("tree", help="draw the tree of a running server")
    tree.add_argument("--url", default="http://127.0.0.1:30000")
    tree.add_argument("--key", default=os.environ.get(_KEY_VARIABLE, ""), help=_KEY_HELP)
    tree.add_argument("--page", type=int, default=0)
    tree.set_defaults(run=_tree)

    add_commands(commands)
    add_calibrate(commands)

    demo = commands.add_parser("demo-model", help="print the folder of the demo model")
    demo.set_defaults(run=_demo_model)
    return parser


def _check_policy(options: argparse.Namespace) -> int:
    try:
        policy = load_policy(options.file)
    except PolicyError as error:
        return _complain(f"{options.file}: {error}", _BAD_INPUT)
    _print_policy(policy)
    return _OK


def _keygen(options: argparse.Namespace) -> int:
    if not options.admin:
        try:
            read_name(options.tenant, "TENANT")
        except PolicyError as error:
            return _complain(str(error), _BAD_INPUT)
    key = new_key()
    place = "admin_keys" if options.admin else f"tenants.{options.tenant}.api_keys"
    print(f"Key, shown only this once; give it to the client:\n\n    {key}\n")
    print(f'Line for the policy file, below {place}:\n\n    - "{digest(key)}"')
    return _OK


def _tree(options: argparse.Namespace) -> int:
    # Both load slowly, and the other commands do not need them.
    import httpx

    from sglang_ext.radix.drawing import draw

    headers = {"authorization": f"Bearer {options.key}"}
    try:
        answer = httpx.get(
            f"{options.url}/ext/v1/tree", params={"page": options.page}, headers=headers, timeout=60
        )
        answer.raise_for_status()
    except httpx.HTTPStatusError as error:
        return _complain(f"{options.url}: {error.response.text}", _FAILED)
    except httpx.HTTPError as error:
        return _complain(f"{options.url}: {error}", _FAILED)
    for rank, dumped in enumerate(answer.json()["ranks"]):
        print(f"rank {rank}: {dumped['runs_total']} runs")
        print(draw(dumped))
    return _OK


def _demo_model(options: argparse.Namespace) -> int:
    # Loads numpy and more, which the other commands do not need.
    from sglang_ext.demo_model import demo_model_path

    try:
        print(demo_model_path())
    except SglangExtError as error:
        return _complain(str(error), _FAILED)
    return _OK


def _complain(problem: str, status: int) -> int:
    print(problem, file=sys.stderr)
    return status


def _print_policy(policy: Policy) -> None:
    from rich.box import ROUNDED
    from rich.console import Console
    from rich.table import Column, Table

    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if is_terminal else _PLAIN_WIDTH)
    for title, header, rows in _tables(policy):
        columns = [Column(name, overflow="fold") for name in header]
        box = ROUNDED if is_terminal else None
        table = Table(*columns, title=title, title_justify="left", box=box)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _tables(policy: Policy) -> list[tuple[str, Sequence[str], list[Sequence[str]]]]:
    """Title, header and rows of each table that shows the policy."""
    settings: list[Sequence[str]] = [
        ("engine.page_size", f"{policy.engine.page_size} tokens"),
        ("engine.kv_cache_dtype", policy.engine.kv_cache_dtype),
        ("admin_keys", str(len(policy.admin_keys))),
        ("unknown_key", policy.unknown_key or "reject"),
        ("metrics.tenants", f"top {policy.metrics.tenants}"),
        ("metrics.public", str(policy.metrics.public).lower()),
    ]
    tenants: list[Sequence[str]] = [
        (tenant.name, tenant.isolation, tenant.owner, str(len(tenant.api_keys)))
        for tenant in policy.tenants.values()
    ]
    return [
        ("Settings", ("field", "value"), settings),
        ("Tenants", ("tenant", "isolation", "owner of its pages", "keys"), tenants),
    ]


if __name__ == "__main__":
    sys.exit(main())
