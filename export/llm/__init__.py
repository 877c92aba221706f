"""What only language models have: a graph with a cache, greedy answers, perplexity, rounded weights, genai."""
