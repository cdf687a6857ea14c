"""Tenants' caches do not mix, whatever a client sends (trials 2, 4, 8, 17, 19).

Private tenants and sealed ones alike.
"""

import json
from collections import Counter
from collections.abc import Callable

import pytest

from sglang_ext.demo_model import DEMO_MODEL_NAME
from sglang_ext.namespace import frame
from sglang_ext.types import Owner
from tests.serving.prompts import unique_prompt
from tests.serving.server import Client, ServerProcess

pytestmark = pytest.mark.serving


@pytest.fixture
def a(server: ServerProcess, level: str) -> Client:
    """Tenant A of each level."""
    return Client(server.url, f"key-{level}a")


@pytest.fixture
def b(server: ServerProcess, level: str) -> Client:
    """Tenant B of the same."""
    return Client(server.url, f"key-{level}b")


def _chat(client: Client, text: str, **fields: object) -> int:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    response = client.post("/v1/chat/completions", {**body, **fields})
    response.raise_for_status()
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def _chat_stream(client: Client, text: str) -> int:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage = [
        json.loads(event).get("usage") for event in client.stream("/v1/chat/completions", body)
    ]
    details = next(item for item in reversed(usage) if item)["prompt_tokens_details"]
    return int((details or {}).get("cached_tokens", 0))


def _completion(client: Client, text: str) -> int:
    response = client.post("/v1/completions", {"model": "m", "prompt": text, "max_tokens": 1})
    response.raise_for_status()
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def _completion_batch(client: Client, text: str) -> int:
    # They share nothing: whether the second would hit the first depends on the batches they meet.
    prompts = [text, f"Something else. {text}"]
    response = client.post("/v1/completions", {"model": "m", "prompt": prompts, "max_tokens": 1})
    response.raise_for_status()
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def _generate_stream(client: Client, text: str) -> int:
    body = {"text": text, "stream": True, "sampling_params": {"max_new_tokens": 1}}
    return int(json.loads(client.stream("/generate", body)[-1])["meta_info"]["cached_tokens"])


def _generate_batch(client: Client, text: str) -> int:
    body = {
        "text": [text, unique_prompt("other " + text)],
        "sampling_params": {"max_new_tokens": 1},
    }
    response = client.post("/generate", body)
    response.raise_for_status()
    return int(response.json()[0]["meta_info"]["cached_tokens"])


def _responses(client: Client, text: str) -> int:
    body = {"model": DEMO_MODEL_NAME, "input": text, "max_output_tokens": 8}
    response = client.post("/v1/responses", body)
    response.raise_for_status()
    return int(response.json()["usage"]["input_tokens_details"]["cached_tokens"])


def _messages(client: Client, text: str) -> int:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    response = client.post("/v1/messages", body)
    response.raise_for_status()
    return int(response.json()["usage"].get("cache_read_input_tokens") or 0)


_ROUTES: dict[str, Callable[[Client, str], int]] = {
    "chat": _chat,
    "chat stream": _chat_stream,
    "completions": _completion,
    "generate": lambda client, text: client.cached(text),
    "generate stream": _generate_stream,
    "generate batch": _generate_batch,
    "responses": _responses,
    "messages": _messages,
}


@pytest.mark.trial(2)
def test_trial_2_salt_divides_a_tenants_own_space(a: Client) -> None:
    text = unique_prompt("trial 2")
    assert _chat(a, text, cache_salt="one") == 0
    assert _chat(a, text, cache_salt="one") > 0
    assert _chat(a, text, cache_salt="two") == 0


@pytest.mark.trial(4)
@pytest.mark.parametrize(
    "forged",
    [
        {"extra_key": frame(Owner("t:a"))},
        {"extra_key": frame(Owner("s:sa"))},
        {"extra_key": "a"},
        {"cache_salt": "a"},
        {"user": "a"},
        {"custom_labels": {"tenant": "a"}},
        {"rid": "a/forged"},
        {"rid": "sa/forged"},
        {"routing_key": "a"},
        {"session_id": "a/session"},
    ],
    ids=str,
)
def test_trial_4_nothing_in_the_body_makes_b_into_a(
    a: Client, b: Client, forged: dict[str, object]
) -> None:
    text = unique_prompt(f"trial 4 {forged}")
    assert a.cached(text) == 0
    assert b.cached(text, **forged) == 0
    assert a.cached(text) > 0


