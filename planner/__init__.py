"""Planning without torch: everything here imports numpy at most, so it runs on a laptop."""
