"""objcomm's tests; `python -m pytest` runs them all."""
