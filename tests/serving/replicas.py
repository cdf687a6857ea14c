"""Two replicas of the shared engine with HBM, CPU and NVMe, and conversations at home in either."""

import re
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from sglang_ext.gateway.plan import EngineSpec
from sglang_ext.gateway.routing import Routing
from sglang_ext.tenancy.keys import digest
from sglang_ext.tiering.page_format import PageHeader, parse_header
from sglang_ext.types import TenantId
from tests.serving.prompts import unique_prompt
from tests.serving.server import Client, ServerProcess

__all__ = ["ENGINES", "SYSTEM", "Replicas", "session_at", "told"]

ENGINES = ("shared-0", "shared-1")
MEMORY = frozenset({"hbm", "cpu"})
SYSTEM = unique_prompt("You are the assistant of many customers", words=60)
_FLAGS = ("--max-total-tokens", "4000", "--mem-fraction-static", "0.3", "--sleep-on-idle")
_BRIEF = "ttl: {hbm: 1s, cpu: 2s, nvme: 3s, mode: strict}"
_TENANTS = {
    **dict.fromkeys("abc", "isolation: private"),
    **dict.fromkeys(("sa", "sb"), "isolation: sealed"),
    **{"brief": _BRIEF, "sbrief": f"isolation: sealed, {_BRIEF}"},
}
_ROUTING = Routing(EngineSpec(name, None, place, 2) for place, name in enumerate(ENGINES))


def session_at(tenant: str, engine: str, label: str) -> str:
    """Return the name of a conversation of ``tenant`` whose home is ``engine``."""
    names = (f"{label}-{number}" for number in count())
    return next(n for n in names if _ROUTING.order(TenantId(tenant), n, {})[0] == engine)


def told(client: Client, text: str, session: str | None = None, **headers: str) -> int:
    """Send a prompt in a conversation; return how many of its tokens were cached."""
    body = {"text": text, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    named = headers if session is None else {"x_session_id": session, **headers}
    answer = client.post("/generate", body, **named)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["meta_info"]["cached_tokens"])


class Replicas:
    """The running server; the key of a tenant is ``key-<tenant>``."""

    def __init__(self, folder: Path) -> None:
        self.pages = folder / "pages"
        self.policy = folder / "tenants.yaml"
        key = folder / "master.key"
        key.write_text("5e" * 32)
        key.chmod(0o600)
        tenants = [
            f'  {name}: {{api_keys: ["{digest(f"key-{name}")}"], {more}}}'
            for name, more in _TENANTS.items()
        ]
        nvme = f"{{size: 800MB, path: {self.pages}, master_key: {key}}}"
        lines = [
            "version: 1",
            f'admin_keys: ["{digest("key-admin")}"]',
            f"tiers: {{load: always, cpu: {{size: 200MB}}, nvme: {nvme}}}",
            f"public_prefixes: [{{name: assistant, system: {SYSTEM!r}}}]",
            "defaults: {quota: {hbm: 100%, cpu: 100%}}",
            "tenants:",
            *tenants,
        ]
        self.policy.write_text("\n".join(lines) + "\n", encoding="utf-8")
        arguments = ["--tenant-policy", str(self.policy), "--engines", "2", *_FLAGS]
        self.server = ServerProcess("sglang_ext.launch_server", [*arguments, "--page-size", "16"])

    def client(self, tenant: str) -> Client:
        return Client(self.server.url, f"key-{tenant}")

    def engines(self) -> dict[str, dict[str, Any]]:
        """Return the operator's list of engines by name."""
        rows = self.client("admin").get("/ext/v1/engines").json()["engines"]
        return {row["engine"]: row for row in rows}

    def held(self, tenant: str, tiers: frozenset[str] = MEMORY) -> dict[str, int]:
        """Return how many tokens of a tenant lie in one of ``tiers``, by engine."""
        owner = f"{'s' if tenant.startswith('s') else 't'}:{tenant}"
        found: Counter[str] = Counter()
        for rank in self.client("admin").get("/ext/v1/tree?limit=10000").json()["ranks"]:
            runs = [run for run in rank["runs"] if run["owner"] == owner]
            runs = [run for run in runs if tiers & set(run["tiers"])]
            found[rank["engine"]] += sum(run["tokens"] for run in runs)
        return dict(found)

    def sessions(self, engine: str, tenant: str) -> dict[str, dict[str, Any]]:
        """Return the conversations of a tenant that one engine knows, by name."""
        answer = self.client("admin").get(f"/ext/v1/sessions?tenant={tenant}", x_engine=engine)
        return {row["session"]: row for row in answer.json()["sessions"]}

    def stored(self, engine: str) -> dict[str, set[bytes]]:
        """Return the names of the pages on an engine's disk, by owner."""
        found: dict[str, set[bytes]] = {}
        for path in (self.pages / f"{engine}.engine").rglob("*.slab"):
            content = memoryview(path.read_bytes())
            size = int(path.stem.partition("-")[2])
            for start in range(0, len(content), size):
                header = parse_header(content[start : start + size])
                if isinstance(header, PageHeader):
                    found.setdefault(header.owner, set()).add(header.key)
        return found

    def stored_tokens(self, tenant: str) -> float:
        """Return how many tokens of a tenant the disks of both engines hold, by the metrics."""
        owner = f"{'s' if tenant.startswith('s') else 't'}:{tenant}"
        series = rf'sglang_ext_held_tokens{{engine="shared-\d",owner="{owner}",tier="nvme"}} (\S+)'
        return sum(map(float, re.findall(series, self.client("admin").get("/metrics").text)))
