"""What a conversation alone uses, against a naive model that knows pages and no tree."""

from array import array
from random import Random
from typing import Any

import pytest

from sglang_ext.radix.integrity import check_integrity, walk
from sglang_ext.radix.sessions import Session, SessionId, Sessions, text_of
from sglang_ext.types import PUBLIC, Owner, TenantId
from tests.radix.caches import Rig, make_rig

PAGE = 4
A, B = TenantId("a"), TenantId("b")
Pages = tuple[int, ...]


class World:
    """A rig with sessions, and for each session the texts that it used, cut to what is there."""

    def __init__(self, pages: int = 40, public: list[list[int]] | None = None) -> None:
        self.rig = make_rig(pages * PAGE, PAGE, public)
        self.sessions: Sessions = self.rig.cache.sessions
        self.used: dict[SessionId, set[Pages]] = {}

    def ask(self, name: str, tokens: list[int], tenant: TenantId = A) -> None:
        """Send a request of a session, of none for an empty name."""
        tokens = tokens[: len(tokens) // PAGE * PAGE]
        self.rig.insert(tokens, f"t:{tenant}")
        self.cut()
        if name:
            id = SessionId(tenant, name)
            node = self.rig.core.node_by_id(self.rig.match(tokens, f"t:{tenant}").last_device_node)
            self.sessions.use(id, Owner(f"t:{tenant}"), node, 0)
            self.used.setdefault(id, set()).add(tuple(tokens))

    def alone(self, name: str, tenant: TenantId = A) -> set[Pages]:
        """Return the pages that the tree calls the session's own, each by its whole text."""
        session = self.sessions.find(SessionId(tenant, name))
        assert session is not None
        return {page for node in self.sessions.alone(session) for page in ends(node)}

    def expected(self, name: str, tenant: TenantId = A) -> set[Pages]:
        there = self.there(tenant)
        mine = self.used[SessionId(tenant, name)]
        others = [
            text
            for id, texts in self.used.items()
            if id.tenant == tenant and id.name != name
            for text in texts
        ]
        unneeded = {page for page in there if begins(page, mine) and not begins(page, others)}
        return {
            page
            for page in unneeded
            if all(longer in unneeded for longer in there if longer[: len(page)] == page)
        }

    def there(self, tenant: TenantId) -> set[Pages]:
        nodes = [node for node in walk(self.rig.core) if node.owner == f"t:{tenant}"]
        return {page for node in nodes for page in ends(node)}

    def cut(self) -> None:
        """Let the model forget what left: a text ends where its pages end."""
        for id, texts in self.used.items():
            there = self.there(id.tenant)
            self.used[id] = {shortened(text, there) for text in texts} - {()}

    def check(self) -> None:
        self.cut()
        check_integrity(self.rig.cache)
        for id in self.used:
            if self.sessions.find(id) is not None:
                assert self.alone(id.name, id.tenant) == self.expected(id.name, id.tenant), id


def ends(node: Any) -> list[Pages]:
    """Return each page of a node as the whole text that ends with it."""
    text = tuple(text_of(node).tokens)
    start = len(text) - len(node.key)
    return [text[:end] for end in range(start + PAGE, len(text) + 1, PAGE)]


def begins(page: Pages, texts: Any) -> bool:
    return any(text[: len(page)] == page for text in texts)


def shortened(text: Pages, there: set[Pages]) -> Pages:
    while text and text not in there:
        text = text[:-PAGE]
    return text


def random_text(random: Random) -> list[int]:
    return [value for _ in range(random.randint(1, 6)) for value in [random.randint(1, 2)] * PAGE]


@pytest.mark.parametrize("seed", range(6))
def test_what_is_alone_is_what_the_model_says(seed: int) -> None:
    world, random = World(), Random(seed)
    for _ in range(300):
        action = random.random()
        if action < 0.7:
            name = random.choice(["", "s", "t", "u"])
            world.ask(name, random_text(random), random.choice([A, A, B]))
        elif action < 0.8:
            world.rig.match(random_text(random), "t:a")
        elif action < 0.95:
            world.rig.evict(random.randint(1, 6) * PAGE)
        else:
            known = [id for id in world.used if world.sessions.find(id)]
            if known:
                id = random.choice(known)
                forget(world.sessions, id)
                del world.used[id]
        world.check()


def forget(sessions: Sessions, id: SessionId) -> None:
    session = sessions.find(id)
    assert session is not None
    sessions.forget(session)


def test_a_common_beginning_belongs_to_both_until_one_is_forgotten() -> None:
    world = World()
    world.ask("s", [1] * 8 + [2] * 4)
    world.ask("t", [1] * 8 + [3] * 4)
    assert {len(page) for page in world.alone("s")} == {12}
    forget(world.sessions, SessionId(A, "t"))
    del world.used[SessionId(A, "t")]
    assert {len(page) for page in world.alone("s")} == {12}, "the page of t is still there"
    world.rig.match([1] * 8 + [2] * 4)
    world.rig.evict(4)
    assert {len(page) for page in world.alone("s")} == {4, 8, 12}


def test_equal_names_of_two_tenants_are_two_sessions() -> None:
    world = World()
    world.ask("s", [1] * 8, A)
    world.ask("s", [1] * 8, B)
    ours, theirs = (world.sessions.find(SessionId(tenant, "s")) for tenant in (A, B))
    assert ours is not theirs
    forget(world.sessions, SessionId(A, "s"))
    assert len(world.alone("s", B)) == 2


def test_public_text_and_pinned_text_belong_to_nobody_alone() -> None:
    world = World(public=[[9] * 8])
    world.ask("s", [9] * 8 + [1] * 8)
    assert {len(page) for page in world.alone("s")} == {12, 16}
    node = world.rig.match([9] * 8 + [1] * 4).last_device_node
    world.rig.core.pin(node)
    assert {len(page) for page in world.alone("s")} == {16}
    session = world.sessions.find(SessionId(A, "s"))
    assert session is not None
    assert all(node.owner != PUBLIC for node in world.sessions.alone(session))


def test_only_so_many_sessions_of_a_tenant_are_remembered() -> None:
    world = World()
    world.sessions._most_sessions = 3
    for name in ("s", "t", "u", "s", "v"):
        world.ask(name, [ord(name)] * 4)
    world.ask("other", [1] * 4, B)
    assert [session.id.name for session in world.sessions.of(A)] == ["v", "s", "u"]
    assert [session.id.name for session in world.sessions.of(B)] == ["other"]
    assert all(node.sessions for node in walk(world.rig.core) if node.key.token_ids[0] != ord("t"))


def hashed(rig: Rig, tokens: list[int]) -> list[str]:
    """Give the nodes of a text the hashes that a disk would know them by."""
    found: list[str] = []
    node = rig.core.node_by_id(rig.match(tokens).last_device_node)
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    for node in reversed(path):
        node.hash_value = [str(page) for page in ends(node)]
        found += node.hash_value
    return found


def test_pages_that_left_memory_are_remembered_and_shared_by_who_uses_them_again() -> None:
    world = World()
    text = [1] * 8 + [2] * 4
    world.ask("s", text)
    pages = hashed(world.rig, text)
    world.rig.evict(64)
    first = world.sessions.find(SessionId(A, "s"))
    assert first is not None
    assert set(world.sessions.lost_alone(first)) == set(pages)
    assert first.text is not None
    assert first.text.tokens == array("q", text)
    world.ask("", text[:8])
    hashed(world.rig, text[:8])
    world.ask("t", text[:8])
    assert world.sessions.lost_alone(first) == [pages[2]]
    forget(world.sessions, SessionId(A, "t"))
    assert set(world.sessions.lost_alone(first)) == set(pages)
    world.ask("s", text)
    assert first.text is None, "all of it is there again"


def test_lost_pages_are_bounded_for_a_tenant() -> None:
    world = World()
    world.sessions._most_lost_pages = 4
    for number in range(1, 6):
        text = [number] * 8
        world.ask(f"s{number}", text)
        hashed(world.rig, text)
        world.rig.evict(64)
    lost = [len(session.lost) for session in world.sessions.of(A)]
    assert lost == [2, 2, 0, 0, 0]
    forgotten: list[Session] = world.sessions.of(A)[2:]
    assert all(session.text is None for session in forgotten)


def test_a_flush_forgets_all_sessions() -> None:
    world = World()
    world.ask("s", [1] * 8)
    world.rig.cache.reset()
    assert world.sessions.of(A) == []
