"""A planner without a model: the real tree and rules on a virtual clock, for clusters not here."""
