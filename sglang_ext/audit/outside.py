"""What lies beside the HTTP routes: the stream of KV events, and the files of the NVMe tier."""

import stat
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_ext.audit.party import Party, Prompts
from sglang_ext.audit.report import Finding, not_run, verdict_of

__all__ = ["kv_events", "nvme_files"]

_TOKENS = 160
_RUN = 8
"""So many token ids in a row are no chance."""
_QUIET_S = 1.5
_FILES_S = 10.0


def kv_events(victim: Party, attacker: Party, prompts: Prompts, endpoint: str | None) -> Finding:
    """Return the row: does the stream hold the victim's text without saying whose it is?

    Both send the same prompt; whoever listens must not be able to take the two for one.
    """
    attack = "KV events"
    if endpoint is None:
        return not_run(attack, "no --kv-events ADDRESS given")
    ids = prompts.ids(_TOKENS)
    with _Listener(endpoint) as listener:
        if not listener.hears(attacker, prompts):
            return not_run(attack, f"nothing comes from {endpoint}")
        victim.warm(ids)
        victims = _owners_of(listener.rest(), ids)
        attacker.warm(ids)
        attackers = _owners_of(listener.rest(), ids)
    problems = []
    if None in victims:
        problems.append("the victim's tokens are in it, and nobody is named as their owner")
    if victims & attackers - {None}:
        problems.append("the same prompt of both has one owner")
    named = f"named as that of {', '.join(map(str, victims))}" if victims else "not in it"
    return verdict_of(attack, problems, f"the victim's text is {named}")


def nvme_files(victim: Party, prompts: Prompts, folder: Path | None) -> Finding:
    """Return the row: do the files of the NVMe tier hold the victim's text or token ids?

    Also whether other users of the machine could read them.
    """
    attack = "files of the NVMe folder"
    if folder is None:
        return not_run(attack, "no --nvme-dir given")
    if not folder.is_dir():
        return not_run(attack, f"{folder} is no folder")
    ids, text = prompts.ids(_TOKENS), prompts.word() * 8
    victim.warm(ids)
    victim.post("/generate", {"text": text, "sampling_params": {"max_new_tokens": 1}})
    time.sleep(_FILES_S)
    patterns = {"token ids": _as_bytes(ids, "i"), "token ids (64 bits)": _as_bytes(ids, "q")}
    patterns["text"] = text.encode()
    problems, count = [], 0
    for path in (path for path in folder.rglob("*") if path.is_file()):
        count += 1
        found = [what for what, pattern in patterns.items() if _in_file(path, pattern)]
        problems += [f"{path.name} holds the victim's {what}" for what in found]
        if _is_open(path, folder):
            problems.append(f"{path.name} can be read by other users")
    if not count:
        return not_run(attack, f"{folder} has no files")
    return verdict_of(attack, problems[:3], f"{count} files, none tells or can be read by others")


class _Listener:
    """Subscribes to SGLang's KV events."""

    def __init__(self, endpoint: str) -> None:
        import zmq

        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)

    def __enter__(self) -> "_Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(0)

    def hears(self, party: Party, prompts: Prompts) -> bool:
        """Wait until the subscription is in force: something comes of what ``party`` sends."""
        for _ in range(5):
            party.warm(prompts.ids(_TOKENS))
            if self.rest():
                return True
        return False

    def rest(self) -> list[dict[str, Any]]:
        """Return all events until none comes for a while."""
        events: list[dict[str, Any]] = []
        while self._socket.poll(int(_QUIET_S * 1000)):
            events += _decoded(self._socket.recv_multipart()[-1])
        return events


def _decoded(frame: bytes) -> list[dict[str, Any]]:
    """Return the events of a batch, which is ``[time, events, rank]``."""
    import msgspec

    try:
        batch = msgspec.msgpack.decode(frame)
    except msgspec.DecodeError:
        return []
    events = batch[1] if isinstance(batch, list) and len(batch) > 1 else []
    return [event for event in events if isinstance(event, dict)]


def _owners_of(events: Sequence[dict[str, Any]], ids: Sequence[int]) -> set[str | None]:
    """Return under which namespaces a run of ``ids`` was stored; None: under no name."""
    stored: dict[str | None, list[int]] = {}
    for event in events:
        stored.setdefault(event.get("cache_salt"), []).extend(event.get("token_ids") or ())
    runs = {tuple(ids[at : at + _RUN]) for at in range(len(ids) - _RUN + 1)}
    return {
        owner
        for owner, tokens in stored.items()
        if any(tuple(tokens[at : at + _RUN]) in runs for at in range(len(tokens) - _RUN + 1))
    }


def _is_open(path: Path, top: Path) -> bool:
    """Tell whether other users of the machine may read a file, by all folders from ``top`` on."""
    folders = [folder for folder in path.parents if folder.is_relative_to(top)]
    return any(
        path.stat().st_mode & read and all(folder.stat().st_mode & enter for folder in folders)
        for read, enter in ((stat.S_IRGRP, stat.S_IXGRP), (stat.S_IROTH, stat.S_IXOTH))
    )


def _as_bytes(ids: Sequence[int], code: str) -> bytes:
    return array(code, ids[:_RUN]).tobytes()


def _in_file(path: Path, pattern: bytes) -> bool:
    try:
        return pattern in path.read_bytes()
    except OSError:
        return False
