"""Finding what is lost, damaged or garbage; repairing and removing it."""
