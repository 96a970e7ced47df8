"""What mypy must infer at the public edge."""
