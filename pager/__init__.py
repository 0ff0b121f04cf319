"""The runtime: pages, tiers, migration, ``PagedTensor``, activation hooks, optimizers, CLI."""
