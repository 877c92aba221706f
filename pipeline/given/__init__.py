"""A project for a model that exists already: what it is, and the files that serve it as it is."""
