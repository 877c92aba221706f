"""Compare the traffic of a live service with training and with the verdict: `pipe monitor`."""
