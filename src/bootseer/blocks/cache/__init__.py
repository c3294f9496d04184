"""What lies on a node: cache files and their bitmaps, who owns them, what is evicted and checked."""
