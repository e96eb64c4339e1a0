"""Where a gang goes: all of it or nothing."""
