"""kill -9 of one tenant's engine under load: who notices, and how long until it serves again.

Two tenants of the shared engine and the dedicated tenant itself send without a pause. Killed are,
each once for every start of the server, the first process of the dedicated engine and its
scheduler. It is back once a request of its tenant is answered.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from engines import Engine, demo_flags, engine
from report import Report, arguments, spread
from sglang_ext.tenancy.keys import digest

_PORT = 31_931
_TOKENS = 20_000
_BAR_S = 60
_LIMIT_S = 240
_BEFORE_S = 10.0
_OTHERS = ("b", "c")


class _Sender(threading.Thread):
    """One tenant, one request after the other; ``failed`` keeps what was not answered whole."""

    def __init__(self, url: str, tenant: str) -> None:
        super().__init__(daemon=True)
        self.failed: list[str] = []
        self.answered: list[tuple[float, float]] = []
        self._url, self._tenant = url, tenant
        self._ended = threading.Event()

    def run(self) -> None:
        """Send until ``end``."""
        with httpx.Client(timeout=_LIMIT_S) as client:
            while not self._ended.is_set():
                begun = time.monotonic()
                problem = _problem(client, self._url, self._tenant)
                now = time.monotonic()
                self.answered.append((now, now - begun))
                self.failed += [] if problem is None else [problem]

    def end(self) -> None:
        """Return once its last request was answered."""
        self._ended.set()
        self.join()


def _problem(client: httpx.Client, url: str, tenant: str) -> str | None:
    """Send one request and return what is wrong with the answer, if anything."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"text": f"{tenant} asks again and again.", "sampling_params": sampling}
    headers = {"authorization": f"Bearer key-{tenant}"}
    try:
        answer = client.post(url + "/generate", json=body, headers=headers)
    except httpx.HTTPError as error:
        return repr(error)
    whole = answer.status_code == 200 and answer.json()["meta_info"]["completion_tokens"] == 8
    return None if whole else f"{answer.status_code} {answer.text}"


@contextmanager
def _sending(url: str, *tenants: str) -> Iterator[list[_Sender]]:
    senders = [_Sender(url, tenant) for tenant in tenants]
    for sender in senders:
        sender.start()
    try:
        yield senders
    finally:
        for sender in senders:
            sender.end()


def _processes(server: Engine) -> list[psutil.Process]:
    """Return the processes of the dedicated engine, the first one first."""
    answer = httpx.get(server.url + "/ext/v1/engines", headers=server.headers)
    (pid,) = [row["pid"] for row in answer.json()["engines"] if row["engine"] == "a"]
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def _scheduler(family: list[psutil.Process]) -> psutil.Process:
    return next(one for one in family if "scheduler" in " ".join(one.cmdline()))


_VICTIMS: dict[str, Callable[[list[psutil.Process]], psutil.Process]] = {
    "first process": lambda family: family[0],
    "scheduler": _scheduler,
}


def _until(condition: Callable[[], bool]) -> None:
    """Return once ``condition`` holds."""
    end = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"the engine was not there after {_LIMIT_S} s")
        time.sleep(0.05)


def _kill(server: Engine, victim: str) -> dict[str, Any]:
    """Kill under load; return seconds until the tenant is served, and how the others fared."""
    with _sending(server.url, *_OTHERS) as others:
        with _sending(server.url, "a") as (own,), httpx.Client(timeout=_LIMIT_S) as client:
            time.sleep(_BEFORE_S)
            before = _times(others)
            killed = time.monotonic()
            _VICTIMS[victim](_processes(server)).kill()
            own.end()
            _until(lambda: _problem(client, server.url, "a") is None)
            back = time.monotonic() - killed
        during = _times(others)[len(before) :]
    return {
        "killed": victim,
        "back_s": back,
        "others_failed": [problem for sender in others for problem in sender.failed],
        "others_served": len(before) + len(during),
        "others_before_s": spread([seconds for _, seconds in before]).median,
        "others_during_s": spread([seconds for _, seconds in during]).median,
    }


def _times(senders: list[_Sender]) -> list[tuple[float, float]]:
    """Return when each answer of all senders came, and how many seconds it took, in order."""
    return sorted(one for sender in senders for one in sender.answered)


def _policy(folder: Path) -> Path:
    own = "isolation: dedicated, gpus: [0]"
    tenants = {"a": own, **dict.fromkeys(_OTHERS, "sla: standard")}
    lines = [
        f'  {name}: {{api_keys: ["{digest(f"key-{name}")}"], {more}}}'
        for name, more in tenants.items()
    ]
    path = folder / "tenants.yaml"
    head = ["version: 1", f'admin_keys: ["{digest("key-admin")}"]', "tenants:"]
    path.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    return path


def _round(folder: Path) -> Iterator[dict[str, Any]]:
    """Start the server, and kill each of the two processes once."""
    flags = ["--tenant-policy", str(_policy(folder)), *demo_flags(_TOKENS)]
    with engine("two", "sglang_ext.launch_server", _PORT, flags, "key-admin") as server:
        for victim in _VICTIMS:
            _until(lambda: httpx.get(server.url + "/ready").status_code == 200)
            yield _kill(server, victim)


def main() -> int:
    """Run the benchmark and return its exit status."""
    options = arguments("bench_restart", __doc__ or "").parse_args()
    report = Report("An engine after kill -9, with others at work")
    for _ in range(1 if options.quick else 3):
        with tempfile.TemporaryDirectory() as folder:
            report.runs += _round(Path(folder))
    for victim in _VICTIMS:
        found = [run["back_s"] for run in report.runs if run["killed"] == victim]
        report.figures[f"{victim} killed: back after, s"] = vars(spread(found))
        report.at_most(f"{victim} killed: back after, at most, s", max(found), _BAR_S)
    for when in ("before", "during"):
        times = [run[f"others_{when}_s"] for run in report.runs]
        report.figures[f"a request of the others, {when}, s"] = vars(spread(times))
    failed = sum(len(run["others_failed"]) for run in report.runs)
    report.figures["requests of the others"] = sum(run["others_served"] for run in report.runs)
    report.at_most("requests of the others that failed", failed, 0)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
