"""More than one device: worker processes, their groups, and what they share out."""
