"""The command line: one module per verb group; heavy imports happen inside the commands."""
