"""Counting a queue that others change, against counting it anew each time."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tenancy.backlog import Backlog
from sglang_ext.types import TenantId

steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from("abc")),
        st.tuples(st.just("remove"), st.integers(0, 5)),
        st.tuples(st.just("look"), st.none()),
    ),
    max_size=60,
)


@given(steps)
def test_counts_are_exact(actions: list[tuple[str, object]]) -> None:
    backlog = Backlog(TenantId)
    queue: list[str] = []
    for action, value in actions:
        if action == "append":
            backlog.counts(queue)
            backlog.append(value)
            queue.append(str(value))
        elif action == "remove" and queue:
            # SGLang puts another list in its place as often as it deletes from it.
            queue = [item for place, item in enumerate(queue) if place != value]
        else:
            assert +Counter(backlog.counts(queue)) == Counter(queue)
    assert +Counter(backlog.counts(queue)) == Counter(queue)


def test_a_queue_is_counted_only_after_something_left() -> None:
    asked: list[str] = []

    def tenant_of(item: str) -> TenantId:
        asked.append(item)
        return TenantId(item)

    backlog, queue = Backlog(tenant_of), []
    for _ in range(100):
        assert backlog.counts(queue)["a"] == len(queue)
        backlog.append("a")
        queue.append("a")
    assert len(asked) == 100
