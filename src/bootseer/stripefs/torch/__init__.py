"""Checkpoints of torch in a striped store. The public names are those of `bootseer.torch`."""
