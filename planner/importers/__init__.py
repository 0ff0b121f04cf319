"""Traces from public formats."""
