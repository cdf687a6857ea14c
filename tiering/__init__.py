"""Where the bytes of a page live and when they move between tiers."""
