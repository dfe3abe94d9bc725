"""Pure functions with arithmetic in them."""
