"""sglang_ext: a tenant-aware, tiered KV cache for SGLang's RadixAttention."""

__all__ = ["__version__"]

__version__ = "0.1.0"
