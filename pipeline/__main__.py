"""`python -m pipeline` is `pipe`."""

from pipeline.cli import main

if __name__ == "__main__":
    main()
