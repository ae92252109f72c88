"""`quartet dashboard`: one page in a browser that shows a run, live, from this machine alone.

- `collector`: polls the broker, the services and the run's metrics.jsonl.
- `picture`: the state of the run, folded from all of that.
- `verdict`: the first line of the page: healthy, waiting, stalled, failed, and why.
- `snapshot`: the picture and the samples as the JSON that the page polls.
- `server`: the page and that JSON over HTTP.
- `page/`: HTML, CSS and JavaScript as the browser gets them; there is nothing to build and nothing to download.
"""

from quartet_client.dashboard.collector import Collector
from quartet_client.dashboard.picture import Picture
from quartet_client.dashboard.server import PageServer

__all__ = ["Collector", "PageServer", "Picture"]
