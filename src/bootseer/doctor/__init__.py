"""What this machine has for a fast start, found by trying it: `examine` gives a `Report`."""

from bootseer.doctor.checks import Check, Report, Status
from bootseer.doctor.examine import examine

__all__ = ["Check", "Report", "Status", "examine"]
