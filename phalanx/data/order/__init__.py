"""Which sample comes when: pure functions of (seed, index)."""
