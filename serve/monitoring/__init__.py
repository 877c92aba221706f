"""What the service reports about itself: metrics, logs and traces."""
