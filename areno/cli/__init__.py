"""The command line: one thin module per command, each imported only when it is chosen."""