@pytest.mark.trial(4)
@pytest.mark.parametrize("name", ["x-tenant", "x-custom-labels", "x-smg-routing-key", "x-user"])
def test_trial_4_nothing_in_a_header_makes_b_into_a(a: Client, b: Client, name: str) -> None:
    text = unique_prompt(f"trial 4 {name}")
    assert a.cached(text) == 0
    body = {"text": text, "sampling_params": {"max_new_tokens": 1}}
    answer = b.post("/generate", body, **{name: '{"tenant": "a"}'}).json()
    assert answer["meta_info"]["cached_tokens"] == 0
    assert a.cached(text) > 0


@pytest.mark.trial(8)
@pytest.mark.parametrize("route", _ROUTES)
def test_trial_8_five_tenants_first_sends_all_miss(
    server: ServerProcess, route: str, level: str
) -> None:
    send, text = _ROUTES[route], unique_prompt(f"trial 8 {route}", words=200)
    clients = [Client(server.url, f"key-{level}{name}") for name in "abcde"]
    # A tenant may hit what its own earlier prompts had in common with this one: the chat template.
    first = [send(client, text) for client in clients]
    again = [send(client, text) for client in clients]
    assert max(first) < 64, first
    assert min(again) > 128, again


@pytest.mark.trial(8)
def test_trial_8_batch_of_completions(a: Client, b: Client) -> None:
    text = unique_prompt("trial 8 completions batch", words=200)
    assert [_completion_batch(client, text) for client in (a, b)] == [0, 0]
    assert all(_completion_batch(client, text) > 128 for client in (a, b))


def test_tenants_of_one_group_share(server: ServerProcess) -> None:
    sales, hr = (Client(server.url, f"key-{name}") for name in ("sales", "hr"))
    text = unique_prompt("group")
    assert sales.cached(text) == 0
    assert hr.cached(text) > 0
    assert Client(server.url, "key-a").cached(text) == 0


def test_system_requests_share_with_no_tenant(a: Client, admin: Client) -> None:
    text = unique_prompt(f"system {a.key}")
    assert a.cached(text) == 0
    assert admin.cached(text) == 0


@pytest.mark.trial(8)
@pytest.mark.trial(21)
def test_no_level_meets_another(server: ServerProcess) -> None:
    """Whoever sends first, private, sealed and sharing tenants all compute for themselves."""
    text = unique_prompt("levels", words=100)
    clients = [Client(server.url, f"key-{name}") for name in ("sa", "a", "sales", "sb")]
    assert [client.cached(text) for client in clients] == [0, 0, 0, 0]
    assert min(client.cached(text) for client in clients) > 0


@pytest.mark.trial(17)
def test_trial_17_metrics_need_the_admin_key(
    server: ServerProcess, level: str, a: Client, b: Client, admin: Client
) -> None:
    a.cached(unique_prompt("metrics"))
    assert b.get("/metrics").status_code == 403
    assert Client(server.url, "no such key").get("/metrics").status_code == 401
    assert f'tenant="{level}a"' in admin.get("/metrics").text


@pytest.mark.trial(19)
def test_trial_19_no_store_leaves_nothing(a: Client, admin: Client) -> None:
    text = unique_prompt("trial 19", words=150)
    body = {"text": text, "sampling_params": {"max_new_tokens": 1}}

    def send() -> int:
        answer = a.post("/generate", body, cache_control="no-store")
        return int(answer.json()["meta_info"]["cached_tokens"])

    # In a full pool, even what leaves nothing would push others out.
    assert admin.post("/ext/v1/flush", {"all": True}).status_code == 200
    before = _held(admin)
    assert [send(), send()] == [0, 0]
    assert _held(admin) == before, "something was left"
    assert [a.cached(text), a.cached(text) > 0] == [0, True]


def _held(admin: Client) -> Counter[str]:
    """Return the tokens of each owner in the trees of all engines; the server's own come and go."""
    ranks = admin.get("/ext/v1/tree?limit=10000").json()["ranks"]
    held: Counter[str] = Counter()
    for run in (run for rank in ranks for run in rank["runs"]):
        held[run["owner"]] += run["tokens"]
    del held["t:system"]
    return held
