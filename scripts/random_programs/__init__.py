"""Random training programs, and whether they keep their promises under a pager."""
