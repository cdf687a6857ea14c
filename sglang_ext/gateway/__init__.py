"""Several engines behind one door: who runs where, who is kept alive, who is asked."""

__all__: list[str] = []
