"""Files of fewer bits made of the verified one: each judged by itself, timed, and shipped only if it passes."""
