"""How much: what is metered, the border, the smallest budget, what is whole and what streams."""
