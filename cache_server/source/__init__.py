"""Facts about a source before its rows are read: files, splits, tables. Pure."""
