"""What a running training publishes, and ``tensorpager top``, which reads it."""
