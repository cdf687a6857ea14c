"""Attacks default SGLang and ours as a malicious tenant would: what leaks, and do we see it?

Default: ``sglang.launch_server`` on our CPU platform, without a policy; victim and attacker are two
clients of it. Ours: a private attacker against a sealed victim, and against a private one, with
HBM, CPU and NVMe. One server at a time. Writes ``audit_default.json`` and ``audit_ours.json``.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.engines import Engine, demo_flags, engine
from benchmarks.report import RESULTS, Report, arguments
from sglang_ext.audit.report import Finding, Verdict, leaks
from sglang_ext.audit.run import Target, audit
from sglang_ext.audit.timing import LENGTHS
from sglang_ext.tenancy.keys import digest

_TOKENS = 20_000
_PORT = 31_871
_SEEN_FROM = 64
"""Shared tokens from which default SGLang must be seen to leak."""
_PRIVATE_LENGTHS = (64, 512)
_MUST_LEAK = (
    *("cached-token fields", "forged identity in the body", "flush"),
    *("abort of a foreign request", "request without a key"),
)
_MASTER = "SGLANG_EXT_AUDIT_MASTER"


def main() -> int:
    parser = arguments("audit", __doc__ or "")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--only", choices=["default", "ours"])
    options = parser.parse_args()
    pairs = 8 if options.quick else options.pairs
    statuses = []
    if options.only != "ours":
        statuses.append(_default(pairs, options.seed).finish(RESULTS / "audit_default.json"))
    if options.only != "default":
        statuses.append(_ours(pairs, options.seed, RESULTS / "audit_ours.json"))
    return max(statuses)


def _default(pairs: int, seed: int) -> Report:
    report = Report("What default SGLang lets a tenant see and do")
    with tempfile.TemporaryDirectory() as folder:
        events = f"ipc://{folder}/events"
        flags = [*demo_flags(_TOKENS), "--enable-metrics", *_events_flags(events)]
        with engine("default", "sglang.launch_server", _PORT, flags) as server:
            # What leaks there is plain: half as many pairs show it.
            target = Target(server.url, "", "", kv_events=events, pairs=pairs // 2, seed=seed)
            found = _run(report, "default", target)
    for name in (f"time to first token, {length} shared tokens" for length in (_SEEN_FROM, 512)):
        row = next(finding for finding in found if finding.attack == name)
        report.at_least(f"{name}: lower bound of the AUC", row.figures["low"], 0.5)
    for name in _MUST_LEAK:
        report.at_least(f"{name}: leaks", float(name in leaks(found)), 1)
    return report


def _ours(pairs: int, seed: int, file: Path) -> int:
    """Attack one victim after the other; what was found is kept after each."""
    report, status = Report("What sglang_ext lets a tenant see and do"), 1
    with tempfile.TemporaryDirectory() as folder, _ours_engine(Path(folder)) as (server, events):
        for number, victim in enumerate(("sealed", "private")):
            target = Target(
                url=server.url,
                victim_key=f"key-{victim}",
                attacker_key="key-attacker",
                admin_key="key-admin",
                nvme_folder=Path(folder) / "pages",
                kv_events=events,
                pairs=pairs,
                seed=seed + number,
                lengths=LENGTHS if victim == "sealed" else _PRIVATE_LENGTHS,
            )
            found = _run(report, f"{victim} victim", target)
            report.at_most(f"{victim} victim: leaks", float(len(leaks(found))), 0)
            missing = [row for row in found if row.verdict is Verdict.NOT_RUN]
            report.at_most(f"{victim} victim: attacks not run", float(len(missing)), 0)
            status = report.finish(file)
    return status


@contextmanager
def _ours_engine(folder: Path) -> Iterator[tuple[Engine, str]]:
    names = {"sealed": "isolation: sealed", "private": "isolation: private", "attacker": ""}
    tenants = [
        f'  {name}: {{api_keys: ["{digest(f"key-{name}")}"], {more}}}'
        for name, more in names.items()
    ]
    tiers = f"nvme: {{size: 4GB, path: {folder}/pages, master_key: 'env:{_MASTER}'}}"
    policy = folder / "tenants.yaml"
    lines = [
        "version: 1",
        f'admin_keys: ["{digest("key-admin")}"]',
        f"tiers: {{cpu: {{size: 1GB}}, {tiers}}}",
        "tenants:",
        *tenants,
    ]
    policy.write_text("\n".join(lines) + "\n", encoding="utf-8")
    events = f"ipc://{folder}/events"
    flags = ["--tenant-policy", str(policy), *demo_flags(_TOKENS), *_events_flags(events)]
    variables = {_MASTER: os.urandom(32).hex()}
    with engine(
        "ours", "sglang_ext.launch_server", _PORT, flags, "key-admin", variables=variables
    ) as server:
        yield server, events


def _events_flags(endpoint: str) -> list[str]:
    config = {"publisher": "zmq", "topic": "kv-events", "endpoint": endpoint}
    return ["--kv-events-config", json.dumps(config)]


def _run(report: Report, name: str, target: Target) -> list[Finding]:
    found = []
    for finding in audit(target):
        found.append(finding)
        print(f"{name}: {finding.attack}: {finding.verdict}", file=sys.stderr, flush=True)
        report.runs.append({"server": name, **asdict(finding)})
        report.figures[f"{name}: {finding.attack}"] = f"{finding.verdict}: {finding.detail}"
    return found


if __name__ == "__main__":
    sys.exit(main())
