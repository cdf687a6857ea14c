"""Reaching for what the victim has running or cached: its requests, sessions and pages."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sglang_ext.audit.party import Party, Prompts, json_of
from sglang_ext.audit.report import Finding, not_run, verdict_of
from sglang_ext.errors import ServerError

__all__ = ["deadly_requests", "foreign_abort", "foreign_flush", "foreign_session"]

_ANSWER = 64
_PROMPT = 32
_WAIT_S = 120
_DEADLY_S = 20.0
_DEADLY: dict[str, dict[str, object]] = {
    "a token id beyond the vocabulary": {"input_ids": [10**9]},
    "a token id below 0": {"input_ids": [-1]},
    "labels for metrics": {"text": "x", "custom_labels": {"tenant": "x"}},
    "too long a prompt": {"text": "x " * 200_000},
}


class _Running:
    """An answer of the victim that streams while the attacker acts."""

    def __init__(self, victim: Party, ids: list[int], rid: str) -> None:
        self._began = threading.Event()
        self.last: dict[str, Any] = {}
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._run, args=(victim, ids, rid), daemon=True)
        self._thread.start()

    def wait_for_first_token(self) -> None:
        self._began.wait(_WAIT_S)

    def end(self) -> str | None:
        """Wait for the end; return what is wrong with it."""
        self._thread.join(_WAIT_S)
        if self.problem is not None:
            return self.problem
        meta = self.last.get("meta_info", {})
        reason = (meta.get("finish_reason") or {}).get("type")
        if reason == "length" and meta.get("completion_tokens") == _ANSWER:
            return None
        return f"ended by {reason or 'nothing'} after {meta.get('completion_tokens', 0)} tokens"

    def _run(self, victim: Party, ids: list[int], rid: str) -> None:
        try:
            for event in victim.events(ids, _ANSWER, rid=rid):
                self.last = event
                self._began.set()
        except ServerError as error:
            self.problem = str(error)
        finally:
            self._began.set()


def foreign_abort(victim: Party, attacker: Party, prompts: Prompts, name: str) -> Finding:
    """Return the row: can the attacker end a request whose id it knows, or that it can guess?"""
    attack, problems = "abort of a foreign request", []
    for how, body in _aborts(name):
        rid = prompts.word()
        running = _Running(victim, prompts.ids(_PROMPT), rid)
        running.wait_for_first_token()
        attacker.post("/abort_request", body(rid))
        problem = running.end()
        if problem is not None:
            problems.append(f"{how}: the victim's answer {problem}")
    return verdict_of(attack, problems, "by its id, by a guessed prefix, and of all: none ended")


def _aborts(name: str) -> list[tuple[str, Callable[[str], dict[str, object]]]]:
    return [
        ("by id", lambda rid: {"rid": rid}),
        ("by name and id", lambda rid: {"rid": f"{name}/{rid}"}),
        ("by prefix", lambda rid: {"rid": ""}),
        ("all", lambda rid: {"abort_all": True}),
    ]


def deadly_requests(victim: Party, attacker: Party, prompts: Prompts) -> Finding:
    """Return the row: is there a request after which the server answers nobody?

    To be made last: where it succeeds, nothing is left to attack.
    """
    attack, problems = "requests that stop the server", []
    impatient = [Party(one.url, one.key, _DEADLY_S) for one in (victim, attacker)]
    for what, fields in _DEADLY.items():
        with suppress(ServerError):
            impatient[1].post("/generate", {**fields, "sampling_params": {"max_new_tokens": 1}})
        try:
            impatient[0].warm(prompts.ids(_PROMPT))
        except ServerError:
            problems.append(f"{what}: the victim is not answered any more")
            break
    for one in impatient:
        one.close()
    return verdict_of(attack, problems, f"{len(_DEADLY)} tried, the victim is answered")


def foreign_session(victim: Party, attacker: Party, prompts: Prompts) -> Finding:
    """Return the row: can the attacker continue, list or close the victim's conversation?"""
    attack, session, rid = "foreign session", prompts.word(), prompts.word()
    opened = victim.post("/open_session", {"capacity_of_str_len": 10_000, "session_id": session})
    ids = prompts.ids(_PROMPT)
    first = victim.generate(ids, rid=rid, session_params={"id": session})
    victim.generate(ids, headers={"x-session-id": session})
    if opened.status_code != 200 or first.status_code != 200:
        return not_run(attack, f"the server opens no sessions ({opened.status_code})")
    last_rid = json_of(first).get("meta_info", {}).get("id", rid)
    problems = _continued(attacker, prompts, session, last_rid)
    listed = attacker.get("/ext/v1/sessions")
    if listed.status_code == 200 and session in listed.text:
        problems.append("it is listed")
    problems += _told_apart(attacker, prompts, session)
    attacker.post("/close_session", {"session_id": session})
    attacker.send("DELETE", f"/ext/v1/sessions/{session}")
    again = victim.generate(prompts.ids(4), session_params={"id": session, "rid": last_rid})
    if not _goes_on(again, _PROMPT):
        problems.append("it was closed")
    victim.post("/close_session", {"session_id": session})
    return verdict_of(attack, problems, "not continued, listed, told apart from none, or closed")


def _continued(attacker: Party, prompts: Prompts, session: str, rid: str) -> list[str]:
    stolen = attacker.generate(prompts.ids(4), session_params={"id": session, "rid": rid})
    return ["it was continued, with the victim's text"] if _goes_on(stolen, _PROMPT) else []


def _goes_on(response: Any, tokens: int) -> bool:
    meta = json_of(response).get("meta_info", {})
    ended = (meta.get("finish_reason") or {}).get("type")
    return response.status_code == 200 and ended != "abort" and meta["prompt_tokens"] > tokens


def _told_apart(attacker: Party, prompts: Prompts, session: str) -> list[str]:
    """Say where a session of the victim is answered in other words than one that never was."""
    other, found = prompts.word(), []
    for method, path in (("DELETE", "/ext/v1/sessions/{}"), ("POST", "/ext/v1/sessions/{}/pause")):
        answers = [
            (answer.status_code, answer.text.replace(id, ""))
            for id in (session, other)
            for answer in [attacker.send(method, path.format(id), {})]
        ]
        if answers[0] != answers[1]:
            found.append(f"{method} tells it from one that never was")
    return found


def foreign_flush(victim: Party, attacker: Party, prompts: Prompts, name: str) -> Finding:
    """Return the row: can the attacker remove the victim's pages?"""
    attack, problems = "flush", []
    ids = prompts.ids(4 * _PROMPT)
    victim.warm(ids)
    if not victim.cached(ids):
        return not_run(attack, "the victim's own prompt does not stay cached")
    ways = _flushes(name, ids)
    for method, path, body in ways:
        status = attacker.send(method, path, body).status_code
        if not victim.cached(ids):
            problems.append(f"{method} {path} ({status}) removed the victim's pages")
    return verdict_of(attack, problems, f"{len(ways)} ways, the victim's pages stay")


def _flushes(name: str, ids: list[int]) -> list[tuple[str, str, object]]:
    bodies = [
        *({}, {"all": True}, {"tenant": name}, {"tenant": [name]}),
        *({"prefix": ids}, {"tenant": name, "prefix": ids}),
    ]
    return [
        ("POST", "/flush_cache", None),
        ("GET", "/flush_cache", None),
        *(("POST", "/ext/v1/flush", body) for body in bodies),
        ("DELETE", f"/ext/v1/tenants/{name}", None),
    ]
