"""What this machine has for a fast start, found by trying it: `examine` gives a `DoctorReport`."""

from bootseer.doctor.checks import Check, DoctorReport, Status
from bootseer.doctor.examine import examine

__all__ = ["Check", "DoctorReport", "Status", "examine"]
