"""Victim and attacker: two clients of one server, and the prompts that they send."""

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from sglang_ext.errors import ServerError

__all__ = ["Party", "Prompts", "Times", "cached_tokens", "json_of"]

_TIMEOUT_S = 180.0
_SYLLABLES = [
    consonant + vowel + end
    for consonant in "bcdfghjklmnprstvwz"
    for vowel in "aeiou"
    for end in "lmnrst"
]
_FALLBACK_IDS = range(32, 512)


@dataclass(frozen=True)
class Times:
    """Seconds until the first token of an answer, and between the tokens after it."""

    first: float
    gaps: Sequence[float]


class Party:
    """One client with one key; an empty key sends none."""

    def __init__(self, url: str, key: str, timeout_s: float = _TIMEOUT_S) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.url, self.key = url, key
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def send(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Call a route; raises ServerError where nothing answers."""
        try:
            return self._client.request(method, path, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}{path}: {error!r}") from error

    def post(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """Send JSON."""
        return self.send("POST", path, body, headers)

    def get(self, path: str) -> httpx.Response:
        """Fetch a route."""
        return self.send("GET", path)

    def generate(
        self,
        ids: Sequence[int],
        tokens: int = 1,
        headers: Mapping[str, str] | None = None,
        **fields: object,
    ) -> httpx.Response:
        """Call the native route with these token ids."""
        return self.post("/generate", {**_body(ids, tokens), **fields}, headers)

    def warm(self, ids: Sequence[int]) -> None:
        """Have a prompt computed; raises ServerError where it is refused."""
        _expect(self.generate(ids))

    def cached(self, ids: Sequence[int], fields: Mapping[str, object] | None = None) -> int:
        """Return how many tokens of a prompt came from the cache; 0 where it is refused."""
        return cached_tokens(self.post("/generate", {**_body(ids, 1), **(fields or {})}))

    def events(self, ids: Sequence[int], tokens: int, **fields: object) -> Iterator[dict[str, Any]]:
        """Stream an answer, one event a token."""
        body = {**_body(ids, tokens), "stream": True, **fields}
        try:
            with self._client.stream("POST", "/generate", json=body) as response:
                yield from _events(response)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}/generate: {error!r}") from error

    def times(self, ids: Sequence[int], tokens: int) -> Times:
        """Stream an answer and take the time of each token."""
        begin = time.perf_counter()
        stamps = [time.perf_counter() for _ in self.events(ids, tokens)]
        if not stamps:
            raise ServerError(f"{self.url}/generate: the answer had no token")
        gaps = [later - earlier for earlier, later in zip(stamps, stamps[1:], strict=False)]
        return Times(stamps[0] - begin, gaps)

    def name(self) -> str:
        """Return the tenant's name where the server tells, else a guess."""
        response = self.get("/ext/v1/usage")
        if response.status_code == 200:
            tenants = json_of(response).get("tenants")
            if isinstance(tenants, dict) and tenants:
                return str(next(iter(tenants)))
            if isinstance(tenants, list) and tenants:
                return str(tenants[0].get("tenant", "victim"))
        return "victim"


class Prompts:
    """Prompts that nobody has sent before, of exactly so many tokens."""

    def __init__(self, party: Party, seed: int) -> None:
        self._random = random.Random(seed)
        self._ids = _vocabulary(party)

    def ids(self, tokens: int) -> list[int]:
        """Return a fresh prompt as token ids."""
        return self._random.choices(self._ids, k=tokens)

    def text(self, words: int) -> str:
        """Return a fresh prompt as text."""
        return " ".join(self._random.choice(_SYLLABLES) for _ in range(words))

    def word(self) -> str:
        """Return a word that nobody would guess."""
        return "canary" + "".join(self._random.choice("bcdfghjkmnpqrstvwxz") for _ in range(16))

    def shuffled(self, count: int) -> list[int]:
        """Return the numbers below ``count`` in a random order."""
        return self._random.sample(range(count), count)

    def first_is_slow(self) -> bool:
        """Toss a coin."""
        return self._random.random() < 0.5


def cached_tokens(response: httpx.Response) -> int:
    """Return the cached tokens that an answer of the native route reports; 0 for a refusal."""
    if response.status_code != 200:
        return 0
    return int(json_of(response).get("meta_info", {}).get("cached_tokens") or 0)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    if response.status_code != 200:
        response.read()
        _expect(response)
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def json_of(response: httpx.Response) -> dict[str, Any]:
    """Return the object that an answer holds, an empty one where it holds none."""
    try:
        found = response.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _body(ids: Sequence[int], tokens: int) -> dict[str, object]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": list(ids), "sampling_params": sampling}


def _expect(response: httpx.Response) -> None:
    if response.status_code != 200:
        raise ServerError(f"{response.request.url}: {response.status_code}: {response.text[:300]}")


def _vocabulary(party: Party) -> list[int]:
    """Return token ids that the model knows, many of them."""
    response = party.post("/tokenize", {"model": "default", "prompt": " ".join(_SYLLABLES)})
    found = json_of(response).get("tokens") if response.status_code == 200 else None
    return sorted(set(found)) if found else list(_FALLBACK_IDS)
