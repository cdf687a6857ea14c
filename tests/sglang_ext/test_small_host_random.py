"""Whatever moves between HBM, a small host pool and the disk: pages hold their text's bytes."""

import hashlib
import os
import random
from pathlib import Path

import pytest
import torch

from sglang_ext.radix.integrity import check_integrity
from tests.sglang_ext.test_tiers import fetch
from tests.sglang_ext.tiered import CPU, HBM, PAGE, TieredRig, tiered

STEPS = int(os.environ.get("SGLANG_EXT_TIER_STEPS", "120"))
SYSTEM = list(range(500, 508))
OWNERS = ("t:a", "t:b")


def pages_of(text: list[int], owner: str) -> list[int]:
    """Return a byte for each page that depends on all text up to it, and on a private owner."""
    found = []
    for end in range(PAGE, len(text) + 1, PAGE):
        public = text[:end] == SYSTEM[:end]
        seed = f"{'' if public else owner} {text[:end]}".encode()
        found.append(hashlib.sha256(seed).digest()[0])
    return found


class Story:
    """Computes, forgets and fetches texts, and compares every page that is found."""

    def __init__(self, rig: TieredRig, seed: int) -> None:
        self.rig, self.draw = rig, random.Random(seed)

    def text(self) -> list[int]:
        """Return one of a few texts that share their beginnings."""
        start = SYSTEM if self.draw.random() < 0.5 else [self.draw.randrange(2) * 100]
        rest = [self.draw.randrange(2) for _ in range(self.draw.randrange(1, 6))]
        text = start if start is SYSTEM else start * PAGE
        return [*text, *(word for word in rest for _ in range(PAGE))]

    def slots(self, text: list[int], owner: str) -> torch.Tensor:
        found = self.rig.match(text, owner)
        root = self.rig.core.root_node_handle()
        slots = self.rig.core.collect_full_device_indices(found.last_device_node, root)
        assert isinstance(slots, torch.Tensor)
        return slots

    def compute(self, text: list[int], owner: str) -> None:
        """Write what is missing before its copy can go down."""
        if self.rig.allocator.available_size() + self.rig.cache.evictable_size() < len(text):
            self.rig.settle()
        held = len(self.slots(text, owner))
        pool = self.rig.allocator.get_kvcache()
        alloc = self.rig.alloc

        def write(tokens: int) -> torch.Tensor:
            slots = alloc(tokens)
            for place, byte in enumerate(pages_of(text, owner)[held // PAGE :]):
                for layer in [*pool.k_buffer, *pool.v_buffer]:
                    layer.view(torch.uint8)[slots[place * PAGE : (place + 1) * PAGE]] = byte
            return slots

        self.rig.alloc = write  # type: ignore[method-assign]
        try:
            self.rig.insert(text, owner)
        finally:
            self.rig.alloc = alloc  # type: ignore[method-assign]
        if self.draw.random() < 0.7:
            self.rig.settle()

    def load(self, text: list[int], owner: str) -> None:
        found = self.rig.match(text, owner)
        if found.host_hit_length and self.rig.cache.load_back(found.best_match_node):
            self.rig.cache.ready_to_load_host_cache()
            if self.draw.random() < 0.5:
                self.rig.settle()

    def step(self) -> None:
        text, owner = self.text(), self.draw.choice(OWNERS)
        tokens = PAGE * self.draw.randrange(1, 9)
        match self.draw.randrange(6):
            case 0 | 1:
                self.compute(text, owner)
            case 2:
                self.rig.evict(tokens)
            case 3:
                self.rig.cache.evict_host(tokens)
            case 4:
                fetch(self.rig, text, owner)
            case 5:
                self.load(text, owner)
        self.verify(*((self.text(), self.draw.choice(OWNERS)) if tokens % 3 else (text, owner)))

    def verify(self, text: list[int], owner: str) -> None:
        check_integrity(self.rig.cache)
        slots = self.slots(text, owner)
        pool = self.rig.allocator.get_kvcache()
        expected = torch.tensor(pages_of(text, owner)[: len(slots) // PAGE], dtype=torch.uint8)
        for layer in [*pool.k_buffer, *pool.v_buffer]:
            found = layer.view(torch.uint8)[slots].flatten(1)
            wanted = expected.repeat_interleave(PAGE)[:, None].expand_as(found)
            assert torch.equal(found, wanted), (text, owner)


@pytest.mark.trial(45)
@pytest.mark.trial(47)
@pytest.mark.parametrize("cpu", [HBM // 4, HBM, CPU])
@pytest.mark.parametrize("seed", range(3))
def test_every_page_holds_the_bytes_of_its_text(tmp_path: Path, seed: int, cpu: int) -> None:
    with tiered(tmp_path, public=[SYSTEM], cpu=cpu) as rig:
        story = Story(rig, seed)
        for _ in range(STEPS):
            story.step()
        rig.settle()
        assert rig.accounted() == rig.size
