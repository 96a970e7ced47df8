"""Known defects of the package, and whether the tests see them; not collected by pytest."""
