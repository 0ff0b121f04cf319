"""Fixed addresses for a plan: base frames for what it has on the device."""
