"""Output that both commands share."""
