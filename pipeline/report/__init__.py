"""The report of a run, and the list of all: HTML files that need nothing else, made to be read by people."""
