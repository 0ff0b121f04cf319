"""Checkpoints straight from and to pages."""
