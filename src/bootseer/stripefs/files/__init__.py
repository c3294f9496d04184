"""Files of the store: reading, writing, renaming, removing, copying."""
