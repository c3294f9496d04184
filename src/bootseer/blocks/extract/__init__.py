"""A whole tree as a plain folder, for hosts where nothing may be mounted."""
