"""Prompts of a known kind: long enough for several pages, and never the same by chance."""

import random

_WORDS = ("river", "stone", "lamp", "garden", "north", "winter", "paper", "cloud", "bridge", "song")


def unique_prompt(name: str, words: int = 60) -> str:
    """Return a text that begins differently for each ``name`` (so that no prefix is shared)."""
    draw = random.Random(name)
    return f"{name}: " + " ".join(draw.choice(_WORDS) for _ in range(words))
