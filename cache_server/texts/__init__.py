"""CSV and newline JSON: where they would be read wrongly, and what is refused for it."""
