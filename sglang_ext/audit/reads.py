"""What a server tells to who asks: metrics, errors, settings, and answers without a key."""

import re
from collections.abc import Callable

from sglang_ext.audit.party import Party, Prompts, json_of
from sglang_ext.audit.report import Finding, verdict_of

__all__ = ["error_texts", "metrics", "no_key", "policy_reads"]

_SAMPLE = re.compile(r"^([a-zA-Z_:][^ ]*(?:\{.*\})?) (\S+)$", re.M)
_ADMIN = (
    ("GET", "/ext/v1/policy"),
    ("GET", "/ext/v1/tenants/{name}"),
    ("PUT", "/ext/v1/policy"),
    ("GET", "/ext/v1/tree"),
    ("GET", "/ext/v1/overview"),
    ("GET", "/ext/v1/usage/export"),
    ("GET", "/server_info"),
    ("GET", "/get_server_info"),
    ("GET", "/get_load"),
    ("GET", "/v1/loads"),
)
_CLOSED = {401, 403, 404, 405}


def metrics(victim: Party, attacker: Party, prompts: Prompts) -> Finding:
    """Return the row: do metrics that the attacker can read move with the victim's requests?"""
    attack = "metrics"
    first = attacker.get("/metrics")
    if first.status_code != 200:
        return verdict_of(attack, [], f"refused ({first.status_code})")
    before = _samples(attacker.get("/metrics").text)
    idle = _moved(before, _samples(attacker.get("/metrics").text))
    victim.warm(prompts.ids(64))
    after = _samples(attacker.get("/metrics").text)
    moved = sorted(_moved(before, after) - idle)
    names = [series.partition("{")[0] for series in moved[:1]]
    problems = [f"{len(moved)} series moved with the victim, such as {name}" for name in names]
    return verdict_of(attack, problems, "readable, but nothing in them moves with the victim")


def error_texts(victim: Party, attacker: Party, prompts: Prompts, name: str) -> Finding:
    """Return the row: does a refusal repeat the victim's text or name, or tell that an id is used?

    An id of a request is used while the victim's answer streams.
    """
    secret, rid = prompts.word(), prompts.word()
    victim.post("/generate", {"text": secret * 8, "sampling_params": {"max_new_tokens": 1}})
    problems = []
    for body in _bad_bodies(attacker):
        text = body()
        if secret in text:
            problems.append("a refusal repeats the victim's text")
        if re.search(rf"\b[tsg]:{re.escape(name)}\b", text):
            problems.append("a refusal names the victim")
    if _used_id_shows(victim, attacker, prompts, rid):
        problems.append("an id that the victim uses is refused, another is not")
    return verdict_of("error texts", problems, "no text, name or id of the victim in a refusal")


def no_key(url: str, prompts: Prompts) -> Finding:
    """Return the row: is anybody served without a key?"""
    stranger = Party(url, "")
    try:
        status = stranger.generate(prompts.ids(8)).status_code
    finally:
        stranger.close()
    problems = ["it is answered"] if status == 200 else []
    return verdict_of("request without a key", problems, f"refused ({status})")


def policy_reads(attacker: Party, name: str) -> Finding:
    """Return the row: does a tenant's key read, or change, what is the operator's?"""
    problems = []
    for method, path in _ADMIN:
        place = path.format(name=name)
        response = attacker.send(method, place, "not a policy" if method == "PUT" else None)
        if response.status_code not in _CLOSED:
            problems.append(f"{method} {place} ({response.status_code})")
    usage = attacker.get("/ext/v1/usage")
    if usage.status_code == 200 and name in str(json_of(usage).get("tenants")):
        problems.append("/ext/v1/usage shows the victim")
    return verdict_of("policy and state reads", problems, f"{len(_ADMIN)} routes refused")


def _samples(text: str) -> dict[str, str]:
    return dict(_SAMPLE.findall(text))


def _moved(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name, value in after.items() if before.get(name) != value}


def _bad_bodies(attacker: Party) -> list[Callable[[], str]]:
    bodies: list[object] = [
        {},
        {"text": 5},
        {"text": "x", "sampling_params": {"temperature": "hot"}},
        {"text": "x", "session_params": {"id": "nobody"}},
        {"text": "x " * 200_000},
        [],
    ]

    def ask(path: str, body: object) -> Callable[[], str]:
        return lambda: attacker.post(path, body).text

    found = [ask("/generate", body) for body in bodies]
    found += [ask(path, {"model": "nobody"}) for path in ("/v1/completions", "/v1/messages")]
    return [*found, lambda: attacker.get("/nowhere").text]


def _used_id_shows(victim: Party, attacker: Party, prompts: Prompts, rid: str) -> bool:
    stream = victim.events(prompts.ids(16), 48, rid=rid)
    next(stream)
    used = attacker.generate(prompts.ids(8), rid=rid).status_code
    fresh = attacker.generate(prompts.ids(8), rid=prompts.word()).status_code
    for _ in stream:
        pass
    return used != fresh
