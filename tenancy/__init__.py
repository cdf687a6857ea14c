"""Who may do what: policy, identity, quota, fairness, isolation."""
