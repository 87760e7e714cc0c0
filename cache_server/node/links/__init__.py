"""What a node and its coordinator say to each other."""
