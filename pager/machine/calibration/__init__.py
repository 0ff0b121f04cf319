"""How fast each channel is on this machine, measured at start and kept for a week."""
