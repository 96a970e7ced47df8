"""Programs to start from; ``docs/examples.md`` lists them. Each runs by torchrun, and alone."""
