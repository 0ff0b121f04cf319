"""Libraries that people train with. Each is imported where it is used, and nowhere else."""
