"""Checks of file formats where DataFusion would change a value or drop a row."""
