"""Tensors larger than what fits, slab by slab."""
