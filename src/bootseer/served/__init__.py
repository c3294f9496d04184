"""Servers that outlive who starts them: to start, join and ask them, to keep their processes, to see them out."""
