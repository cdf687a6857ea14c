"""The bill of a real server: to the token, over a kill and a restart.

The last of the tests of the shared server, which it ends.
"""

import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from sglang_ext.observe.usage import FLUSH_SECONDS
from sglang_ext.observe.usage_store import UsageStore
from tests.serving.load import Load
from tests.serving.observed import TENANTS, Observed, wait_until
from tests.serving.prompts import unique_prompt
from tests.serving.server import READY

pytestmark = pytest.mark.serving

Bill = dict[str, Counter[str]]
_COUNTED = ("requests", "prompt_tokens", "computed_tokens", "output_tokens")
_COUNTED += tuple(f"cached_{tier}_tokens" for tier in ("hbm", "cpu", "nvme"))


def _bill(observed: Observed) -> Bill:
    """Return the exported usage by tenant, all hours together."""
    answer = observed.client("admin").get("/ext/v1/usage/export")
    assert answer.status_code == 200, answer.text
    bill: Bill = {}
    for row in answer.json()["usage"]:
        amounts = {name: value for name, value in row.items() if name not in ("hour", "tenant")}
        bill.setdefault(row["tenant"], Counter()).update(amounts)
    return bill


def _grown(before: Bill, after: Bill) -> dict[str, Counter[str]]:
    """Return by how much the counts of the tenants grew."""
    none: Counter[str] = Counter()
    grown = {
        tenant: Counter(
            {name: after[tenant][name] - before.get(tenant, none)[name] for name in _COUNTED}
        )
        for tenant in after
        if tenant in TENANTS
    }
    return {tenant: +counts for tenant, counts in grown.items() if +counts}


def _requests(bill: Bill) -> float:
    return sum(counts["requests"] for tenant, counts in bill.items() if tenant in TENANTS)


def _settled(observed: Observed, requests: float) -> Bill:
    """Return the bill once so many requests are in it: one is booked just after its answer."""
    wait_until(lambda: _requests(_bill(observed)) >= requests)
    return _bill(observed)


def test_logs_are_json_from_every_process_without_text_or_keys(observed: Observed) -> None:
    Load(observed).ask("a", unique_prompt("a confidential text"))
    lines = [json.loads(line) for line in observed.server.lines if line.startswith("{")]
    assert any(READY in line["message"] for line in lines)
    assert len({line["process"] for line in lines}) >= 2
    assert {"uvicorn.access", "uvicorn.error"} <= {line["logger"] for line in lines}
    everything = "".join(observed.server.lines)
    assert "confidential" not in everything
    assert "key-a" not in everything


@pytest.mark.trial(94)
def test_trial_94_the_bill_is_what_the_clients_were_told(observed: Observed) -> None:
    before, load = _bill(observed), Load(observed)
    for tenant in TENANTS:
        for talk in range(4):
            load.conversations(tenant, f"bill {talk}", 3, 200)
    load.conversations("a", "bill 0", 1, 200)
    told = {tenant: +counts for tenant, counts in load.counts.items()}
    sent = sum(counts["requests"] for counts in told.values())
    assert _grown(before, _settled(observed, _requests(before) + sent)) == told


def test_token_seconds_are_billed_by_tier(observed: Observed) -> None:
    before = _bill(observed)
    for tier in ("hbm", "cpu", "nvme"):
        column = f"{tier}_token_seconds"
        wait_until(lambda column=column: _bill(observed)["a"][column] > before["a"][column])


def test_the_command_writes_csv(observed: Observed) -> None:
    command = [sys.executable, "-m", "sglang_ext.cli", "usage", "--url", observed.server.url]
    environment = {**os.environ, "SGLANG_EXT_KEY": "key-admin"}
    whole = subprocess.run(
        [*command, "--csv"], env=environment, capture_output=True, text=True, check=True
    )
    rows = list(csv.DictReader(io.StringIO(whole.stdout)))
    assert {row["tenant"] for row in rows} >= set(TENANTS)
    exported = {tenant: counts["output_tokens"] for tenant, counts in _bill(observed).items()}
    written: Counter[str] = Counter()
    for row in rows:
        written[row["tenant"]] += int(row["output_tokens"])
    assert written == +Counter(exported)  # type: ignore[comparison-overlap]
    past = subprocess.run(
        [*command, "--csv", "--to", "2020-01-01"],
        **{"env": environment, "capture_output": True, "text": True, "check": True},  # type: ignore[call-overload]
    )
    assert past.stdout.count("\n") == 1, "a header and no hour"


def test_only_the_operator_gets_the_bill(observed: Observed) -> None:
    assert observed.client("a").get("/ext/v1/usage/export").status_code == 403
    assert observed.client("nobody").get("/ext/v1/usage/export").status_code == 401
    wrong = observed.client("admin").get("/ext/v1/usage/export?from=yesterday")
    assert wrong.status_code in (400, 422)


def test_a_kill_loses_little_and_counts_nothing_twice(observed: Observed) -> None:
    load, before = Load(observed), _bill(observed)
    load.conversations("a", "before the kill", 3)
    written = _settled(observed, _requests(before) + 3)
    load.conversations("a", "lost, or not", 3)
    observed.server.kill()
    observed.start()
    found = _requests(_bill(observed))
    assert _requests(written) <= found <= _requests(written) + 3
    assert FLUSH_SECONDS < 10
    again = Load(observed)
    again.conversations("a", "after the kill", 2)
    after = _settled(observed, found + 2)
    assert _requests(after) == found + 2


def test_an_orderly_stop_loses_nothing(observed: Observed) -> None:
    before, load = _bill(observed), Load(observed)
    load.conversations("b", "the last words", 4)
    # Its answer is out before it is booked, by less than the next request takes.
    assert observed.client("admin").get("/ext/v1/overview").status_code == 200
    observed.end(signal.SIGTERM)
    stored = _stored(observed.usage)
    assert stored["b"] == before["b"]["output_tokens"] + load.counts["b"]["output_tokens"]


def _stored(path: Path) -> Counter[str]:
    outputs: Counter[str] = Counter()
    for cell, amounts in UsageStore(path).read(0, float("inf")):
        outputs[cell.tenant] += int(amounts["output_tokens"])
    return outputs
