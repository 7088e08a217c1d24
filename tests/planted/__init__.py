"""Defects that the tests must catch: plausible one-line mistakes, planted one at a time; see ``__main__``."""
