"""``tensorpager doctor``: what this machine can do, and how fast."""
