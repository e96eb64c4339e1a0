"""Where every GPU-nanosecond went."""
