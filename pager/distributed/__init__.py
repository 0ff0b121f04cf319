"""Ranks: DDP, FSDP2's shards, collectives."""
