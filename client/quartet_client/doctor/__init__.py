"""`quartet doctor`: is this host fit for a service? One check a function, each with what to do about what it finds."""

from quartet_client.doctor.examine import SERVICES, examine
from quartet_client.doctor.findings import Finding

__all__ = ["SERVICES", "Finding", "examine"]
