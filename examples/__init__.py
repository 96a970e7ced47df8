"""Programs to start from; ``docs/examples.md`` lists them. Each runs under torchrun or alone."""
