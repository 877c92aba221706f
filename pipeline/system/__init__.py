"""What every package uses: errors, files, processes and the import of user code."""
