"""Commands that train on this machine: ``train``, ``config``, ``demo``."""
