"""Rows -> tensors, arrays and frames."""
