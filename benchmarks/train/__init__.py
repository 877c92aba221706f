"""`python -m benchmarks.train`: the training loop beside a bare loop and its peers, on a slow link, on a GPU."""
