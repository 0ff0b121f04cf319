"""Bytes between tiers, and which runs are on the device."""
