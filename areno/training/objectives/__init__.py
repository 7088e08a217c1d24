"""Training objectives of both front ends: from rows to optimizer steps and their statistics."""
