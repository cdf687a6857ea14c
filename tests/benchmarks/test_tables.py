"""The tables of the document come from the result files and from nothing else."""

import json
from pathlib import Path

from benchmarks.rag_chat.table import HEADER, rows
from benchmarks.tables import fill

_HEAD = {
    "command": "python x",
    "date": "2026-11-30T00:00:00",
    "commit": "abc",
    "machine": {"cores": 2, "cpu": "some", "memory_gib": 3},
}


def test_a_table_is_replaced_and_the_text_around_it_stays(tmp_path: Path) -> None:
    bar = {"name": "b", "value": 2.0, "bound": 1.0, "direction": "max", "holds": False}
    (tmp_path / "bench_a.json").write_text(json.dumps(_HEAD | {"bars": [bar]}))
    text = "before\n<!-- table bars -->\nstale\n<!-- end -->\nafter\n"
    filled = fill(text, tmp_path)
    assert filled.startswith("before\n") and filled.endswith("<!-- end -->\nafter\n")
    assert "stale" not in filled
    assert "| b | 2 | <= 1, does NOT hold | `python x`, 2026-11-30, abc |" in filled
    assert fill(filled, tmp_path) == filled


def test_a_missing_result_is_said(tmp_path: Path) -> None:
    filled = fill("<!-- table rag_chat -->\nstale\n<!-- end -->\n", tmp_path)
    assert "Not measured yet" in filled and "stale" not in filled


def test_a_peer_that_did_not_run_is_a_row_with_its_error() -> None:
    (row,) = rows({"peer": {"error": "no driver"}}, ["peer"])
    assert len(row) == len(HEADER)
    assert row[0] == "peer" and row[-1] == "no driver"
