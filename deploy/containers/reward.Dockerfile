# The reward service, with its sandbox.
#   docker build -f deploy/containers/reward.Dockerfile -t quartet-reward .
# Built from the checkout's root. Packages come from where pip is configured to look, or --build-arg PIP_INDEX_URL=…
FROM debian:bookworm-slim AS build
ARG PIP_INDEX_URL
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates
RUN python3 -m venv /tools && python3 -m venv --without-pip /opt/quartet/reward
WORKDIR /src
COPY services/reward/ services/reward/
RUN /tools/bin/pip --python /opt/quartet/reward/bin/python install --no-cache-dir --no-deps -r services/reward/requirements.txt
COPY protos/ protos/
COPY services/common/ services/common/
RUN /tools/bin/pip --python /opt/quartet/reward/bin/python install --no-cache-dir --no-deps ./protos ./services/common ./services/reward

FROM debian:bookworm-slim
# The sandbox needs user namespaces, which container engines forbid by default: docs/containers.md.
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 tini && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --home-dir /var/lib/quartet --create-home --shell /usr/sbin/nologin quartet
COPY --from=build /opt/quartet/reward /opt/quartet/reward
ENV PATH=/opt/quartet/reward/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/quartet
VOLUME /var/lib/quartet
# The run file is mounted; its [addresses] and [server] bind_host = "0.0.0.0" say where to listen (docs/containers.md).
HEALTHCHECK --interval=10s --timeout=6s --start-period=600s --retries=3 CMD ["python", "-m", "quartet_common.probe", "reward", "/etc/quartet/run.toml"]
# tini forwards SIGTERM, which starts the drain, and reaps orphaned processes.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "quartet-reward", "/etc/quartet/run.toml", "--log-format", "json"]
