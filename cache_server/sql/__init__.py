"""Queries: which way each goes, what it reads, and DataFusion, which runs it."""
