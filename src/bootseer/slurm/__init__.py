"""Slurm: a Prolog that mounts the image a job names, an Epilog that unmounts it, and their installation.

What they leave for the job's steps is in `jobfolder`; ``bootseer exec`` reads it. Docs: ``docs/howto/slurm.md``.
"""
