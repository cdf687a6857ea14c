"""Pages on the disk of a real server: who can read them, and which weights and formats they fit."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sglang_ext.namespace import frame
from sglang_ext.tenancy.keys import digest
from sglang_ext.tiering.encryption import KeyRing, master_key
from sglang_ext.tiering.page_format import HEADER_BYTES, PageHeader, parse_header
from sglang_ext.types import Owner
from tests.serving.prompts import unique_prompt
from tests.serving.server import Client, ServerProcess
from tests.tiering.stores import flip
from tests.tiny_models import tiny_llama

pytestmark = pytest.mark.serving

FLAGS = ("--max-total-tokens", "6000", "--mem-fraction-static", "0.3", "--sleep-on-idle")
KEY = "5e" * 32
TEXT = unique_prompt("stored", words=1400)
"""Long, so that fetching it is quicker than computing it in any case."""
PAGES = 80
"""So many pages of TEXT, at least, reach the disk."""
DEADLINE_S = 60


class Stored:
    """A server on a folder of pages, with one tenant in the clear and one encrypted."""

    def __init__(self, folder: Path) -> None:
        self.models = [
            tiny_llama(folder / f"model{seed}", layers=8, hidden=256, seed=seed) for seed in (0, 1)
        ]
        self.pages = folder / "pages"
        self.key = folder / "master.key"
        self.key.write_text(KEY)
        self.key.chmod(0o600)
        self.policy = folder / "tenants.yaml"
        keys = {name: digest(f"key-{name}") for name in ("clear", "secret", "admin")}
        self.policy.write_text(
            "version: 1\n"
            f'admin_keys: ["{keys["admin"]}"]\n'
            "tiers: {cpu: {size: 60MB}, "
            f"nvme: {{size: 100MB, path: {self.pages}, master_key: {self.key}}}}}\n"
            "defaults: {quota: {hbm: 100%, cpu: 100%}}\n"
            "tenants:\n"
            f'  clear: {{api_keys: ["{keys["clear"]}"]}}\n'
            f'  secret: {{api_keys: ["{keys["secret"]}"], encrypt: true}}\n',
            encoding="utf-8",
        )
        self.start(self.models[0])

    def start(self, model: Path, *flags: str) -> None:
        self.model, self.flags = model, flags
        named = ["--model-path", str(model), "--served-model-name", "tiny"]
        arguments = ["--tenant-policy", str(self.policy), *named, *FLAGS, *flags]
        self.server = ServerProcess("sglang_ext.launch_server", arguments)
        self.server.wait_ready()

    def restart(self, model: Path, *flags: str) -> None:
        self.server.stop()
        self.start(model, *flags)

    @property
    def folder(self) -> Path:
        """What the only rank keeps."""
        (folder,) = self.pages.iterdir()
        return folder

    def client(self, tenant: str) -> Client:
        return Client(self.server.url, f"key-{tenant}")

    def ask(self, tenant: str) -> tuple[str, dict[str, int]]:
        """Return the greedy answer to TEXT, and where its cached tokens came from."""
        answer = self.client(tenant).generate(TEXT, tokens=8)
        meta: Any = answer["meta_info"]
        where = meta["cached_tokens_details"] or {}
        found = {tier: where.get(tier, 0) for tier in ("device", "host", "storage")}
        assert sum(found.values()) == meta["cached_tokens"]
        return str(answer["text"]), found

    def events(self, name: str) -> float:
        """Return how often something happened to pages in the NVMe tier."""
        lines = self.client("admin").get("/metrics").text.splitlines()
        series = f'sglang_ext_store_events_total{{event="{name}"}}'
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(series))

    def on_disk(self, tenant: str) -> list[tuple[PageHeader, bytes]]:
        """Return the pages of a tenant, as they lie in the files."""
        owner = f"t:{tenant}"
        return [(header, body) for _, _, header, body in self._slots() if header.owner == owner]

    def wait_for_pages(self, *tenants: str) -> None:
        """Return once the pages of TEXT lie on the disk."""
        wait(lambda: all(len(self.on_disk(tenant)) >= PAGES for tenant in tenants))

    def flip_a_byte_of_each(self, tenant: str) -> int:
        """Damage every page of a tenant, while the server is down; return how many."""
        count = 0
        for path, start, header, _ in self._slots():
            if header.owner == f"t:{tenant}":
                flip(path, start + HEADER_BYTES + count, count % 8)
                count += 1
        return count

    def _slots(self) -> Iterator[tuple[Path, int, PageHeader, bytes]]:
        for path in self.folder.glob("slabs/*/*.slab"):
            content = memoryview(path.read_bytes())
            size = int(path.stem.partition("-")[2])
            for start in range(0, len(content), size):
                page = content[start : start + size]
                header = parse_header(page)
                if isinstance(header, PageHeader):
                    body = bytes(page[HEADER_BYTES : HEADER_BYTES + header.body_bytes])
                    yield path, start, header, body


def wait(until: Callable[[], bool]) -> None:
    """Return once ``until`` holds; fail after a minute."""
    end = time.monotonic() + DEADLINE_S
    while not until():
        assert time.monotonic() < end, "it never happened"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    stored = Stored(tmp_path_factory.mktemp("stored"))
    try:
        yield stored
        stored.server.stop()
        assert not stored.server.leaks(), stored.server.leaks()
    finally:
        stored.server.kill()


def hash_of_first_page(stored: Stored, tenant: str) -> bytes:
    """Return what SGLang calls the first page of TEXT of a tenant."""
    from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

    tokens = AutoTokenizer.from_pretrained(stored.models[0], local_files_only=True)(TEXT).input_ids
    seed = storage_namespace_seed(frame(Owner(f"t:{tenant}")), None)
    hashes = get_hash_str(tokens[:16], seed, page_size=16)
    return bytes.fromhex(hashes[0])


def files(stored: Stored) -> bytes:
    return b"".join(path.read_bytes() for path in stored.pages.rglob("*") if path.is_file())


@pytest.mark.trial(72)
def test_an_encrypted_page_shows_neither_its_numbers_nor_its_text(stored: Stored) -> None:
    """Both tenants compute the same numbers; only the clear ones can be found in the files."""
    for tenant in ("clear", "secret"):
        stored.ask(tenant)
    stored.wait_for_pages("clear", "secret")
    first = hash_of_first_page(stored, "clear")
    (body,) = (body for header, body in stored.on_disk("clear") if header.key == first)
    windows = [body[at : at + 64] for at in range(0, len(body), len(body) // 8)]
    sealed = b"".join(body for _, body in stored.on_disk("secret"))
    content = files(stored)
    assert all(header.encrypted for header, _ in stored.on_disk("secret"))
    assert not any(window in sealed for window in windows)
    assert all(window in content for window in windows)
    assert hash_of_first_page(stored, "secret") not in content
    assert KEY.encode() not in content and bytes.fromhex(KEY) not in content


@pytest.mark.trial(70)
@pytest.mark.trial(72)
def test_pages_come_back_after_a_restart_until_key_or_content_is_destroyed(stored: Stored) -> None:
    before = {tenant: stored.ask(tenant)[0] for tenant in ("clear", "secret")}
    stored.restart(stored.models[0])
    for tenant, text in before.items():
        answer, found = stored.ask(tenant)
        assert answer == text
        assert found["storage"] >= 16 * PAGES, (tenant, found)
    stored.server.stop()
    KeyRing(stored.folder / "keys", master_key(str(stored.key))).destroy(Owner("t:secret"))
    damaged = stored.flip_a_byte_of_each("clear")
    stored.start(stored.models[0])
    for tenant, text in before.items():
        answer, found = stored.ask(tenant)
        assert answer == text
        assert sum(found.values()) == 0, (tenant, found)
    assert damaged >= PAGES
    wait(lambda: stored.events("corrupt") > 0)


@pytest.mark.trial(72)
def test_a_flush_destroys_the_key(stored: Stored) -> None:
    stored.ask("secret")
    stored.wait_for_pages("secret")
    old = {path: path.read_bytes() for path in stored.folder.glob("keys/*/*.key")}
    answer = stored.client("admin").post("/ext/v1/flush", {"tenant": "secret"})
    assert answer.status_code == 200, answer.text
    stored.ask("secret")
    stored.wait_for_pages("secret")
    new = {path: path.read_bytes() for path in stored.folder.glob("keys/*/*.key")}
    assert old.keys() == new.keys()
    assert sum(old[path] != new[path] for path in old) == 1


@pytest.mark.trial(49)
def test_other_weights_find_nothing_of_the_former_ones(stored: Stored) -> None:
    """In a live server whose name stays the same, in every tier."""
    old, _ = stored.ask("clear")
    assert sum(stored.ask("clear")[1].values()) >= 16 * PAGES
    admin = stored.client("admin")
    body = {"model_path": str(stored.models[1])}
    refused = admin.post("/update_weights_from_disk", {**body, "flush_cache": False})
    assert "pages of the former weights would be served" in refused.text
    assert stored.ask("clear")[0] == old
    answer = admin.post("/update_weights_from_disk", body)
    assert answer.json()["success"], answer.text
    stored.model = stored.models[1]
    new, found = stored.ask("clear")
    assert sum(found.values()) == 0, found
    assert new != old, "the models must differ for this test to be worth something"
    again, found = stored.ask("clear")
    assert again == new
    assert sum(found.values()) >= 16 * PAGES


@pytest.mark.trial(48)
def test_another_type_of_numbers_finds_nothing(stored: Stored) -> None:
    stored.ask("clear")
    stored.wait_for_pages("clear")
    stored.restart(stored.model, "--kv-cache-dtype", "fp8_e4m3")
    assert sum(stored.ask("clear")[1].values()) == 0


@pytest.mark.trial(49)
def test_another_model_under_the_same_name_finds_nothing(stored: Stored) -> None:
    stored.ask("clear")
    stored.wait_for_pages("clear")
    (other,) = (model for model in stored.models if model != stored.model)
    stored.restart(other, *stored.flags)
    assert sum(stored.ask("clear")[1].values()) == 0
