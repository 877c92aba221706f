"""The road from a PyTorch model to a running service: contracts in `spec`, orchestration here."""
