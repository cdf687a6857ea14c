"""Embedding requests carry no cache key in SGLang; ours are kept apart by their id (trial 8)."""

from collections.abc import Iterator

import pytest

from sglang_ext.demo_model import demo_model_path
from tests.serving.conftest import run_server
from tests.serving.prompts import unique_prompt
from tests.serving.server import Client, ServerProcess, policy_file

pytestmark = pytest.mark.serving


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The demo model as an embedding server."""
    policy = policy_file(tmp_path_factory.mktemp("embedding"), ["a", "b"])
    model = str(demo_model_path())
    yield from run_server(policy, "--model-path", model, "--is-embedding")


def _computed(admin: Client, tenant: str) -> float:
    lines = admin.get("/metrics").text.splitlines()
    words = ("sglang_ext_prompt_tokens_total{", f'tenant="{tenant}"', 'source="computed"')
    mine = [line for line in lines if all(word in line for word in words)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in mine)


def _embed(client: Client, texts: list[str]) -> list[list[float]]:
    response = client.post("/v1/embeddings", {"model": "m", "input": texts})
    response.raise_for_status()
    return [item["embedding"] for item in response.json()["data"]]


@pytest.mark.trial(8)
def test_trial_8_embeddings_are_computed_by_each_tenant(embedder: ServerProcess) -> None:
    a, b, admin = (Client(embedder.url, f"key-{name}") for name in ("a", "b", "admin"))
    text = unique_prompt("embedding", words=100)
    first = _embed(a, [text])
    computed_by_a = _computed(admin, "a")
    assert _embed(b, [text]) == first
    assert _computed(admin, "b") == computed_by_a
    for again in _embed(b, [text, text]):
        # A batch rounds otherwise than one text; both vectors have length one.
        assert sum(one * other for one, other in zip(again, *first, strict=True)) > 0.999
    assert _computed(admin, "b") < 2 * computed_by_a, "a tenant should hit its own pages"


def test_no_store_is_refused_where_it_cannot_be_kept(embedder: ServerProcess) -> None:
    body = {"model": "m", "input": ["hello"]}
    answer = Client(embedder.url, "key-a").post("/v1/embeddings", body, cache_control="no-store")
    assert answer.status_code == 400
    assert "no-store" in answer.text
