"""``PagedTensor``: its doors, running ops on views, saved tensors, modules."""
