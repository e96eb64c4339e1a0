"""Commands about what was measured: ``runs``, ``report``, ``ledger``."""
