"""Commands about saved state: ``ckpt`` and ``convert``."""
