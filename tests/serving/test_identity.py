"""Keys, ids and routes: what a tenant may call, and whose requests and sessions it can name."""

import json
import threading

import httpx
import pytest

from tests.serving.prompts import unique_prompt
from tests.serving.server import Client, ServerProcess

pytestmark = pytest.mark.serving


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("/v1/chat/completions", ("error", "message")),
        ("/v1/messages", ("error", "message")),
        ("/generate", ("error", "message")),
        ("/api/chat", ("error",)),
    ],
)
def test_a_bad_key_is_refused_in_the_routes_own_format(
    server: ServerProcess, path: str, where: tuple[str, ...]
) -> None:
    answer = Client(server.url, "sgx-wrong").post(path, {})
    assert answer.status_code == 401
    value = answer.json()
    for name in where:
        value = value[name]
    assert "not known" in value
    assert "sgx-wrong" not in answer.text


def test_anthropic_clients_send_x_api_key(server: ServerProcess) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(server.url + "/v1/messages", json=body, headers={"x-api-key": "key-a"})
    assert answer.status_code == 200
    refused = httpx.post(server.url + "/v1/messages", json=body)
    assert refused.status_code == 401
    assert refused.json()["type"] == "error"


def test_health_is_open(server: ServerProcess) -> None:
    assert httpx.get(server.url + "/health").status_code == 200
    assert httpx.get(server.url + "/health_generate", timeout=60).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/flush_cache",
        "/update_weights_from_disk",
        "/load_lora_adapter",
        "/server_info",
        "/v1/loads",
    ],
)
def test_operator_routes_need_the_admin_key(a: Client, path: str) -> None:
    assert a.post(path, {}).status_code == 403
    assert a.get(path).status_code == 403


def test_admin_may_flush(a: Client, admin: Client) -> None:
    text = unique_prompt("flush")
    a.cached(text)
    assert admin.post("/flush_cache?timeout=30", {}).status_code == 200
    assert a.cached(text) == 0


def test_the_client_sees_its_own_request_ids(a: Client) -> None:
    body = {"rid": "mine", "text": "hello", "sampling_params": {"max_new_tokens": 1}}
    assert a.post("/generate", body).json()["meta_info"]["id"] == "mine"
    batch = {**body, "rid": ["one", "two"], "text": ["hello", "good bye"]}
    assert [item["meta_info"]["id"] for item in a.post("/generate", batch).json()] == ["one", "two"]
    events = a.stream("/generate", {**body, "rid": "streamed", "stream": True})
    assert {json.loads(event)["meta_info"]["id"] for event in events} == {"streamed"}


def test_parallel_samples_are_the_tenants(a: Client, b: Client) -> None:
    text = unique_prompt("parallel samples")
    sampling = {"max_new_tokens": 2, "n": 3, "temperature": 1}
    answers = a.post("/generate", {"text": text, "sampling_params": sampling}).json()
    assert len(answers) == 3
    assert all("/" not in answer["meta_info"]["id"] for answer in answers)
    assert b.cached(text) == 0
    assert a.cached(text) > 0


def test_two_tenants_may_use_one_request_id(server: ServerProcess) -> None:
    answers: dict[str, int] = {}

    def send(tenant: str) -> None:
        body = {"rid": "same", "text": "hello", "sampling_params": {"max_new_tokens": 8}}
        answers[tenant] = Client(server.url, f"key-{tenant}").post("/generate", body).status_code

    threads = [threading.Thread(target=send, args=(tenant,)) for tenant in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {"a": 200, "b": 200}


@pytest.mark.parametrize(
    ("tenant", "abort", "stopped"),
    [
        ("b", {"rid": "foreign-1"}, False),
        ("b", {"rid": "a/foreign-2"}, False),
        ("b", {"rid": "a/"}, False),
        ("b", {"rid": "", "abort_all": True}, False),
        ("a", {"rid": "own"}, True),
    ],
)
def test_abort_reaches_only_the_callers_requests(
    server: ServerProcess, a: Client, tenant: str, abort: dict[str, object], stopped: bool
) -> None:
    # A streamed id must not come again within 2 s: SGLang's clean-up would end its new bearer.
    rid = str(abort["rid"]).removeprefix("a/") or f"foreign-{abort}"
    sampling = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0}
    body = {"rid": rid, "text": "Count:", "stream": True, "sampling_params": sampling}
    last: dict[str, object] = {}
    for event in a.events("/generate", body):
        if not last:
            Client(server.url, f"key-{tenant}").post("/abort_request", abort)
        last = json.loads(event)["meta_info"]
    reason = last["finish_reason"]
    assert isinstance(reason, dict)
    assert reason["type"] == ("abort" if stopped else "length"), reason


def test_sessions_are_the_tenants(a: Client, b: Client) -> None:
    opened = a.post("/open_session", {"capacity_of_str_len": 1000, "session_id": "chat"})
    assert opened.json() == "chat"
    # The name is free for another tenant, and closing it there leaves A's session open.
    assert (
        b.post("/open_session", {"capacity_of_str_len": 1000, "session_id": "chat"}).json()
        == "chat"
    )
    assert b.post("/close_session", {"session_id": "chat"}).status_code == 200
    turn = {"text": "Hello there", "session_params": {"id": "chat"}}
    first = a.post("/generate", {**turn, "sampling_params": {"max_new_tokens": 2}})
    assert first.status_code == 200
    rid = first.json()["meta_info"]["id"]
    stolen = b.post(
        "/generate",
        {
            **turn,
            "session_params": {"id": "chat", "rid": rid},
            "sampling_params": {"max_new_tokens": 1},
        },
    )
    assert (
        stolen.status_code != 200 or stolen.json()["meta_info"]["finish_reason"]["type"] == "abort"
    )
    again = {**turn, "session_params": {"id": "chat", "rid": rid}, "text": " and again"}
    answer = a.post("/generate", {**again, "sampling_params": {"max_new_tokens": 1}}).json()
    assert answer["meta_info"]["prompt_tokens"] > first.json()["meta_info"]["prompt_tokens"]
    assert a.post("/close_session", {"session_id": "chat"}).status_code == 200


@pytest.mark.parametrize("ids", [[10**9], [-1], [[5, 6], [5, 10**9]]], ids=str)
def test_a_token_id_that_the_model_has_not_is_refused_and_ends_nobody(
    a: Client, b: Client, ids: list[object]
) -> None:
    for path, field in (("/generate", "input_ids"), ("/v1/completions", "prompt")):
        answer = a.post(path, {"model": "m", field: ids})
        assert answer.status_code == 400, answer.text
        assert "expected token ids from 0 to" in answer.text
    assert b.generate("still here")["meta_info"]
