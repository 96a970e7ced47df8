"""What mypy must infer for the public API."""
