"""Attacks a running server as a malicious tenant would, and says what came of it."""

__all__: list[str] = []
