"""The coordinator: knows every version and node, decides what each node holds, moves no rows."""
