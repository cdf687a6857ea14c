"""What the hooks do, called as SGLang would call them."""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import copy_context
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.namespace import frame, parse
from sglang_ext.patches.scheduler import namespace_hooks
from sglang_ext.patches.tokenizer_manager import RequestFacts, identity_hooks
from sglang_ext.request_tag import NO_TAG, RequestTag, attach, detach
from sglang_ext.tenancy.identity import SYSTEM, Identity, apply_identity, current_identity
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.types import Owner, TenantId

_A = Identity(TenantId("a"), Owner("t:a"))
_B = Identity(TenantId("b"), Owner("t:b"))
_POLICY = parse_policy("version: 1\ntenants: {a: {}, s: {isolation: shared, group: team}}")


class _Observer:
    """Remembers the tenants and outputs that it saw."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @contextmanager
    def request(self, tenant: TenantId) -> Iterator[Callable[[Any], None]]:
        self.seen.append(tenant)
        yield self.seen.append


def _hook(name: str, observer: Any = None) -> Callable[..., Any]:
    """Return the hook function on the method ``name`` of SGLang."""
    found = [*identity_hooks(observer or _Observer()), *namespace_hooks(lambda: _POLICY)]
    return next(hook.function for hook in found if hook.target.endswith(f".{name}"))


def _as(identity: Identity, call: Callable[[], Any]) -> Any:
    """Call in a context of its own, in which ``identity`` makes the request."""
    context = copy_context()
    context.run(current_identity.set, identity)
    return context.run(call)


@pytest.mark.parametrize(
    ("identity", "rid", "sent"),
    [
        (_A, "x", "a/x"),
        (_A, "a/x", "a/x"),
        (_A, "b/x", "a/b/x"),
        (_A, "b/", "a/b/"),
        (_A, "/", "a//"),
        (_A, "", ""),
        (_B, "a/x", "b/a/x"),
        (SYSTEM, "a/x", "a/x"),
        (SYSTEM, "x", "x"),
    ],
)
def test_abort_stays_with_the_caller(identity: Identity, rid: str, sent: str) -> None:
    calls: list[Any] = []

    def original(manager: Any, rid: str, abort_all: bool) -> None:
        calls.append((rid, abort_all))

    _as(identity, lambda: _hook("abort_request")(original, None, rid))
    _as(identity, lambda: _hook("abort_request")(original, None, rid=rid, abort_all=False))
    assert calls == [(sent, False)] * 2


def test_only_the_operator_aborts_all() -> None:
    calls: list[Any] = []
    abort = _hook("abort_request")
    with pytest.raises(ValueError, match="admin"):
        _as(_A, lambda: abort(lambda *args, **kwargs: calls.append(1), None, abort_all=True))
    assert not calls
    _as(SYSTEM, lambda: abort(lambda *args, **kwargs: calls.append(kwargs), None, abort_all=True))
    assert calls == [{"rid": "", "abort_all": True}]


@pytest.mark.parametrize(("rid", "count"), [("one", 1), (["one", "two"], 2)])
def test_fresh_ids_of_samples_are_the_tenants(rid: Any, count: int) -> None:
    request = GenerateReqInput(text="x", rid=rid)
    fresh = _as(_A, lambda: _hook("regenerate_rid")(GenerateReqInput.regenerate_rid, request))
    assert fresh is request.rid
    ids = fresh if isinstance(fresh, list) else [fresh]
    assert len(set(ids)) == count
    assert all(name.startswith("a/") and len(name) == 34 for name in ids)


def test_sessions_are_opened_and_closed_under_the_tenants_name() -> None:
    engine: list[str] = []

    async def opened(manager: Any, obj: Any, request: Any) -> str | None:
        engine.append(obj.session_id)
        return str(obj.session_id)

    async def taken(manager: Any, obj: Any, request: Any) -> str | None:
        return None

    async def closed(manager: Any, obj: Any, request: Any) -> None:
        engine.append(obj.session_id)

    def call(name: str, original: Any, session_id: str | None) -> Any:
        hook, obj = _hook(name), SimpleNamespace(session_id=session_id)
        return _as(_A, lambda: asyncio.run(hook(original, None, obj, None)))

    assert call("open_session", opened, "chat") == "chat"
    assert len(call("open_session", opened, None)) == 32
    assert call("open_session", taken, "chat") is None
    call("close_session", closed, "b/chat")
    assert engine[0] == "a/chat"
    assert engine[1].startswith("a/")
    assert engine[2] == "a/b/chat"


def test_metrics_are_labelled_by_the_id_alone() -> None:
    client = SimpleNamespace(custom_labels={"tenant": "b", "x": "y"})
    state = SimpleNamespace(obj=client, finished=False)
    seen: list[Any] = []
    received = SimpleNamespace(rids=["b/1", "a/2", "3"])
    for index in range(3):
        _hook("collect_metrics")(
            lambda manager, state, recv, i: seen.append(state.obj.custom_labels),
            None,
            state,
            received,
            index,
        )
    assert seen == [{"tenant": "b"}, {"tenant": "a"}, {"tenant": "system"}]


@pytest.mark.parametrize("once", ["", "x"])
@pytest.mark.parametrize("first_token", [0.0, 5.0])
def test_a_finished_request_says_what_only_we_know(once: str, first_token: float) -> None:
    stats = SimpleNamespace(first_token_time=first_token, get_first_token_latency=lambda: 2.0)
    key = frame(Owner("t:a"), "", once)
    client = SimpleNamespace(custom_labels=None, extra_key=key)
    state = SimpleNamespace(obj=client, finished=True, time_stats=stats)
    _hook("collect_metrics")(lambda *_: None, None, state, SimpleNamespace(rids=["a/1"]), 0)
    facts = RequestFacts(may_hit=not once, first_token=2.0 if first_token else None)
    assert client.custom_labels == {"tenant": "a", "facts": facts}


class _Manager:
    """Stands for SGLang's TokenizerManager; ``ended`` is the identity at the clean-up."""

    def __init__(self) -> None:
        self.loop_of: Identity | None = None
        self.ended: Identity | None = None

    def auto_create_handle_loop(self) -> None:
        self.loop_of = current_identity.get()

    async def generate_request(self, obj: Any, request: Any) -> AsyncGenerator[Any, None]:
        try:
            for number in range(3):
                yield {"meta_info": {"id": obj.rid}, "text": str(number)}
        finally:
            self.ended = current_identity.get()


