"""Row ids -> rows: from nodes, replicas and local files."""
