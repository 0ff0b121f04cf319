"""Dense packing of lifetimes into one arena; ``planner/offsets.py`` is the way in."""
