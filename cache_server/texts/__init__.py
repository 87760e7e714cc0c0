"""CSV and newline JSON: where DataFusion would change a value it is refused, or read by Arrow."""
