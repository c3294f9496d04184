"""``bootseer demo``: one real training job on this machine, started the ordinary way and the bootseer way."""
