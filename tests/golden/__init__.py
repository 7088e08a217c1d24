"""Golden runs: small whole runs of both front ends, compared bit for bit between two commits; see ``__main__``."""
