"""Where the bytes go: measured and by rule."""
