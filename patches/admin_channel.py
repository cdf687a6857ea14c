"""How the HTTP process asks the scheduler something: over SGLang's debug channel.

SGLang has one request type that carries a name and free JSON to every scheduler and brings JSON
back. Names that begin with ``sglang_ext/`` are ours; the route that would let a client send one
needs the admin key, like every operator's route. Here, too, is what we ask the engine to do for a
client: to tokenize, and to bring a text up.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sglang_ext.patches.hooks import Hook
from sglang_ext.tenancy.identity import Identity, current_identity

__all__ = ["Operation", "admin_channel_hooks", "ask_schedulers", "replay", "tokenize"]

Operation = Callable[[Any, Mapping[str, Any]], dict[str, Any]]
"""Takes the scheduler and the request's JSON, returns JSON; ValueError refuses the request."""

_PREFIX = "sglang_ext/"
_PLACES = {"hbm": "device", "cpu": "host", "nvme": "storage"}
_TARGET = "sglang.srt.managers.scheduler.Scheduler.handle_dumper_control"


def admin_channel_hooks(operations: Mapping[str, Operation]) -> list[Hook]:
    """Return the hook that runs ``operations`` by name in the scheduler's process."""

    def handle(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
        if not recv_req.method.startswith(_PREFIX):
            return original(scheduler, recv_req)
        name = recv_req.method.removeprefix(_PREFIX)
        reply = _run(operations, name, scheduler, recv_req.body)
        return scheduler.ipc_channels.send_to_tokenizer.send_output(reply, recv_req)

    return [Hook(_TARGET, handle, ("self", "recv_req"))]


async def ask_schedulers(name: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Run operation ``name`` in every scheduler; one answer for each data-parallel rank.

    Raises ValueError with the operation's words when it refused.
    """
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import DumperControlReqInput

    manager = get_global_state().tokenizer_manager
    request = DumperControlReqInput(method=_PREFIX + name, body=body)
    replies = await manager.dumper_control(request)
    for reply in replies:
        if not reply.success:
            raise ValueError(reply.error)
    return [reply.response[0] for reply in replies]


async def tokenize(text: str) -> list[int]:
    """Return the tokens of ``text`` as those of a completion's prompt.

    Raises ValueError where the server has no tokenizer.
    """
    from sglang.srt.entrypoints.http_server import get_global_state

    tokens, _ = await get_global_state().tokenizer_manager._tokenize_texts(text)
    return list(tokens)


async def replay(
    token_ids: list[int], client_key: str, cache_salt: str | None, identity: Identity
) -> dict[str, int]:
    """Send a request of ``identity`` for this text that generates nothing, and wait for it.

    Its pages are in HBM afterwards; returns where its tokens were before. Raises ValueError when
    the engine refuses it.
    """
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        input_ids=token_ids,
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        extra_key=client_key,
        cache_salt=cache_salt,
    )
    token = current_identity.set(identity)
    try:
        manager = get_global_state().tokenizer_manager
        outputs = [output async for output in manager.generate_request(request)]
    finally:
        current_identity.reset(token)
    meta = outputs[-1]["meta_info"]
    found = meta.get("cached_tokens_details") or {"device": meta["cached_tokens"]}
    where = {f"{tier}_tokens": found.get(place, 0) for tier, place in _PLACES.items()}
    return {**where, "computed_tokens": len(token_ids) - meta["cached_tokens"]}


def _run(
    operations: Mapping[str, Operation], name: str, scheduler: Any, body: Mapping[str, Any]
) -> Any:
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    try:
        if name not in operations:
            raise ValueError(f"{name}: no such operation, expected one of {sorted(operations)}")
        answer = operations[name](scheduler, body)
    except ValueError as error:
        return DumperControlReqOutput(success=False, response=[], error=str(error))
    return DumperControlReqOutput(success=True, response=[answer])
