"""Programs to start from; ``docs/recipes.md`` lists them. Each runs by torchrun, and alone."""
