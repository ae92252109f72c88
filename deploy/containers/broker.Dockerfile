# The broker. Redis is another container.
#   docker build -f deploy/containers/broker.Dockerfile -t quartet-broker --build-arg QUARTET_COMMIT=$(git rev-parse HEAD) .
# Built from the checkout's root. Packages come from where pip is configured to look, or --build-arg PIP_INDEX_URL=…
# Pin it for a release: --build-arg BASE=debian@sha256:…
ARG BASE=debian:bookworm-slim
FROM ${BASE} AS build
ARG PIP_INDEX_URL
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /tools && python3 -m venv --without-pip /opt/quartet/broker
WORKDIR /src
COPY services/broker/requirements.txt services/broker/
RUN /tools/bin/pip --python /opt/quartet/broker/bin/python install --no-cache-dir --no-deps -r services/broker/requirements.txt
# The code, in a layer of its own: a new build of it is a few MB to pull.
FROM build AS code
ARG QUARTET_COMMIT
COPY LICENSE ./
COPY protos/python/ protos/python/
COPY services/common/ services/common/
COPY services/broker/ services/broker/
RUN /tools/bin/pip --python /opt/quartet/broker/bin/python install --no-cache-dir --no-deps --prefix /code ./services/broker

FROM ${BASE}
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 tini && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --home-dir /var/lib/quartet --create-home --shell /usr/sbin/nologin quartet
COPY --from=build /opt/quartet/broker /opt/quartet/broker
COPY --from=code /code /opt/quartet/broker
COPY --chmod=755 deploy/containers/check.sh /usr/local/bin/quartet-check
ENV PATH=/opt/quartet/broker/bin:$PATH PYTHONUNBUFFERED=1
ARG QUARTET_COMMIT
LABEL org.opencontainers.image.title="quartet-broker" org.opencontainers.image.licenses="Apache-2.0" org.opencontainers.image.revision="${QUARTET_COMMIT}"
USER 10001:10001
WORKDIR /var/lib/quartet
VOLUME /var/lib/quartet
# The run file is mounted; its [addresses] and [server] bind_host = "0.0.0.0" say where to listen (docs/containers.md).
HEALTHCHECK --interval=10s --timeout=40s --start-period=30s --retries=3 CMD ["quartet-check", "broker"]
# tini forwards SIGTERM, which starts the drain, and reaps orphaned processes.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "quartet-broker", "/etc/quartet/run.toml", "--log-format", "json"]
