"""Other libraries' names and signatures over objcomm; import a module of it by its own name."""
