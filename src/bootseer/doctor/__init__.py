"""What this machine has for a fast start, found by trying it: `examine` gives a `Report`."""

from bootseer.doctor.examine import examine
from bootseer.doctor.report import Check, Report, Status

__all__ = ["Check", "Report", "Status", "examine"]
