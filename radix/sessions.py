"""Which pages belong to which conversation, and which of them to no other.

A session hangs on the nodes where the text of its requests ended, its anchors; it uses them and all
above them. A split leaves an anchor on the deeper node. A node that leaves memory hands its anchors
to its parent, and its page hashes to the sessions: their copies on disk may still be there.

    public ── a ── b ── c   anchor of s        alone in s: c, b
                └─ d ── e   anchor of t        a is used by both, public text by everybody
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from sglang_ext.types import PUBLIC, Owner, TenantId

__all__ = ["Session", "SessionId", "Sessions", "Text", "text_of"]

MOST_SESSIONS = 1024
"""So many of one tenant are remembered; the one that was idle for longest is forgotten first."""

MOST_LOST_PAGES = 1 << 18
"""So many pages that left memory are remembered for all sessions of one tenant together."""


class SessionId(NamedTuple):
    """A client's name of a conversation means something inside its tenant only."""

    tenant: TenantId
    name: str


class Text(NamedTuple):
    """The tokens of a path from the root, and the namespace that they lie in."""

    tokens: "array[int]"
    extra_key: str | None
    cache_salt: str | None

    def begins_with(self, start: "Text") -> bool:
        """Tell whether this text lies where ``start`` does and begins with it."""
        return self[1:] == start[1:] and self.tokens[: len(start.tokens)] == start.tokens


class Session:
    """One conversation. ``anchors``: the last used one is the last. ``lost``: hashes of its pages
    that left memory, oldest first. ``text``: what it said last, kept once a part of it left memory,
    None while all is there."""

    __slots__ = ("anchors", "id", "lost", "owner", "text", "used_ms")

    def __init__(self, id: SessionId, owner: Owner) -> None:
        self.id = id
        self.owner = owner
        self.anchors: dict[Any, None] = {}
        self.lost: dict[str, None] = {}
        self.text: Text | None = None
        self.used_ms = 0


