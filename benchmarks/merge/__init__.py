"""How fast a synchronizer shard merges, against memory bandwidth."""
