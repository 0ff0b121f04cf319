"""Where pages are: frames, slots, the page table."""