def _generate(manager: _Manager, obj: Any, observer: Any) -> AsyncGenerator[Any, None]:
    hook = _hook("generate_request", observer)
    outputs: AsyncGenerator[Any, None] = hook(_Manager.generate_request, manager, obj, None)
    return outputs


def test_a_request_gets_its_identity_and_its_answers_lose_it() -> None:
    manager, observer = _Manager(), _Observer()
    request = GenerateReqInput(text="x", rid="mine")

    async def scenario() -> list[Any]:
        current_identity.set(_A)
        return [output async for output in _generate(manager, request, observer)]

    outputs = asyncio.run(scenario())
    assert [output["meta_info"]["id"] for output in outputs] == ["mine"] * 3
    assert request.rid == "a/mine"
    assert parse(request.extra_key).owner == "t:a"
    assert observer.seen == ["a", *outputs]
    assert manager.loop_of == SYSTEM, "the output loop of all tenants inherits one's identity"


def test_a_refused_request_never_reaches_the_engine() -> None:
    manager, observer = _Manager(), _Observer()

    async def scenario() -> None:
        current_identity.set(_A)
        async for _ in _generate(manager, GenerateReqInput(text="x", rid=["x", 5]), observer):
            raise AssertionError

    with pytest.raises(ValueError, match="rid"):
        asyncio.run(scenario())
    assert manager.ended is None


def test_an_abandoned_request_ends_as_its_own_tenant() -> None:
    """The garbage collector closes a generator in whatever context it runs in."""
    manager = _Manager()

    async def scenario() -> None:
        current_identity.set(_A)
        outputs = _generate(manager, GenerateReqInput(text="x"), _Observer())
        async with aclosing(outputs):
            await anext(outputs)
            current_identity.set(_B)
        assert current_identity.get() == _B

    asyncio.run(scenario())
    assert manager.ended == _A


