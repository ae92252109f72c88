# The environment service. Packages of agents: build an image FROM this one, or mount files and run.toml.
#   docker build -f deploy/containers/environment.Dockerfile -t quartet-environment .
# Built from the checkout's root. Packages come from where pip is configured to look, or --build-arg PIP_INDEX_URL=…
FROM debian:bookworm-slim AS build
ARG PIP_INDEX_URL
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates
RUN python3 -m venv /tools && python3 -m venv --without-pip /opt/quartet/environment
WORKDIR /src
COPY services/environment/ services/environment/
RUN /tools/bin/pip --python /opt/quartet/environment/bin/python install --no-cache-dir --no-deps -r services/environment/requirements.txt
COPY protos/ protos/
COPY services/common/ services/common/
RUN /tools/bin/pip --python /opt/quartet/environment/bin/python install --no-cache-dir --no-deps ./protos ./services/common ./services/environment

FROM debian:bookworm-slim
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 tini && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --home-dir /var/lib/quartet --create-home --shell /usr/sbin/nologin quartet
COPY --from=build /opt/quartet/environment /opt/quartet/environment
COPY --chmod=755 deploy/containers/check.sh /usr/local/bin/quartet-check
ENV PATH=/opt/quartet/environment/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/quartet
VOLUME /var/lib/quartet
# The run file is mounted; its [addresses] and [server] bind_host = "0.0.0.0" say where to listen (docs/containers.md).
HEALTHCHECK --interval=10s --timeout=40s --start-period=300s --retries=3 CMD ["quartet-check", "environment"]
# tini forwards SIGTERM, which starts the drain, and reaps orphaned processes.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "quartet-environment", "/etc/quartet/run.toml", "--log-format", "json"]
