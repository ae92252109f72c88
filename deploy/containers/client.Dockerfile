# The `quartet` command, e.g. `run FILE.toml --attach`: creates a run at services that run elsewhere, and feeds it.
#   docker build -f deploy/containers/client.Dockerfile -t quartet-client .
# Built from the checkout's root. Packages come from where pip is configured to look, or --build-arg PIP_INDEX_URL=…
FROM debian:bookworm-slim AS build
ARG PIP_INDEX_URL
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates
RUN python3 -m venv /tools && python3 -m venv --without-pip /opt/quartet/client
WORKDIR /src
COPY client/requirements.txt client/
RUN /tools/bin/pip --python /opt/quartet/client/bin/python install --no-cache-dir --no-deps -r client/requirements.txt
# One wheel has all that no index has (client/hatch_build.py).
COPY protos/python/ protos/python/
COPY services/common/quartet_common/ services/common/quartet_common/
COPY tests/contract/suite/ tests/contract/suite/
COPY client/ client/
RUN /tools/bin/pip --python /opt/quartet/client/bin/python install --no-cache-dir --no-deps ./client

FROM debian:bookworm-slim
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 tini && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --home-dir /var/lib/quartet --create-home --shell /usr/sbin/nologin quartet
COPY --from=build /opt/quartet/client /opt/quartet/client
ENV PATH=/opt/quartet/client/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/quartet
HEALTHCHECK NONE
# tini forwards SIGTERM and reaps orphaned processes.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "quartet"]
