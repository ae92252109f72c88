# The `quartet` command, e.g. `run FILE.toml --attach`: creates a run at services that run elsewhere, and feeds it.
#   docker build -f deploy/containers/client.Dockerfile -t quartet-client --build-arg QUARTET_COMMIT=$(git rev-parse HEAD) .
# Built from the checkout's root. Packages come from where pip is configured to look, or --build-arg PIP_INDEX_URL=…
# Pin it for a release: --build-arg BASE=debian@sha256:…
ARG BASE=debian:bookworm-slim
FROM ${BASE} AS build
ARG PIP_INDEX_URL
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /tools && python3 -m venv --without-pip /opt/quartet/client
WORKDIR /src
COPY client/requirements.txt client/
RUN /tools/bin/pip --python /opt/quartet/client/bin/python install --no-cache-dir --no-deps -r client/requirements.txt
# The code, in a layer of its own: a new build of it is a few MB to pull.
FROM build AS code
ARG QUARTET_COMMIT
COPY LICENSE ./
COPY protos/python/ protos/python/
COPY services/common/ services/common/
COPY tests/contract/suite/ tests/contract/suite/
COPY client/ client/
RUN /tools/bin/pip --python /opt/quartet/client/bin/python install --no-cache-dir --no-deps --prefix /code ./client

FROM ${BASE}
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 tini && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --home-dir /var/lib/quartet --create-home --shell /usr/sbin/nologin quartet
COPY --from=build /opt/quartet/client /opt/quartet/client
COPY --from=code /code /opt/quartet/client
ENV PATH=/opt/quartet/client/bin:$PATH PYTHONUNBUFFERED=1
ARG QUARTET_COMMIT
LABEL org.opencontainers.image.title="quartet-client" org.opencontainers.image.licenses="Apache-2.0" org.opencontainers.image.revision="${QUARTET_COMMIT}"
USER 10001:10001
WORKDIR /var/lib/quartet
HEALTHCHECK NONE
# tini forwards SIGTERM and reaps orphaned processes.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "quartet"]
