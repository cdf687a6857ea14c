"""Two tenants for a benchmark: one that converses, one that floods."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from engines import Answer, Engine, ask

__all__ = ["Conversation", "Flood", "Load", "as_tenant", "text", "useful_tokens"]

_WORDS = ("river", "stone", "lamp", "garden", "north", "winter", "paper", "cloud", "bridge", "song")


@dataclass(frozen=True)
class Load:
    """Words of the prompts, tokens of the answers, and how many clients flood.

    Under a flood the quiet tenant thinks between ``think`` seconds, drawn evenly, before each
    message, so that it comes at any moment of a step, and asks for less than half of the engine.
    """

    history: int = 600
    message: int = 400
    turn_tokens: int = 1
    think: tuple[float, float] = (0.4, 1.0)
    flood_clients: int = 6
    flood_prompt: int = 600
    flood_tokens: int = 16


def text(draw: random.Random, words: int) -> str:
    """Return a text of so many words, nearly as many tokens."""
    return " ".join(draw.choice(_WORDS) for _ in range(words))


def as_tenant(server: Engine, tenant: str) -> Engine:
    """Return the engine as ``tenant`` sees it; stock SGLang takes any key."""
    headers = {"authorization": f"Bearer key-{tenant}"}
    return Engine(server.name, server.url, server.pid, headers)


class Conversation:
    """Everything said so far is sent again with each message."""

    def __init__(self, server: Engine, load: Load, draw: random.Random) -> None:
        self._server = as_tenant(server, "quiet")
        self._load = load
        self._draw = draw
        self._said = ""

    def begin(self, client: httpx.Client) -> None:
        """Start anew, with a history that is cached afterwards."""
        self._said = text(self._draw, self._load.history)
        self._say(client)

    def think(self) -> None:
        """Say nothing for a while."""
        time.sleep(self._draw.uniform(*self._load.think))

    def turn(self, client: httpx.Client) -> Answer:
        """Say something and keep the answer."""
        self._said += " " + text(self._draw, self._load.message)
        return self._say(client)

    def _say(self, client: httpx.Client) -> Answer:
        answer = ask(client, self._server, self._said, self._load.turn_tokens)
        self._said += answer.text
        return answer


class Flood:
    """Clients that always have a request with a new prompt in flight."""

    def __init__(self, server: Engine, load: Load, draw: random.Random) -> None:
        self._server = as_tenant(server, "noisy")
        self._load = load
        self._seeds = [draw.random() for _ in range(load.flood_clients)]
        self._stop = threading.Event()
        self._answered = threading.Condition()
        self.answers: list[int] = []
        """Tokens of each answered request, prompt and output."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, the flood runs; each client has had an answer when the block begins."""
        clients = [threading.Thread(target=self._client, args=(seed,)) for seed in self._seeds]
        for client in clients:
            client.start()
        try:
            self.wait(len(clients))
            yield
        finally:
            self._stop.set()
            for client in clients:
                client.join()

    def wait(self, requests: int) -> None:
        """Return once so many more requests have been answered."""
        with self._answered:
            target = len(self.answers) + requests
            self._answered.wait_for(lambda: len(self.answers) >= target)

    def _client(self, seed: float) -> None:
        draw = random.Random(seed)
        with httpx.Client(timeout=600) as client:
            while not self._stop.is_set():
                tokens = self._request(client, text(draw, self._load.flood_prompt))
                with self._answered:
                    self.answers.append(tokens)
                    self._answered.notify_all()

    def _request(self, client: httpx.Client, prompt: str) -> int:
        """Ask for a whole answer, not a stream: the clients take little of the engine's cores."""
        sampling = {"temperature": 0, "max_new_tokens": self._load.flood_tokens, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": sampling}
        url, headers = self._server.url + "/generate", self._server.headers
        answer = client.post(url, json=body, headers=headers)
        answer.raise_for_status()
        meta = answer.json()["meta_info"]
        return int(meta["prompt_tokens"] + meta["completion_tokens"])


def useful_tokens(turns: int, floods: list[int], load: Load) -> int:
    """Return the tokens that had to be computed, once: what was lost and computed again is none."""
    return sum(floods) + turns * (load.message + load.turn_tokens)
