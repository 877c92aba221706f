"""`python -m benchmarks.train`: the training loop against a bare one and its peers, words against a slow link, a GPU."""
