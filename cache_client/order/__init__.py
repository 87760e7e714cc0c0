"""Which row is at which place of an epoch. Pure."""
