"""Models of several widths side by side: whether what they compute stays of one size."""
