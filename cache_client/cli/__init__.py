"""`cachectl`."""
