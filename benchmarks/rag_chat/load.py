"""Plays the turns of a workload against one server, closed loop or open loop.

Closed loop: so many clients, each takes the next turn of the list when it has its answer. The order
of the requests is that of the list whatever an engine's speed, so that between two turns of a
conversation every engine sees the same requests: cache figures can be compared, and throughput is
that of equal work. Open loop: each turn comes at its time, ready or not; latencies are those of
people who do not wait for each other.

A conversation grows by the model's own answers.
"""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx

from benchmarks.engines import Engine
from benchmarks.rag_chat.accounts import KnownText
from benchmarks.rag_chat.client import Reply, complete
from sglang_ext.plan.workload import Piece, Turn

__all__ = ["Load", "Request", "tokens_of"]

_IDS = range(1_000, 48_000)
"""Ordinary tokens of the demo model; others would do as well."""


def tokens_of(piece: Piece, seed: int) -> list[int]:
    """Return the token ids of a piece: the same for the same name and seed."""
    draw = random.Random(f"{seed}/{piece.name}")
    return draw.choices(_IDS, k=piece.tokens)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One turn as it went. Times in seconds, the rest in tokens."""

    tenant: str
    conversation: int
    number: int
    start: float
    """Since the beginning of the run."""
    ttft: float = 0.0
    seconds: float = 0.0
    gaps: tuple[float, ...] = ()
    prompt: int = 0
    cached: int = 0
    known: int = 0
    """How much of the prompt the tenant had computed before, when it was sent."""
    output: int = 0
    more_cached_than_sent: int = 0
    """Cached tokens of a text that this tenant never sent: somebody else's, or miscounted."""
    error: str | None = None

    @property
    def recomputed(self) -> int:
        """Tokens that were known and had to be computed again."""
        return max(0, self.known - self.cached)


@dataclass
class _Tenant:
    computed: KnownText = field(default_factory=KnownText)
    sent: KnownText = field(default_factory=KnownText)


class Load:
    """One run. ``on_answer`` is called after each request."""

    def __init__(
        self,
        server: Engine,
        turns: Sequence[Turn],
        seed: int,
        on_answer: Callable[[Request], None] = lambda _: None,
    ) -> None:
        self._server = server
        self._turns = turns
        self._seed = seed
        self._on_answer = on_answer
        self._texts: dict[int, list[int]] = defaultdict(list)
        self._tenants: dict[str, _Tenant] = defaultdict(_Tenant)
        self._answered = {(turn.conversation, turn.number): asyncio.Event() for turn in turns}
        self._begin = 0.0
        self.requests: list[Request] = []

    async def closed(self, clients: int) -> float:
        """Play all turns with so many clients; return the seconds that took."""
        waiting = iter(self._turns)

        async def client(http: httpx.AsyncClient) -> None:
            for turn in waiting:
                await self._play(http, turn)

        return await self._timed(lambda http: [client(http) for _ in range(clients)])

    async def open(self, rate: float) -> float:
        """Play each turn at its time, ``rate`` turns a second in the mean."""

        async def arrive(http: httpx.AsyncClient, turn: Turn) -> None:
            await asyncio.sleep(max(0.0, turn.at / rate - self._now()))
            await self._play(http, turn)

        return await self._timed(lambda http: [arrive(http, turn) for turn in self._turns])

    async def _timed(
        self, jobs: Callable[[httpx.AsyncClient], list[asyncio.Future[None]]]
    ) -> float:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(timeout=600, limits=limits) as http:
            self._begin = time.perf_counter()
            await asyncio.gather(*jobs(http))
            return self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    async def _play(self, http: httpx.AsyncClient, turn: Turn) -> None:
        if turn.number > 0:
            await self._answered[turn.conversation, turn.number - 1].wait()
        text = self._texts[turn.conversation]
        for piece in turn.new:
            text += tokens_of(piece, self._seed)
        request = await self._ask(http, turn, text)
        self.requests.append(request)
        self._answered[turn.conversation, turn.number].set()
        self._on_answer(request)

    async def _ask(self, http: httpx.AsyncClient, turn: Turn, text: list[int]) -> Request:
        tenant, start = self._tenants[turn.tenant], self._now()
        known = tenant.computed.known(text)
        tenant.sent.add(text)
        headers = {"authorization": f"Bearer key-{turn.tenant}"}
        about = {"tenant": turn.tenant, "conversation": turn.conversation, "number": turn.number}
        try:
            reply = await complete(http, self._server.url, headers, text, turn.answer)
        except httpx.HTTPError as error:
            return Request(**about, start=start, error=f"{type(error).__name__}: {error}")
        wrong = _wrong(reply, len(text), turn.answer)
        # Before the answer is added: what came from the cache was sent by now.
        too_many = max(0, reply.cached_tokens - tenant.sent.known(text))
        text += reply.output
        for known_text in (tenant.computed, tenant.sent):
            known_text.add(text[:-1])
        return Request(
            **about,
            start=start,
            ttft=reply.ttft,
            seconds=reply.seconds,
            gaps=tuple(round(gap, 5) for gap in reply.gaps),
            prompt=reply.prompt_tokens,
            cached=reply.cached_tokens,
            known=known,
            output=len(reply.output),
            more_cached_than_sent=too_many,
            error=wrong,
        )


def _wrong(reply: Reply, prompt: int, answer: int) -> str | None:
    """Return what does not agree with our own count."""
    if reply.prompt_tokens != prompt:
        return f"the server counts {reply.prompt_tokens} prompt tokens, we sent {prompt}"
    if len(reply.output) != answer:
        return f"{len(reply.output)} tokens came, {answer} were asked for"
    return None
