"""`quartet dashboard`: one page in a browser that shows a run, live, from this machine alone.

- `collector`: asks the broker, the services and the run's metrics.jsonl, for as long as the page is up.
- `picture`: what is known of the run, folded from all of that.
- `verdict`: what of it a person should know first: healthy, waiting, stalled, failed.
- `snapshot`: the picture as the JSON that the page polls.
- `server`: the page and that JSON over HTTP.
- `page/`: HTML, CSS and JavaScript as the browser gets them; there is nothing to build and nothing to download.
"""

from quartet_client.dashboard.collector import Collector
from quartet_client.dashboard.picture import Picture
from quartet_client.dashboard.server import PageServer

__all__ = ["Collector", "PageServer", "Picture"]
