"""Find the FP8 scales of a model, and measure what FP8 pages cost in quality."""