class Sessions:
    """The sessions of one tree. A node's ``sessions`` are those anchored at it, None for none."""

    def __init__(
        self, most_sessions: int = MOST_SESSIONS, most_lost_pages: int = MOST_LOST_PAGES
    ) -> None:
        self._most_sessions = most_sessions
        self._most_lost_pages = most_lost_pages
        self._tenants: dict[TenantId, OrderedDict[str, Session]] = {}
        self._holders: dict[TenantId, Counter[str]] = {}
        self._remembers = True

    def find(self, id: SessionId) -> Session | None:
        """Return a session without making it a used one. O(1)."""
        named = self._tenants.get(id.tenant)
        return None if named is None else named.get(id.name)

    def of(self, tenant: TenantId) -> list[Session]:
        """Return the sessions of a tenant, the most recently used first."""
        return list(reversed(self._tenants.get(tenant, {}).values()))

    def use(self, id: SessionId, owner: Owner, node: Any, now_ms: int) -> Session:
        """Note that a request of a session, known or new, ended at ``node``.

        O(path); where pages of the tenant left memory before, O(pages of the path).
        """
        named = self._tenants.setdefault(id.tenant, OrderedDict())
        session = named.get(id.name)
        if session is None:
            session = named[id.name] = Session(id, owner)
        named.move_to_end(id.name)
        session.used_ms, session.text = now_ms, None
        self._anchor(session, node)
        self._share_lost(session, node)
        self._forget_idle(id.tenant)
        return session

    def left(self, node: Any) -> None:
        """Note that a node with anchors is leaving memory; its parent is still known. O(pages)."""
        sessions, node.sessions = node.sessions, None
        short = node.lifespan is not None and node.lifespan.ttl_ms is not None
        keeps = bool(node.hash_value) and self._remembers and not short
        for session in sessions:
            del session.anchors[node]
            if keeps:
                session.text = session.text or text_of(node)
                self._lose(session, node.hash_value)
            if node.parent.parent is not None:
                self._anchor(session, node.parent)
        if keeps:
            for tenant in {session.id.tenant for session in sessions}:
                self._forget_idle(tenant)

    def alone(self, session: Session) -> list[Any]:
        """Return the nodes that no other session and nobody else's page needs, children first.

        Pinned and public nodes are never among them. O(its paths and their children).
        """
        alone: dict[Any, None] = {}
        for node in _deepest_first(session.anchors):
            if self._is_alone(node, session, alone):
                alone[node] = None
        return list(alone)

    def lost_alone(self, session: Session) -> list[str]:
        """Return the hashes of its lost pages that no other session of the tenant holds."""
        holders = self._holders.get(session.id.tenant)
        return [page for page in session.lost if holders is not None and holders[page] == 1]

    def forget(self, session: Session) -> None:
        """Remove a session; its pages stay, and belong to nobody in particular."""
        for node in session.anchors:
            del node.sessions[session]
            if not node.sessions:
                node.sessions = None
        session.anchors = {}
        self._unlose(session, list(session.lost))
        del self._tenants[session.id.tenant][session.id.name]

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Within, what leaves memory is deleted below as well: no trace of it is kept."""
        self._remembers = False
        try:
            yield
        finally:
            self._remembers = True

    def forget_owner(self, owner: Owner) -> None:
        """Remove all sessions of an owner. O(sessions)."""
        for session in [one for named in self._tenants.values() for one in named.values()]:
            if session.owner == owner:
                self.forget(session)

    def forget_texts(self, start: Text) -> None:
        """Keep no text that begins with this one. O(sessions)."""
        for named in self._tenants.values():
            for session in named.values():
                if session.text is not None and session.text.begins_with(start):
                    session.text = None

    def forget_before(self, first_ms: Callable[[Owner], int]) -> None:
        """Remove the sessions last used before that time of their owner. O(tenants + those)."""
        for named in self._tenants.values():
            while named:
                oldest = next(iter(named.values()))
                if oldest.used_ms >= first_ms(oldest.owner):
                    break
                self.forget(oldest)

    def clear(self) -> None:
        """Forget all sessions, together with the tree that they were in."""
        self._tenants.clear()
        self._holders.clear()

    def _anchor(self, session: Session, node: Any) -> None:
        """Hang a session on a node; an anchor above it says nothing more and goes. O(path)."""
        above = node.parent
        while above is not None:
            if above in session.anchors:
                self._unanchor(session, above)
            above = above.parent
        if node.sessions is None:
            node.sessions = {}
        node.sessions[session] = None
        session.anchors.pop(node, None)
        session.anchors[node] = None

    @staticmethod
    def _unanchor(session: Session, node: Any) -> None:
        del session.anchors[node]
        del node.sessions[session]
        if not node.sessions:
            node.sessions = None

    @staticmethod
    def _is_alone(node: Any, session: Session, alone: dict[Any, None]) -> bool:
        if node.owner == PUBLIC or node.pins:
            return False
        if node.sessions is not None and (len(node.sessions) > 1 or session not in node.sessions):
            return False
        return all(child in alone for child in node.children.values())

    # ---- pages that left memory

    def _lose(self, session: Session, pages: Sequence[str]) -> None:
        holders = self._holders.setdefault(session.id.tenant, Counter())
        for page in pages:
            if page not in session.lost:
                session.lost[page] = None
                holders[page] += 1

    def _unlose(self, session: Session, pages: list[str]) -> None:
        holders = self._holders.get(session.id.tenant, Counter())
        for page in pages:
            del session.lost[page]
            holders[page] -= 1
            if not holders[page]:
                del holders[page]
        if not session.lost:
            session.text = None

    def _share_lost(self, session: Session, node: Any) -> None:
        """Hold what other sessions lost and this one now uses, so that it outlives them."""
        holders = self._holders.get(session.id.tenant)
        while holders and node.parent is not None:
            self._lose(session, [page for page in node.hash_value or () if page in holders])
            node = node.parent

    def _forget_idle(self, tenant: TenantId) -> None:
        named = self._tenants[tenant]
        while len(named) > self._most_sessions:
            self.forget(next(iter(named.values())))
        while (excess := len(self._holders.get(tenant, ())) - self._most_lost_pages) > 0:
            idle = next(session for session in named.values() if session.lost)
            self._unlose(idle, list(idle.lost)[: max(excess, len(idle.lost) // 2)])


def _deepest_first(anchors: dict[Any, None]) -> list[Any]:
    """Return the nodes of the paths to ``anchors``, without the root, none before its children."""
    depth: dict[Any, int] = {}
    for anchor in anchors:
        path = list(_path(anchor))
        depth.update((node, len(path) - place) for place, node in enumerate(path))
    return sorted(depth, key=depth.__getitem__, reverse=True)


def _path(node: Any) -> Iterator[Any]:
    while node.parent is not None:
        yield node
        node = node.parent


def text_of(node: Any) -> Text:
    """Return the whole text that ends at ``node``. O(tokens), copied in C."""
    tokens = array("q")
    for step in reversed(list(_path(node))):
        tokens += step.key.token_ids[: len(step.key)]
    return Text(tokens, node.key.extra_key, node.key.cache_salt)
