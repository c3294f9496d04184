"""The start of one node: image, environment, initialisation, the training command, with a span around each."""

from bootseer.launch import identity, job, node
from bootseer.launch.job import Job
from bootseer.launch.node import Start, start

__all__ = ["Job", "Start", "identity", "job", "node", "start"]
