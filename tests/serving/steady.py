"""Tenants that send without a pause, while something happens to an engine of theirs or others'."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import psutil

from tests.serving.prompts import unique_prompt
from tests.serving.server import Client

__all__ = ["BACK_SECONDS", "Steady", "engines", "scheduler_in", "serves_again", "until"]

# A minute is the promise (bench_restart.py measures it); a test leaves room for a slower machine.
BACK_SECONDS = 120
_TOKENS = 8


class Steady:
    """Sends one request after the other; what was not answered whole is kept in ``failed``."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.stopped = False
        self.served: Counter[str] = Counter()
        self.failed: list[str] = []

    async def run(self, client: httpx.AsyncClient, tenant: str, session: str | None = None) -> None:
        """Send as ``tenant`` until ``stopped``; every second answer is streamed."""
        headers = {"authorization": f"Bearer key-{tenant}"}
        headers |= {} if session is None else {"x-session-id": session}
        while not self.stopped:
            number = self.served[tenant]
            sampling = {"temperature": 0, "max_new_tokens": _TOKENS, "ignore_eos": True}
            text = f"{unique_prompt(f'load {tenant}', 40)} {number % 5}"
            body = {"text": text, "stream": bool(number % 2), "sampling_params": sampling}
            try:
                answer = await client.post(f"{self.url}/generate", json=body, headers=headers)
            except httpx.HTTPError as error:
                self.failed.append(f"{tenant}: {error!r}")
            else:
                whole = answer.status_code == 200 and _tokens(answer.text) == _TOKENS
                self.served[tenant] += whole
                self.failed += [] if whole else [f"{tenant}: {answer.status_code} {answer.text}"]


def _tokens(text: str) -> int:
    events = [line.removeprefix("data: ") for line in text.splitlines() if "meta_info" in line]
    return int(json.loads(events[-1])["meta_info"]["completion_tokens"])


def engines(admin: Client) -> dict[str, dict[str, Any]]:
    """Return the operator's list of engines by name."""
    return {row["engine"]: row for row in admin.get("/ext/v1/engines").json()["engines"]}


def scheduler_in(family: list[psutil.Process]) -> psutil.Process:
    """Return the scheduler among the processes of one engine."""
    return next(one for one in family if "scheduler" in " ".join(one.cmdline()))


async def until(condition: Callable[[], bool]) -> None:
    """Return once ``condition`` holds; fail where it takes too long."""
    end = time.monotonic() + BACK_SECONDS
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


def serves_again(client: Client) -> None:
    """Return once the client's engine answers; until then it must say that it is not there."""
    end = time.monotonic() + BACK_SECONDS
    while True:
        answer = client.post("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 1}})
        if answer.status_code == 200:
            return
        assert answer.status_code in (502, 503), answer.text
        assert time.monotonic() < end
        time.sleep(0.2)
