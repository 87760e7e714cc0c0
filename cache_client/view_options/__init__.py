"""What a user asks of a view -> the view."""
