"""The embedded default: a tiny model that learns to add, on the spot, with no network and no account."""
