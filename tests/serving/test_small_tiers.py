"""Host memory smaller than HBM: what comes back into it, and what the metrics say about it."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.tenancy.keys import digest
from tests.serving.prompts import unique_prompt
from tests.serving.server import Client, ServerProcess
from tests.serving.tiered import (
    LEAST,
    NVME_BYTES,
    ROUNDING,
    Tiers,
    Told,
    apart,
    ask,
    equal,
    flood,
    story,
    wait,
)
from tests.tiering.stores import flip

pytestmark = pytest.mark.serving

FLAGS = ("--max-total-tokens", "2400", "--mem-fraction-static", "0.3", "--sleep-on-idle")
TOKEN_BYTES = 23_040
CPU_TOKENS = 1200
RESERVED_BYTES = 16 * 2**20
SYSTEM = unique_prompt("You are the assistant of many customers", words=60)
SOURCES = ("device", "host", "storage")
ENDS = ("useful", "late", "failed", "no_room", "wasted")


class SmallHost(Tiers):
    """A server with half as much host memory as HBM, a disk, and a public system prompt."""

    def __init__(self, folder: Path) -> None:
        self.pages, self.policy = folder / "pages", folder / "tenants.yaml"
        keys = {name: digest(f"key-{name}") for name in ("a", "b", "admin")}
        self.policy.write_text(
            "version: 1\n"
            f'admin_keys: ["{keys["admin"]}"]\n'
            f"tiers: {{load: always, cpu: {{size: {CPU_TOKENS * TOKEN_BYTES}B}}, "
            f"nvme: {{size: {NVME_BYTES}B, path: {self.pages}}}}}\n"
            f"public_prefixes: [{{name: assistant, system: {SYSTEM!r}}}]\n"
            "defaults: {quota: {hbm: 100%, cpu: 100%}}\n"
            f'tenants: {{a: {{api_keys: ["{keys["a"]}"]}}, b: {{api_keys: ["{keys["b"]}"]}}}}\n',
            encoding="utf-8",
        )
        self.start()

    def start(self) -> None:
        self.server = ServerProcess(
            "sglang_ext.launch_server", ["--tenant-policy", str(self.policy), *FLAGS]
        )
        self.server.wait_ready()

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over all series that have these labels."""
        found = 0.0
        for line in self.client("admin").get("/metrics").text.splitlines():
            match = re.match(rf"sglang_ext_{name}(?:{{(.*)}})? (\S+)$", line)
            if match and all(f'{key}="{value}"' in match[1] for key, value in labels.items()):
                found += float(match[2])
        return found

    def fetched(self, *outcomes: str) -> float:
        """Return how many tokens that the disk had came to one of these ends."""
        return sum(self.metric("fetched_tokens_total", outcome=outcome) for outcome in outcomes)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallHost]:
    small = SmallHost(tmp_path_factory.mktemp("small"))
    try:
        yield small
        small.server.stop()
        assert not small.server.leaks(), small.server.leaks()
    finally:
        small.server.kill()


