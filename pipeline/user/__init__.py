"""What user code imports through `pipeline`: readers of data, losses and labels."""
