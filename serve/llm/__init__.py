"""Text from a language model: OpenAI's endpoints, and the batch that requests join and leave while it runs."""