def chat(client: Client, user: str) -> dict[str, Any]:
    """Ask behind the public system prompt; return the usage."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    body = {"model": "m", "messages": messages, "max_tokens": 1, "temperature": 0}
    response = client.post("/v1/chat/completions", body)
    response.raise_for_status()
    usage = response.json()["usage"]
    assert isinstance(usage, dict)
    return usage


def cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.trial(45)
@pytest.mark.trial(54)
@pytest.mark.trial(69)
def test_what_is_only_on_disk_comes_back_into_a_host_pool_that_is_full(small: SmallHost) -> None:
    a, b = small.client("a"), small.client("b")
    numbers = range(3)
    cold, hbm = ([ask(a, number) for number in numbers] for _ in range(2))
    flood(b, 500, 6)
    back = [ask(a, number) for number in numbers]
    assert all(told.sources["storage"] >= LEAST for told in back), back
    assert equal(back, hbm)
    assert apart(cold, back) <= ROUNDING
    again = [ask(a, number) for number in numbers]
    assert all(told.cached >= LEAST for told in again)


@pytest.mark.trial(94)
def test_hits_by_tier_add_up_in_answers_and_in_metrics(small: SmallHost) -> None:
    a = small.client("a")
    names = {"hbm": "device", "cpu": "host", "nvme": "storage"}
    before = {tier: small.metric("prompt_tokens_total", tenant="a", source=tier) for tier in names}
    told: list[Told] = []
    # So long that no machine computes it as quickly as it loads it.
    text = unique_prompt("hits by tier", words=800)
    for first in (600, 610):
        for _ in range(2):
            answer: Any = a.generate(text)["meta_info"]
            where = answer["cached_tokens_details"] or {}
            found = {source: where.get(source, 0) for source in SOURCES}
            assert sum(found.values()) == answer["cached_tokens"]
            told.append(Told("", 0.0, found))
        # Its own texts: another tenant's would not push out what lies within its share.
        flood(a, first, 6)
    assert {source for one in told for source in SOURCES if one.sources[source]} >= {
        "device",
        "storage",
    }
    for tier, source in names.items():
        expected = before[tier] + sum(one.sources[source] for one in told)
        assert small.metric("prompt_tokens_total", tenant="a", source=tier) == expected


def test_a_conversation_behind_a_public_prompt_comes_back_whole(small: SmallHost) -> None:
    """The public pages being in memory, or, after a restart, on the disk alone."""
    text = unique_prompt("public and private", words=400)
    usage = chat(small.client("a"), text)
    public = cached(chat(small.client("b"), "another question"))
    assert 50 < public < 200
    whole = usage["prompt_tokens"] - 20
    flood(small.client("b"), 700, 6)
    chat(small.client("b"), "keeps the public pages in memory")
    assert cached(chat(small.client("a"), text)) >= whole
    small.restart()
    assert cached(chat(small.client("a"), text)) >= whole
    wait(lambda: small.fetched("useful") >= whole)
    wait(lambda: small.metric("prompt_tokens_total", tenant="a", source="nvme") >= whole)


@pytest.mark.trial(40)
def test_what_moves_and_what_is_held_is_on_the_metrics_page(small: SmallHost) -> None:
    a = small.client("a")
    ask(a, 80)
    for origin, goal in (("hbm", "cpu"), ("cpu", "nvme"), ("nvme", "cpu"), ("cpu", "hbm")):
        name = {"from": origin, "to": goal}
        wait(lambda name=name: small.metric("moved_bytes_total", **name) > 0)
        assert small.metric("moved_seconds_total", **name) > 0
    wait(lambda: small.fetched("issued") == small.fetched(*ENDS) > 0)
    assert small.metric("fetch_ready_seconds_count") > 0
    for tier in ("hbm", "nvme"):
        held = {"owner": "t:a", "tier": tier}
        wait(lambda held=held: small.metric("token_seconds_total", **held) > 0)
        assert small.metric("held_bytes", **held) > small.metric("held_tokens", **held) > 0
        assert small.metric("quota_tokens", **held) > 0


def flip_a_bit_in_every_page(folder: Path) -> None:
    """Damage the bodies of all pages on disk, and leave holes, which are zeros, as they are."""
    step = TOKEN_BYTES * 8
    for slab in folder.rglob("*.slab"):
        content = slab.read_bytes()
        for place in range(step, len(content), step):
            if content[place]:
                flip(slab, place, 0)


@pytest.mark.trial(65)
@pytest.mark.trial(67)
def test_pages_that_cannot_be_read_are_computed_again(small: SmallHost) -> None:
    a = small.client("a")
    before = [ask(a, number) for number in (90, 91)]
    flood(a, 900, 6)
    flip_a_bit_in_every_page(small.pages)
    after = [ask(a, number) for number in (90, 91)]
    assert apart(before, after) <= ROUNDING
    assert small.metric("store_events_total", event="corrupt") > 0


@pytest.mark.trial(52)
def test_after_a_flush_everything_goes_on(small: SmallHost) -> None:
    a, admin = small.client("a"), small.client("admin")
    for _ in range(2):
        told = [ask(a, number) for number in (95, 96)]
        assert all(one.text for one in told)
        assert admin.post("/flush_cache", {}).status_code == 200


def disk_bytes(folder: Path) -> int:
    """Return what the pages take on the disk, in the numbers of the disk itself."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*.slab"))


@pytest.mark.trial(57)
@pytest.mark.trial(60)
def test_churn_leaves_memory_flat_and_the_disk_equal_to_its_books(small: SmallHost) -> None:
    """Far more stories than the disk holds, some asked for often; the first rounds warm up."""
    dice = random.Random(60)
    clients = [small.client("a"), small.client("b")]
    resident = []

    def churn() -> None:
        for _ in range(10):
            dice.choice(clients).generate(story(2000 + int(120 * dice.random() ** 2)))
        resident.append(small.server.resident_bytes())

    # How much of it reaches a disk depends on the disk.
    while small.metric("store_events_total", event="evicted") == 0 or len(resident) < 4:
        assert len(resident) < 40, "the disk was never full"
        churn()
    warm = len(resident)
    for _ in range(4):
        churn()
    assert max(resident[warm:]) <= max(resident[:warm]) + 48 * 2**20, resident

    def books_are_right() -> bool:
        # At rest: while blocks go from one file to another, their sum is of no moment. Headers and
        # whole blocks come on top of the pages' own bytes, and the slots reserved for the next.
        held, used = small.metric("held_bytes", tier="nvme"), disk_bytes(small.pages)
        return 0 < held <= used <= min(NVME_BYTES, 1.03 * held + RESERVED_BYTES)

    wait(books_are_right)
