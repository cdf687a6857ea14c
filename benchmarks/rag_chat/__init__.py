"""Chat over retrieved documents, played against servers; how: ``__main__.py``."""
