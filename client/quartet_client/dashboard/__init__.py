"""`quartet dashboard`: one page in a browser that shows a run, live, from this machine alone."""

from quartet_client.dashboard.picture import Picture
from quartet_client.dashboard.server import Collector, PageServer

__all__ = ["Collector", "PageServer", "Picture"]
