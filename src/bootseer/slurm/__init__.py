"""Slurm: a Prolog that mounts the image a job names, an Epilog that unmounts it, and their installation
(``docs/howto/slurm.md``). What they leave for the job's steps is in `jobfolder`; ``bootseer exec`` reads it."""
