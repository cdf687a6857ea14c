"""Every place where SGLang itself is hooked, one file a target, guarded by the exact version."""
