"""What a step optimizes: from rows to optimizer steps and their statistics, the same for both front ends."""
