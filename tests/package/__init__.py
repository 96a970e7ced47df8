"""What a stranger installs: the archives, and an environment that holds nothing else."""
