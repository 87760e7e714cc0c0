"""What the nodes hold of each version, and whose claim to hold it counts."""
