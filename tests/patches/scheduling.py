"""A scheduler's parts for tests: SGLang's own Req and PrefillAdder over our cache, no model."""

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.namespace import frame
from sglang_ext.patches.admission import TenantPrefillAdder
from sglang_ext.patches.schedule_policy import TenantFairPolicy
from sglang_ext.patches.scheduling import TenantScheduling
from sglang_ext.tenancy.loader import parse_policy
from sglang_ext.tenancy.quota import QuotaBook
from sglang_ext.types import TenantId, Tier
from tests.radix.caches import Rig, make_rig

__all__ = ["PAGE", "Desk"]

PAGE = 16


class Desk:
    """Admits requests of the tenants of a policy into a pool of ``tokens``."""

    def __init__(self, tenants: str, tokens: int = 1024) -> None:
        self.policy = parse_policy(f"version: 1\ntenants: {{{tenants}}}")
        self.rig: Rig = make_rig(tokens, PAGE)
        self.observed: list[tuple[str, TenantId]] = []
        self.scheduling = TenantScheduling(self.policy, lambda: self.observer)
        self.scheduling.cache = self.rig.cache
        self.scheduling.fair = True
        self.scheduling.metrics = self.observer
        self.rig.cache.limit([QuotaBook(self.policy, Tier.HBM, tokens, 0)])
        self.queue: list[Any] = []
        self.running: list[Any] = []
        self.fair_policy = TenantFairPolicy(
            self.scheduling,
            tree_cache=self.rig.cache,
            enable_hierarchical_cache=False,
            enable_priority_scheduling=False,
            schedule_low_priority_values_first=False,
        )
        self._made = 0

    @property
    def observer(self) -> Any:
        """Notes what was skipped and refused."""

        def note(tenant: TenantId, reason: str) -> None:
            self.observed.append((reason, tenant))

        def nothing(*_: Any, **__: Any) -> None: ...

        return SimpleNamespace(
            admitted=nothing, computes=nothing, skipped=note, refused=note, preempted=note
        )

    def request(self, tenant: str, prompt: int, output: int, start: int = 0) -> Any:
        """Return a request whose prompt no other shares, unless ``start`` is given."""
        self._made += 1
        first = start or self._made * 100_000
        owner = self.scheduling.tenant(TenantId(tenant)).owner
        return Req(
            f"{tenant}/{self._made}",
            "",
            array("q", range(first, first + prompt)),
            SamplingParams(max_new_tokens=output),
            extra_key=frame(owner),
        )

    def submit(self, tenant: str, prompt: int, output: int, start: int = 0) -> Any:
        """Queue a request."""
        req = self.request(tenant, prompt, output, start)
        self.scheduling.arrived(req, self.queue)
        self.queue.append(req)
        return req

    def begin_step(self) -> None:
        """Do what a scheduler step begins with."""
        self.scheduling.count_running(self.running)

    def admit(self, limit: int = 8192) -> list[Any]:
        """Run one pass of admissions as SGLang's loop does; return who was admitted."""
        self.begin_step()
        self.fair_policy.calc_priority(self.queue)
        batch = SimpleNamespace(reqs=self.running, batch_size=lambda: len(self.running))
        adder = TenantPrefillAdder(
            PAGE, self.rig.cache, self.rig.allocator, batch, 0.5, limit, limit,
            scheduling=self.scheduling,
        )  # fmt: skip
        self._loop(adder, self.queue)
        for req in adder.can_run_list:
            self._run(req)
        self.queue = [req for req in self.queue if req not in adder.can_run_list]
        return list(adder.can_run_list)

    def _loop(self, adder: TenantPrefillAdder, queue: Sequence[Any]) -> None:
        for req in queue:
            req.init_next_round_input(self.rig.cache)
            if adder.add_one_req(req, False, None).name != "CONTINUE":
                return

    def _run(self, req: Any) -> None:
        """Allocate the whole request, prompt and output, as if it had run to its end."""
        total = -(-(len(req.origin_input_ids) + req.sampling_params.max_new_tokens) // PAGE) * PAGE
        owner = self.scheduling.ticket(req).owner
        with self.scheduling.allocating({owner: total - req.prefix_len}):
            req.slots = self.rig.alloc(total - req.prefix_len)
        req.kv.kv_allocated_len = total
        self.running.append(req)

    def finish(self, req: Any) -> None:
        """End a running request and leave nothing of it in the cache."""
        self.running.remove(req)
        self.rig.allocator.free(req.slots)
        self.rig.cache.unlock(req.lock)
        req.kv.kv_allocated_len = req.kv.cache_protected_len = 0
