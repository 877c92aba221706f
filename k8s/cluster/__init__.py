"""The cluster's API: apply, watch, roll out, explain."""
