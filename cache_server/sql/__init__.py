"""Queries: how each runs and what it reads; DataFusion runs them."""
