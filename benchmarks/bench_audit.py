"""Attacks default SGLang and ours as a malicious tenant would: what leaks, and do we see it?

Default: ``sglang.launch_server`` on our CPU platform, without a policy; victim and attacker are two
clients of it. Ours: a private attacker against a sealed victim, and against a private one, with
HBM, CPU and NVMe. Engines: against a victim with an engine of its own, behind the gateway. One
server at a time. Writes ``audit_default.json``, ``audit_ours.json`` and ``audit_engines.json``.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import httpx

from engines import Engine, demo_flags, engine
from report import Report, arguments
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
    parser.add_argument("--only", choices=["default", "ours", "engines"])
    options = parser.parse_args()
    pairs, folder = 8 if options.quick else options.pairs, options.json.parent
    statuses = []
    if options.only in (None, "default"):
        statuses.append(_default(pairs, options.seed).finish(folder / "audit_default.json"))
    if options.only in (None, "ours"):
        statuses.append(_ours(pairs, options.seed, folder / "audit_ours.json"))
    if options.only in (None, "engines"):
        statuses.append(_engines(pairs, options.seed, folder / "audit_engines.json"))
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
    victims = {"sealed": "isolation: sealed", "private": "isolation: private"}
    with tempfile.TemporaryDirectory() as name:
        folder, events = Path(name), f"ipc://{name}/events"
        with _server(folder, victims, _events_flags(events)) as server:
            for number, victim in enumerate(victims):
                lengths = LENGTHS if victim == "sealed" else _PRIVATE_LENGTHS
                target = _target(server, folder, victim, pairs, seed + number, lengths)
                status = _attack(report, victim, replace(target, kv_events=events), file)
    return status


def _engines(pairs: int, seed: int, file: Path) -> int:
    """Attack a dedicated victim; several engines publish no KV events."""
    report = Report("What a tenant sees and does of one that has an engine of its own")
    victims = {"dedicated": "isolation: dedicated, gpus: [0]"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _server(folder, victims, []) as server:
            while httpx.get(server.url + "/ready").status_code != 200:
                time.sleep(0.5)
            target = _target(server, folder, "dedicated", pairs, seed, _PRIVATE_LENGTHS)
            return _attack(report, "dedicated", target, file)


def _target(
    server: Engine, folder: Path, victim: str, pairs: int, seed: int, lengths: tuple[int, ...]
) -> Target:
    return Target(
        url=server.url,
        victim_key=f"key-{victim}",
        attacker_key="key-attacker",
        admin_key="key-admin",
        nvme_folder=folder / "pages",
        pairs=pairs,
        seed=seed,
        lengths=lengths,
    )


def _attack(report: Report, victim: str, target: Target, file: Path) -> int:
    """Run all attacks on one victim, and keep what was found so far."""
    found = _run(report, f"{victim} victim", target)
    report.at_most(f"{victim} victim: leaks", float(len(leaks(found))), 0)
    missing = [row for row in found if row.verdict is Verdict.NOT_RUN]
    allowed = 0 if target.kv_events else 1
    report.at_most(f"{victim} victim: attacks not run", float(len(missing)), allowed)
    return report.finish(file)


@contextmanager
def _server(folder: Path, victims: Mapping[str, str], flags: Sequence[str]) -> Iterator[Engine]:
    tenants = [
        f'  {name}: {{api_keys: ["{digest(f"key-{name}")}"], {more}}}'
        for name, more in {**victims, "attacker": "isolation: private"}.items()
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
    flags = ["--tenant-policy", str(policy), *demo_flags(_TOKENS), *flags]
    variables = {_MASTER: os.urandom(32).hex()}
    with engine(
        "ours", "sglang_ext.launch_server", _PORT, flags, "key-admin", variables=variables
    ) as server:
        yield server


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
