"""What an answer says of itself: cached tokens, on every route, and under a forged identity."""

from collections.abc import Callable, Mapping
from typing import Any

from sglang_ext.audit.party import Party, Prompts, cached_tokens, json_of
from sglang_ext.audit.report import Finding, verdict_of
from sglang_ext.namespace import frame
from sglang_ext.types import Owner

__all__ = ["cached_token_fields", "forged_body", "forged_headers"]

_WORDS = 200
_TOKENS = 96
_CHANCE = 4
"""So many tokens two random prompts may begin with alike."""
_SAMPLING = {"max_new_tokens": 1, "temperature": 0}


def cached_token_fields(victim: Party, attacker: Party, prompts: Prompts) -> Finding:
    """Return the row: does any route count the victim's pages into the attacker's answer?"""
    problems, seeing = [], []
    for name, count in _ROUTES.items():
        # What prompts have in common by themselves, such as a chat template, is no leak.
        count(attacker, prompts.text(_WORDS))
        usual = count(attacker, prompts.text(_WORDS))
        text = prompts.text(_WORDS)
        count(victim, text)
        found = count(attacker, text)
        if found > usual + _CHANCE:
            problems.append(f"{name}: {found} cached tokens of the victim")
        if count(attacker, text) > usual + _CHANCE:
            seeing.append(name)
    detail = f"0 everywhere; the attacker's own are reported by {', '.join(seeing) or 'no route'}"
    return verdict_of("cached-token fields", problems, detail, routes=len(_ROUTES))


def forged_body(victim: Party, attacker: Party, prompts: Prompts, name: str) -> Finding:
    """Return the row: does any field of a body make the attacker into the victim?"""
    problems = []
    for field, value in _forged_fields(name):
        ids = prompts.ids(_TOKENS)
        victim.warm(ids)
        found = attacker.cached(ids, {field: value})
        if found > _CHANCE:
            problems.append(f"{field}: {found} cached tokens of the victim")
    return verdict_of(
        "forged identity in the body", problems[:3], f"{len(_forged_fields(name))} fields, no hit"
    )


def forged_headers(victim: Party, attacker: Party, prompts: Prompts, name: str) -> Finding:
    """Return the row: does any header?"""
    problems = []
    headers = _forged_headers(name)
    for header, value in headers.items():
        ids = prompts.ids(_TOKENS)
        victim.warm(ids)
        found = cached_tokens(attacker.generate(ids, headers={header: value}))
        if found > _CHANCE:
            problems.append(f"{header}: {found} cached tokens of the victim")
    return verdict_of("forged identity in headers", problems[:3], f"{len(headers)} headers, no hit")


def _forged_fields(name: str) -> list[tuple[str, object]]:
    owners = [frame(Owner(f"{kind}:{name}")) for kind in "tsg"]
    return [
        *(("extra_key", value) for value in (*owners, name)),
        ("cache_salt", name),
        ("user", name),
        ("rid", f"{name}/forged"),
        ("routing_key", name),
        ("session_id", f"{name}/forged"),
        ("priority", 2**30),
        ("data_parallel_rank", 0),
    ]


def _forged_headers(name: str) -> Mapping[str, str]:
    return {
        "x-tenant": name,
        "x-tenant-id": name,
        "x-user": name,
        "x-forwarded-user": name,
        "x-session-id": f"{name}/forged",
        "x-custom-labels": f'{{"tenant": "{name}"}}',
        "x-smg-routing-key": name,
    }


def _native(party: Party, text: str) -> int:
    return cached_tokens(party.post("/generate", {"text": text, "sampling_params": _SAMPLING}))


def _details(party: Party, text: str) -> int:
    response = party.post("/generate", {"text": text, "sampling_params": _SAMPLING})
    details = json_of(response).get("meta_info", {}).get("cached_tokens_details") or {}
    return sum(value for value in details.values() if isinstance(value, int))


def _openai(path: str, body: Callable[[str], dict[str, Any]]) -> Callable[[Party, str], int]:
    def count(party: Party, text: str) -> int:
        response = party.post(path, {"model": "default", "max_tokens": 1, **body(text)})
        usage = json_of(response).get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0)

    return count


def _messages(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


_ROUTES: dict[str, Callable[[Party, str], int]] = {
    "/generate": _native,
    "/generate by tier": _details,
    "/v1/completions": _openai("/v1/completions", lambda text: {"prompt": text}),
    "/v1/chat/completions": _openai("/v1/chat/completions", _messages),
    "/v1/messages": _openai("/v1/messages", _messages),
}
