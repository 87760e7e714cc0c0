"""What is known of a source before its rows are read: files, splits, tables. Pure."""
