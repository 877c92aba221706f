"""The evaluate step: score candidate and baseline on the same test samples, compare them in pairs, decide."""
