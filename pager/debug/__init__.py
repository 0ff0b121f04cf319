"""The proof of the invariants, and chaos mode."""
