"""The datasets of training loops."""
