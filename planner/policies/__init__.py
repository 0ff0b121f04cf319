"""Published policies and ours, each a short module; ``registry`` finds them by name."""
