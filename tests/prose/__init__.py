"""The phrases that the project's English avoids: ``rules.toml`` lists them, ``make lint`` looks."""
