"""What changed between two traces, or between two plans."""