def _queued(**fields: Any) -> Any:
    """Return the request as the scheduler's queue receives it."""
    request = SimpleNamespace(
        **{"extra_key": None, "lora_id": None, "skip_radix_cache_insert": False, **fields}
    )
    seen: list[Any] = []
    hook = _hook("_add_request_to_queue")
    hook(lambda *args: seen.append(args), "scheduler", request)
    hook(lambda *args: seen.append(args), "scheduler", request, is_retracted=True)
    assert seen == [("scheduler", request, False), ("scheduler", request, True)]
    return request


@pytest.mark.parametrize(
    ("rid", "owner"),
    [
        ("a/x", "t:a"),
        ("s/x", "g:team"),
        ("x", "t:system"),
        ("nobody/x", "s:nobody"),
        ("a", "t:system"),
        ("/a", "t:system"),
    ],
)
def test_an_embedding_gets_the_owner_of_its_id(rid: str, owner: str) -> None:
    assert parse(_queued(rid=rid).extra_key) == (owner, "", "", "")
    adapted = _queued(rid=rid, extra_key="f" * 32, lora_id="f" * 32)
    assert parse(adapted.extra_key) == (owner, "", "", "f" * 32)


@pytest.mark.parametrize(("level", "owner"), [("private", "t:a"), ("sealed", "s:a")])
def test_the_last_embeddings_of_a_tenant_that_left_belong_to_who_it_was(
    level: str, owner: str
) -> None:
    """They are removed with everything else that it owned."""
    policies = [
        parse_policy(f"version: 1\ntenants: {tenants}")
        for tenants in (f"{{a: {{isolation: {level}}}}}", "{b: {}}")
    ]
    (hook,) = (hook for hook in namespace_hooks(lambda: policies[0]) if "queue" in hook.target)
    keys = []
    for _ in range(3):
        request = SimpleNamespace(extra_key=None, lora_id=None, rid="a/x")
        hook.function(lambda *_: None, "scheduler", request)
        keys.append(parse(request.extra_key).owner)
        policies.reverse()
    assert keys == [owner] * 3


@pytest.mark.parametrize("once", ["", "f" * 32])
def test_a_generation_keeps_its_namespace(once: str) -> None:
    key = frame(Owner("t:a"), "k", once) + "e" * 32
    request = _queued(rid="s/x", extra_key=key, lora_id="e" * 32)
    assert request.extra_key == key
    assert request.skip_radix_cache_insert is bool(once)


def test_the_scheduler_knows_what_the_hook_sets() -> None:
    """On SGLang's own request: it appends the adapter's id, and can be kept out of the tree."""
    key = frame(Owner("t:a"))
    request = Req("a/x", "", array("q", [1]), SamplingParams(), lora_id="f" * 32, extra_key=key)
    assert parse(request.extra_key) == ("t:a", "", "", "f" * 32)
    assert request.skip_radix_cache_insert is False


def test_the_tag_of_a_request_comes_off_before_its_key_is_used() -> None:
    tag, key = RequestTag("chat", 500), frame(Owner("t:a"), "k")

    def original(scheduler: Any, received: Any, *args: Any, **kwargs: Any) -> Req:
        return Req("a/x", "", array("q", [1]), SamplingParams(), **kwargs)

    create = _hook("_create_generation_req")
    tagged = create(original, None, None, lora_id="e" * 32, extra_key=attach(tag, key))
    assert (tagged.kv_tag, tagged.extra_key) == (tag, key + "e" * 32)
    plain = create(original, None, None, extra_key=key)
    assert (plain.kv_tag, plain.extra_key) == (NO_TAG, key)


def test_every_part_of_a_batch_carries_the_tag() -> None:
    request = GenerateReqInput(text=["x", "y"], extra_key=["k", "l"])
    apply_identity(request, replace(_A, tag=RequestTag("chat")))
    request.normalize_batch_and_arguments()
    assert [detach(request[part].extra_key)[0].session for part in range(2)] == ["chat", "chat"]
