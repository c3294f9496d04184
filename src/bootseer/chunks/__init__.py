"""What lies on this node: verified chunks in cache files, their bitmaps and locks, what is there, and what is evicted.
A chunk is a row of bytes with a checksum; images, environments and checkpoints are three ways to name them."""
