"""The extended radix tree: who owns each run of pages, in which tiers it lies, who leaves first."""
