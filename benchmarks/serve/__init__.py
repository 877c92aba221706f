"""How fast the service is, beside the bare runtime, kserve as it comes and its peers."""
