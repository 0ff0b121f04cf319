"""The runtime: pages, tiers, moves, ``PagedTensor``, activation hooks, optimizers, CLI."""
