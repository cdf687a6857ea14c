"""The command ``sglang-ext``: check a policy, make a key, draw a tree, find the demo model."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_ext.audit.command import add_audit
from sglang_ext.calibration.command import add_calibrate
from sglang_ext.console import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    OK,
    PLAIN_WIDTH,
    add_server_command,
    ask_server,
    complain,
)
from sglang_ext.errors import PolicyError, SglangExtError
from sglang_ext.observe.commands import add_commands
from sglang_ext.plan.command import add_plan
from sglang_ext.tenancy.fields import name as read_name
from sglang_ext.tenancy.keys import digest, new_key
from sglang_ext.tenancy.loader import load_policy
from sglang_ext.tenancy.policy import Policy

__all__ = ["main"]

_DESCRIPTION = "Check a policy file, make an API key, draw a tree, find the demo model."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status: 0 done, 1 failed, 2 wrong input."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SglangExtError as error:
        return complain(str(error), FAILED)
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

    tree = add_server_command(commands, "tree", "draw the tree of a running server")
    tree.add_argument("--page", type=int, default=0)
    tree.set_defaults(run=_tree)

    add_commands(commands)
    add_audit(commands)
    add_calibrate(commands)
    add_plan(commands)

    demo = commands.add_parser("demo-model", help="print the folder of the demo model")
    demo.set_defaults(run=_demo_model)
    return parser


def _check_policy(options: argparse.Namespace) -> int:
    try:
        policy = load_policy(options.file)
    except PolicyError as error:
        return complain(f"{options.file}: {error}", BAD_INPUT)
    _print_policy(policy)
    return OK


def _keygen(options: argparse.Namespace) -> int:
    if not options.admin:
        try:
            read_name(options.tenant, "TENANT")
        except PolicyError as error:
            return complain(str(error), BAD_INPUT)
    key = new_key()
    place = "admin_keys" if options.admin else f"tenants.{options.tenant}.api_keys"
    print(f"Key, shown only this once; give it to the client:\n\n    {key}\n")
    print(f'Line for the policy file, below {place}:\n\n    - "{digest(key)}"')
    return OK


def _tree(options: argparse.Namespace) -> int:
    # Loads slowly, and the other commands do not need it.
    from sglang_ext.radix.drawing import draw

    answer = json.loads(ask_server(options, "/ext/v1/tree", {"page": options.page}))
    for rank, dumped in enumerate(answer["ranks"]):
        whose = f"engine {dumped['engine']}, " if "engine" in dumped else ""
        print(f"{whose}rank {rank}: {dumped['runs_total']} runs")
        print(draw(dumped))
    return OK


def _demo_model(options: argparse.Namespace) -> int:
    # Loads numpy and more, which the other commands do not need.
    from sglang_ext.demo_model import demo_model_path

    print(demo_model_path())
    return OK


def _print_policy(policy: Policy) -> None:
    from rich.box import ROUNDED
    from rich.console import Console
    from rich.table import Column, Table

    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if is_terminal else PLAIN_WIDTH)
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
