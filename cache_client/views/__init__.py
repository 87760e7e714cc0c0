"""What a job reads of a dataset, other than each row once: filters, splits, weights, groups."""
