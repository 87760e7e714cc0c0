"""The coordinator: what is asked for, who holds it, who should. Decides, and moves no row."""
