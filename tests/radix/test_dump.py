"""The picture of the tree: complete, paged, and without anybody's text."""

import json
from collections.abc import Mapping, Sequence

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams

from sglang_ext.radix.drawing import draw
from sglang_ext.radix.dump import dump
from sglang_ext.types import Owner, Tier
from tests.radix.caches import Rig, make_rig

PROMPT = [7] * 8


def make_tree() -> Rig:
    rig = make_rig(256, 4, [PROMPT])
    rig.insert(PROMPT + [31337] * 8, "t:a")
    rig.core.clock.now_ms += 5_000
    rig.insert(PROMPT + [31337] * 4, "t:b")
    return rig


def test_every_run_is_shown_with_what_is_known_of_it() -> None:
    rig = make_tree()
    node = rig.match(PROMPT + [31337] * 4, "t:b").last_device_node
    rig.core.pin(node)
    shown = dump(rig.cache)
    assert (shown["page"], shown["pages"], shown["runs_total"]) == (0, 1, 3)
    public, first, second = shown["runs"]
    assert {key: public[key] for key in ("level", "start", "tokens", "owner", "age_ms")} == {
        "level": 0,
        "start": 0,
        "tokens": 8,
        "owner": "",
        "age_ms": 0,
    }
    assert public["hits"] == 0
    assert public["locks"] == 1
    assert (first["owner"], first["level"], first["start"]) == ("t:a", 1, 8)
    assert (first["age_ms"], first["tiers"], first["pins"]) == (5_000, ["hbm"], 0)
    assert (second["owner"], second["pins"], second["locks"]) == ("t:b", 1, 1)


def test_hits_count_the_requests_that_came_back() -> None:
    rig = make_tree()
    slots = rig.alloc(12)
    for _ in range(2):
        rig.cache.insert(insert_params(rig, slots))
    assert [run["hits"] for run in dump(rig.cache)["runs"]] == [2, 0, 2]


def insert_params(rig: Rig, slots: torch.Tensor) -> InsertParams:
    key = rig.key(PROMPT + [31337] * 4, "t:b")
    return InsertParams(key=key, value=slots, prev_prefix_len=12)


def test_pages_put_together_are_the_whole() -> None:
    rig = make_tree()
    whole = dump(rig.core)["runs"]
    pages = [dump(rig.core, page, limit=2) for page in range(2)]
    assert [run for page in pages for run in page["runs"]] == whole
    assert [page["pages"] for page in pages] == [2, 2]
    assert dump(rig.core, 7, limit=2)["runs"] == []


def test_the_dump_is_json_without_text_and_changes_nothing() -> None:
    rig = make_tree()
    before = json.dumps(dump(rig.cache))
    assert json.dumps(dump(rig.cache)) == before
    assert "31337" not in before


def test_an_empty_tree_has_no_pages() -> None:
    assert dump(make_rig(64, 4).cache) == {
        "page": 0,
        "pages": 0,
        "runs_total": 0,
        "runs": [],
        "lower": [],
    }


class Disk:
    """A lower tier that holds some pages by name."""

    def __init__(self, pages: set[tuple[str, str]]) -> None:
        self.pages = pages

    def holds(self, owner: Owner, hashes: Sequence[str]) -> list[bool]:
        return [(owner, name) in self.pages for name in hashes]

    def held_bytes(self) -> Mapping[Owner, int]:
        return {Owner(owner): 100 for owner, _ in self.pages}


def test_runs_say_how_much_of_them_a_lower_tier_holds() -> None:
    rig = make_tree()
    rig.core.backfill_missing_hash_values()
    public, first, second = (rig.core.node_by_id(run["id"]) for run in dump(rig.core)["runs"])
    pages = {("", name) for name in public.hash_value} | {("t:a", first.hash_value[0])}
    shown = dump(rig.core, lower={Tier.NVME: Disk(pages)})
    assert [run["tiers"] for run in shown["runs"]] == [["hbm", "nvme"], ["hbm", "nvme"], ["hbm"]]
    assert [run["stored"] for run in shown["runs"]] == [{"nvme": 8}, {"nvme": 4}, {}]
    assert shown["lower"] == [
        {"tier": "nvme", "owner": "", "bytes": 100},
        {"tier": "nvme", "owner": "t:a", "bytes": 100},
    ]
    # A page of one owner's name is nothing to another.
    mine = {("t:b", first.hash_value[0]), ("t:a", second.hash_value[0])}
    assert [run["stored"] for run in dump(rig.core, lower={Tier.NVME: Disk(mine)})["runs"]] == [
        {},
        {},
        {},
    ]
    drawn = draw(shown).splitlines()
    assert "hbm+nvme · " in drawn[0]
    assert "hbm+nvme (4 of 8) · " in drawn[1]


def test_the_drawing_indents_and_names_owners() -> None:
    drawn = draw(dump(make_tree().cache)).splitlines()
    assert drawn[0].startswith("[0, 8) public · hbm · 0.0 s ago")
    assert drawn[1] == "  [8, 16) t:a · hbm · 5.0 s ago"
    assert drawn[2] == "  [8, 12) t:b · hbm · 0.0 s ago"
    assert draw(dump(make_tree().cache, 0, 2)).endswith("page 1 of 2")
