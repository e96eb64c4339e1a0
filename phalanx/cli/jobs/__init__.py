"""Commands about one job of the queue, from ``submit`` to ``cancel``."""
