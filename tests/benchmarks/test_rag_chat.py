"""The pure parts of the RAG chat benchmark: accounts, percentiles, cells, and the load itself."""

import asyncio
import json
import random
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engines import Engine
from benchmarks.rag_chat.accounts import KnownText
from benchmarks.rag_chat.cells import Cell, Cells
from benchmarks.rag_chat.intervals import percentile
from benchmarks.rag_chat.load import Load, Request, tokens_of
from benchmarks.rag_chat.summary import of_engine, of_run
from sglang_ext.plan.workload import Piece, RagShape, RagTraffic, rag_turns

_TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def _common(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@given(st.lists(_TEXT, max_size=8), _TEXT)
def test_known_is_the_longest_beginning_of_any_text_before(
    before: list[list[int]], prompt: list[int]
) -> None:
    texts = KnownText()
    for text in before:
        texts.add(text)
    longest = max((_common(text, prompt) for text in before), default=0)
    assert texts.known(prompt) == min(longest, len(prompt) - 1)


def test_percentile_of_known_values() -> None:
    values = [float(number) for number in range(1, 101)]
    assert percentile(values, 0.5).value == 50
    assert percentile(values, 0.99).value == 99
    assert percentile([3.0], 0.99) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_interval_covers_the_true_percentile_as_often_as_it_says(share: float) -> None:
    draw = random.Random(7)
    covered = 0
    for _ in range(400):
        found = percentile([draw.random() for _ in range(200)], share)
        covered += found.low <= share <= found.high
    assert 0.91 <= covered / 400 <= 0.99


def test_cells_outlive_a_cut_and_failed_ones_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    done, failed = Cell("a", 0, "s"), Cell("b", 0, "s")
    cells = Cells(path)
    cells.add(done, {"value": 1})
    cells.add(failed, {"error": "no"})
    with path.open("a") as file:
        file.write('{"engine": "c", "se')
    again = Cells(path)
    assert again.finished(done)
    assert not again.finished(failed)
    assert not again.finished(Cell("a", 1, "s"))
    assert not again.finished(Cell("a", 0, "other"))
    assert [run["value"] for run in again.of("a", "s")] == [1]


class _Cache(BaseHTTPRequestHandler):
    """An engine whose cache keeps the last ``keep`` texts; it answers 7, 7, 7 and so on."""

    keep = 1_000
    lie = 0
    texts: list[list[int]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt, answer = body["prompt"], [7] * body["max_tokens"]
        cached = max((_common(text, prompt[:-1]) for text in self.texts), default=0)
        self.texts[:] = [*self.texts, prompt + answer[:-1]][-self.keep :] if self.keep else []
        usage = {
            "prompt_tokens": len(prompt),
            "prompt_tokens_details": {"cached_tokens": cached + self.lie},
        }
        self.send_response(200)
        self.end_headers()
        for token in answer:
            self._event({"choices": [{"token_ids": [token]}]})
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Engine]:
    _Cache.keep, _Cache.lie, _Cache.texts = 1_000, 0, []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Cache) as http:
        thread = Thread(target=http.serve_forever)
        thread.start()
        yield Engine("fake", f"http://127.0.0.1:{http.server_port}", 0, {})
        http.shutdown()
        thread.join()


_SHAPE = RagShape(system=5, context=8, documents=2, question=3, answer=4, turns=(2, 4))
_TURNS = rag_turns(_SHAPE, RagTraffic(conversations=8, tenants=2, documents=4), seed=3)


def _play(server: Engine, clients: int) -> list[Request]:
    load = Load(server, _TURNS, seed=3)
    asyncio.run(load.closed(clients))
    assert not [request.error for request in load.requests if request.error]
    return load.requests


def test_a_cache_that_keeps_all_recomputes_nothing(server: Engine) -> None:
    requests = _play(server, clients=1)
    assert len(requests) == len(_TURNS)
    assert sum(request.known for request in requests) > 0
    for request in requests:
        assert (request.recomputed, request.more_cached_than_sent) == (0, 0)
        # Every turn but the first has its whole prompt before known, and the answer but its end.
        assert request.known >= (0 if request.number == 0 else request.prompt - 4)


def test_a_cache_that_keeps_nothing_recomputes_all_that_is_known(server: Engine) -> None:
    _Cache.keep = 0
    requests = _play(server, clients=2)
    run = of_run(requests, 2.0, 1.0) | {"seed": 0}
    assert run["recomputed share"] == 1.0
    assert run["output tokens/s"] == 4 * len(_TURNS) / 2.0
    assert sum(tenant["requests"] for tenant in run["tenants"].values()) == len(_TURNS)
    assert of_engine([run, run])["recomputed share of all"] == 1.0


def test_tokens_that_were_never_sent_are_seen(server: Engine) -> None:
    _Cache.lie = 5
    assert sum(request.more_cached_than_sent for request in _play(server, clients=1)) > 0


def test_an_open_loop_plays_every_turn_once(server: Engine) -> None:
    load = Load(server, _TURNS, seed=3)
    asyncio.run(load.open(rate=500.0))
    played = sorted((request.conversation, request.number) for request in load.requests)
    assert played == sorted((turn.conversation, turn.number) for turn in _TURNS)


def test_a_server_that_is_gone_is_an_error_of_each_request() -> None:
    load = Load(Engine("gone", "http://127.0.0.1:9", 0, {}), _TURNS[:1], seed=3)
    asyncio.run(load.closed(1))
    (request,) = load.requests
    assert request.error is not None and "ConnectError" in request.error


def test_pieces_of_one_name_are_equal_and_others_are_not() -> None:
    piece = Piece("document/t0/1", 50)
    assert tokens_of(piece, 1) == tokens_of(piece, 1)
    assert tokens_of(piece, 1) != tokens_of(piece, 2)
    assert tokens_of(piece, 1) != tokens_of(Piece("document/t1/1", 50), 1)
