"""This process among those of its job, and checks of its arguments."""
