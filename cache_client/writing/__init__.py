"""Rows -> nodes, or a Parquet file."""
