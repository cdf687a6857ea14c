"""Identity on SGLang's real request types: the client decides nothing about whose a request is."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, SessionParams

from sglang_ext.errors import PolicyError
from sglang_ext.namespace import parse
from sglang_ext.request_tag import RequestTag
from sglang_ext.tenancy.fields import name as read_name
from sglang_ext.tenancy.identity import (
    SYSTEM,
    Identity,
    apply_identity,
    tenant_of_id,
    unscope_output,
)
from sglang_ext.types import SYSTEM_TENANT, Owner, TenantId

_A = Identity(TenantId("a"), Owner("t:a"))
_NO_STORE = Identity(TenantId("a"), Owner("t:a"), no_store=True)
_HEX_ID = re.compile("[0-9a-f]{32}")
_TENANTS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True).map(TenantId)


def _applied(request: Any, identity: Identity = _A) -> Any:
    """Return the request as the engine will see it: with its identity, then normalised."""
    apply_identity(request, identity)
    request.normalize_batch_and_arguments()
    return request


def _generate(**fields: Any) -> Any:
    return _applied(GenerateReqInput(**{"text": "hello", **fields}))


def test_one_request() -> None:
    request = _generate(rid="mine", extra_key="mine too")
    assert request.rid == "a/mine"
    assert parse(request.extra_key) == ("t:a", "mine too", "", "")


def test_a_request_without_id_or_key() -> None:
    request = _generate(extra_key="")
    assert request.rid.startswith("a/")
    assert _HEX_ID.fullmatch(request.rid[2:])
    assert parse(request.extra_key) == ("t:a", "", "", "")


def test_a_batch_with_a_list_each() -> None:
    request = _generate(text=["x", "y"], rid=["1", "2"], extra_key=["k", ""])
    assert request.rid == ["a/1", "a/2"]
    assert [parse(key)[:2] for key in request.extra_key] == [("t:a", "k"), ("t:a", "")]


@pytest.mark.parametrize("rid", [None, "batch"])
def test_a_batch_with_one_value(rid: str | None) -> None:
    request = _generate(text=["x", "y"], rid=rid, sampling_params={"n": 2})
    assert len(set(request.rid)) == 4
    assert all(part.startswith("a/") for part in request.rid)
    assert {parse(key).owner for key in request.extra_key} == {"t:a"}


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "x"},
        {"text": ["x", "y"]},
        {"input_ids": [1]},
        {"input_ids": [[1], [2]]},
        {"image_data": "i"},
        {"image_data": [["i"], ["j"]]},
        {"image_data": ["i", "j"]},
    ],
)
def test_embeddings(fields: dict[str, Any]) -> None:
    request = _applied(EmbeddingReqInput(**fields))
    ids = [request.rid] if request.is_single else request.rid
    assert len(set(ids)) == request.batch_size
    assert {tenant_of_id(rid) for rid in ids} == {"a"}


@pytest.mark.parametrize(
    "field",
    [
        {"rid": 5},
        {"rid": ["x", 5]},
        {"rid": ["x", ["y"]]},
        {"rid": {"x": "y"}},
        {"extra_key": 5},
        {"extra_key": [5]},
        {"extra_key": {"x": "y"}},
        {"session_id": 5},
        {"session_params": ["id"]},
        {"session_params": "id"},
        {"session_params": {"id": 5}},
        {"session_params": {"id": ["x"]}},
        {"session_params": {"id": "x", "rid": 5}},
        {"session_params": {"id": "x", "offset": "5"}},
        {"session_params": {"id": "x", "offset": True}},
        {"session_params": {"id": "x", "replace": "yes"}},
        {"session_params": {"id": "x", "else": 1}},
    ],
    ids=str,
)
def test_a_wrong_type_is_a_value_error(field: dict[str, Any]) -> None:
    """SGLang answers it with 400; any other error would be a 500, or the end of the scheduler."""
    with pytest.raises(ValueError, match="should be|no field"):
        apply_identity(GenerateReqInput(text="x", **field), _A)


_OPERATOR = {
    "priority": 5,
    "routed_dp_rank": 1,
    "data_parallel_rank": 1,
    "disagg_prefill_dp_rank": 1,
    "routing_key": "b",
    "bootstrap_host": "evil",
    "bootstrap_port": 1,
    "bootstrap_room": 1,
    "bootstrap_pair_key": "x",
    "decode_tp_size": 2,
    "http_worker_ipc": "ipc:///tmp/x",
    "kv_hints": {"version": 1},
    "lora_id": "someone's",
    "mm_hashes": ["ff"],
    "need_wait_for_mm_inputs": True,
    "num_items_assigned": {"IMAGE": [1]},
    "encoder_urls": ["http://evil"],
    "positional_embed_overrides": {"embeds": []},
}


@pytest.mark.parametrize("identity", [_A, SYSTEM], ids=["tenant", "operator"])
def test_operator_fields_are_cleared(identity: Identity) -> None:
    request = GenerateReqInput(text="x", **_OPERATOR)
    apply_identity(request, identity)
    assert {name: getattr(request, name) for name in _OPERATOR} == dict.fromkeys(_OPERATOR)


def test_operator_fields_of_embeddings_are_cleared() -> None:
    shared = {name: _OPERATOR[name] for name in ("priority", "routing_key", "lora_id")}
    request = EmbeddingReqInput(text="x", embed_overrides=[[1.0]], **shared)
    apply_identity(request, _A)
    assert [getattr(request, name) for name in (*shared, "embed_overrides")] == [None] * 4


@pytest.mark.parametrize("value", [{"embeds": []}, [], [None], [[1.0]], "x", 0])
def test_tensors_cannot_come_as_json(value: Any) -> None:
    """The scheduler, and with it the server of every tenant, would end on these."""
    assert _generate(positional_embed_overrides=value).positional_embed_overrides is None


def test_tensors_of_sglangs_own_code_are_kept() -> None:
    given = [None, PositionalEmbeds(embeds=[torch.zeros(1, 4)], positions=[0])]
    request = _generate(text=["x", "y"], positional_embed_overrides=given)
    assert request.positional_embed_overrides is given


def test_a_tenant_cannot_leave_the_metrics() -> None:
    assert _generate(log_metrics=False).log_metrics is True
    health = GenerateReqInput(text="x", log_metrics=False)
    apply_identity(health, SYSTEM)
    assert health.log_metrics is False


def test_sessions_are_scoped() -> None:
    request = _generate(session_params={"id": "chat", "rid": "turn", "offset": 3, "replace": None})
    assert request.session_params == {"id": "a/chat", "rid": "a/turn", "offset": 3}
    assert SessionParams(**request.session_params).id == "a/chat"
    assert _generate(session_id="b/chat").session_id == "a/b/chat"


def test_no_store_makes_a_namespace_that_never_comes_again() -> None:
    requests = [GenerateReqInput(text="x", extra_key="k") for _ in range(2)]
    for request in requests:
        apply_identity(request, _NO_STORE)
    first, second = (parse(request.extra_key) for request in requests)
    assert first[:2] == second[:2] == ("t:a", "k")
    assert first.once != second.once
    assert _HEX_ID.fullmatch(first.once)


def test_no_store_is_refused_for_embeddings() -> None:
    with pytest.raises(ValueError, match="no-store"):
        apply_identity(EmbeddingReqInput(text="x"), _NO_STORE)


def test_a_shorter_life_is_refused_for_embeddings() -> None:
    with pytest.raises(ValueError, match="X-KV-TTL"):
        apply_identity(EmbeddingReqInput(text="x"), replace(_A, tag=RequestTag("", 500)))
    apply_identity(EmbeddingReqInput(text="x"), replace(_A, tag=RequestTag("chat")))


def test_the_engine_still_knows_its_health_checks() -> None:
    request = GenerateReqInput(text="x", rid=f"{HEALTH_CHECK_RID_PREFIX}_1")
    apply_identity(request, SYSTEM)
    assert request.rid == f"{HEALTH_CHECK_RID_PREFIX}_1"


def test_no_request_of_a_tenant_is_a_health_check() -> None:
    """The engine drops health checks when it is busy."""
    assert not _generate(rid=f"{HEALTH_CHECK_RID_PREFIX}_1").rid.startswith(HEALTH_CHECK_RID_PREFIX)
    with pytest.raises(PolicyError):
        read_name(f"{HEALTH_CHECK_RID_PREFIX}_1", "tenants")


@pytest.mark.parametrize("rid", ["a/1", ["x", "a/1"]])
def test_the_operator_does_not_become_a_tenant_by_its_id(rid: Any) -> None:
    with pytest.raises(ValueError, match="tenant"):
        apply_identity(EmbeddingReqInput(text=["x", "y"], rid=rid), SYSTEM)


@given(_TENANTS, st.text())
def test_unscope_undoes_scope(tenant: TenantId, client_id: str) -> None:
    identity = Identity(tenant, Owner(f"t:{tenant}"))
    engine_id = identity.scope(client_id)
    assert identity.unscope(engine_id) == client_id
    assert tenant_of_id(engine_id) == tenant


@given(_TENANTS, _TENANTS, st.text())
def test_no_id_of_one_tenant_begins_like_anothers(
    one: TenantId, other: TenantId, client_id: str
) -> None:
    """The engine aborts by prefix."""
    first, second = (Identity(tenant, Owner("t:x")) for tenant in (one, other))
    assert first.scope(client_id).startswith(second.id_prefix) == (one == other)


@given(_TENANTS, st.text(max_size=8))
def test_no_name_that_the_policy_allows_has_a_slash(name: TenantId, text: str) -> None:
    with pytest.raises(PolicyError):
        read_name(f"{name}/{text}", "tenants")


def test_ids_of_the_system() -> None:
    assert SYSTEM.scope("x") == SYSTEM.unscope("x") == "x"
    assert tenant_of_id("x") == SYSTEM_TENANT
    assert SYSTEM.unscope("a/x") == "a/x"


def test_unscope_output() -> None:
    output = {"text": "a/1", "meta_info": {"id": "a/1", "cached_tokens": 0}}
    unscope_output(output, _A)
    assert output == {"text": "a/1", "meta_info": {"id": "1", "cached_tokens": 0}}
    batch = [{"meta_info": {"id": "a/1"}}, {"meta_info": {"id": "b/2"}}, {"meta_info": {}}, {}]
    unscope_output(batch, _A)
    assert batch == [
        {"meta_info": {"id": "1"}},
        {"meta_info": {"id": "b/2"}},
        {"meta_info": {}},
        {},
    ]
