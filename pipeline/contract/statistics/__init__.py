"""What a difference measured on some samples says: intervals, tests, and what they can see at all."""
