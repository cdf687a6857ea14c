"""Traces and workloads as rows of blocks: equal beginnings share them, bad files are named."""

from pathlib import Path

import pytest

from sglang_ext.errors import PlanError
from sglang_ext.plan.requests import azure_requests, mooncake_requests, rag_requests
from sglang_ext.plan.workload import RagShape, RagTraffic, rag_turns

_SHAPE = RagShape(system=20, context=40, documents=2, question=10, answer=20)


def test_a_turn_begins_with_all_that_was_said() -> None:
    turns = rag_turns(_SHAPE, RagTraffic(conversations=20), 0)
    said: dict[int, list[int]] = {}
    for request in rag_requests(turns, 2.0, 10):
        before = said.get(request.conversation, [])
        assert list(request.blocks[: len(before)]) == before
        assert request.prompt == len(request.blocks) * 10
        said[request.conversation] = list(request.blocks + request.answer_blocks)


def test_a_mooncake_trace_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]}\n'
        '{"timestamp": 2500, "input_length": 1100, "output_length": 6, "hash_ids": [0, 7, 8]}\n'
    )
    first, second = mooncake_requests(path, tenants=4)
    assert (second.at, second.prompt, second.answer, list(second.blocks)) == (
        2.5,
        1100,
        6,
        [0, 7, 8],
    )
    assert first.tenant == second.tenant == "t3"
    assert first.conversation != second.conversation


def test_an_azure_trace_gives_its_arrivals_and_answers(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,396,109\n"
    )
    turns = rag_turns(_SHAPE, RagTraffic(conversations=20), 0)
    found = list(azure_requests(path, turns, 10))
    assert [(request.at, request.answer) for request in found] == [(0.0, 44), (4.0, 109)]


@pytest.mark.parametrize("line", ["{}", "no json", '{"timestamp": 0}', "[]"])
def test_another_file_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(PlanError, match=r"trace\.jsonl:1"):
        list(mooncake_requests(path))
