#!/bin/sh
# The health check of every image: check.sh SERVICE. Status 0: serving.
# Docker and Compose restart what ends, not what is unhealthy. A service that twice accepts a connection and does not
# answer has hung: it is killed, so that the restart policy starts it again.
status=3
for _ in 1 2; do
  [ "$status" -ne 3 ] || { python -m quartet_server.probe "$1" /etc/quartet/run.toml --timeout 15; status=$?; }
done
if [ "$status" -eq 3 ] && [ "$(cat /proc/1/comm)" = tini ]; then
  kill -KILL -1 # every process of this container but tini, which then ends
fi
[ "$status" -eq 0 ]
