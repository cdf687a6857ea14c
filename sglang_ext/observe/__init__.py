"""What operators see: the metrics' reference, usage for bills, the live page, the terminal view."""
