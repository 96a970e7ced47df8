"""What a user installs: the archives, and an environment with nothing else."""
