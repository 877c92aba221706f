"""`pipe tune`: a search for better settings whose trials are ordinary runs."""
