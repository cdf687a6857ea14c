"""A load of two and more tenants that counts for itself what the server should have counted."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.serving.observed import Observed
from tests.serving.prompts import unique_prompt

__all__ = ["SOURCES", "Load"]

SOURCES = {"device": "hbm", "host": "cpu", "storage": "nvme"}


@dataclass
class Load:
    """Sends requests one after the other; ``counts`` is what the answers said, by tenant."""

    observed: Observed
    counts: dict[str, Counter[str]] = field(default_factory=dict)

    def ask(self, tenant: str, text: str, tokens: int = 2) -> Counter[str]:
        """Send one prompt and return what it used."""
        answer = self.observed.client(tenant).generate(text, tokens=tokens)
        meta: Any = answer["meta_info"]
        details = meta["cached_tokens_details"] or {}
        cached = {f"cached_{tier}_tokens": details.get(name, 0) for name, tier in SOURCES.items()}
        assert sum(cached.values()) == meta["cached_tokens"]
        used = Counter(
            requests=1,
            prompt_tokens=meta["prompt_tokens"],
            computed_tokens=meta["prompt_tokens"] - meta["cached_tokens"],
            output_tokens=meta["completion_tokens"],
            **cached,
        )
        self.counts.setdefault(tenant, Counter()).update(used)
        return used

    def conversations(self, tenant: str, name: str, turns: int, words: int = 120) -> None:
        """Send a text that grows by a little in each turn."""
        text = unique_prompt(f"{name} of {tenant}", words)
        for turn in range(turns):
            self.ask(tenant, text)
            text += f" turn {turn} " + unique_prompt(f"{name} {turn}", 20)
