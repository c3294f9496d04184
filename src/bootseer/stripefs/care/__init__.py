"""What is left or damaged: found, named, mended, removed."""
