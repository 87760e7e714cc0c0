"""Which addresses this process connects to on behalf of a caller."""
