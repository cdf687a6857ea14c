"""The subcommand ``audit`` of ``sglang-ext``."""

import argparse
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from sglang_ext.console import BAD_INPUT, FAILED, OK, PLAIN_WIDTH, complain

__all__ = ["add_audit"]

_TEXT = "attack a running server as a malicious tenant would, and say what leaks"
_EPILOG = (
    "Exit status: 0 nothing leaks, 1 something does (or the server does not answer), 2 wrong input."
    " It sends thousands of requests, and tries to abort, flush and reconfigure: not for a server"
    " that others use."
)


def add_audit(commands: Any) -> None:
    """Add the subcommand to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser("audit", help=_TEXT, epilog=_EPILOG)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    for who in ("victim", "attacker", "admin"):
        variable = f"SGLANG_EXT_{who.upper()}_KEY"
        parser.add_argument(
            f"--{who}-key",
            default=os.environ.get(variable, ""),
            metavar="KEY",
            help=f"better in the environment variable {variable}",
        )
    parser.add_argument("--nvme-dir", type=Path, metavar="DIR", help="search the tier's files too")
    parser.add_argument("--kv-events", metavar="ADDRESS", help="listen there, tcp://HOST:PORT")
    parser.add_argument("--pairs", type=int, default=40, help="times taken for each prefix length")
    parser.add_argument("--seed", type=int, help="of the prompts; drawn where none is given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    parser.set_defaults(run=_audit)


def _audit(options: argparse.Namespace) -> int:
    if options.pairs < 2:
        return complain(f"--pairs: found {options.pairs}, expected at least 2", BAD_INPUT)
    # Loads slowly, and the other commands do not need it.
    from rich.console import Console

    from sglang_ext.audit.report import as_document, as_table, leaks
    from sglang_ext.audit.run import Target, audit

    target = Target(
        url=options.url,
        victim_key=options.victim_key,
        attacker_key=options.attacker_key,
        admin_key=options.admin_key,
        nvme_folder=options.nvme_dir,
        kv_events=options.kv_events,
        pairs=options.pairs,
        # What an earlier run sent is in the attacker's own cache.
        seed=secrets.randbits(32) if options.seed is None else options.seed,
    )
    findings = []
    for finding in audit(target):
        findings.append(finding)
        print(f"{finding.attack}: {finding.verdict}", file=sys.stderr, flush=True)
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if is_terminal else PLAIN_WIDTH)
    console.print(as_table(findings, plain=not is_terminal))
    if options.json is not None:
        text = json.dumps(as_document(options.url, findings), indent=2) + "\n"
        options.json.write_text(text, encoding="utf-8")
    return FAILED if leaks(findings) else OK
