"""Which job runs next."""
