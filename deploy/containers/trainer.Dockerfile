# The trainer; with --build-arg PROFILE=-gpu for CUDA (docs/containers.md#gpus).
#   docker build -f deploy/containers/trainer.Dockerfile -t quartet-trainer .
# Built from the checkout's root. Packages come from where pip is configured to look, or --build-arg PIP_INDEX_URL=…
ARG BASE=debian:bookworm-slim
FROM ${BASE} AS build
ARG PIP_INDEX_URL
# "-gpu": packages for CUDA; it needs the BASE of docs/containers.md.
ARG PROFILE=
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates
RUN python3 -m venv /tools && python3 -m venv --without-pip /opt/quartet/trainer
WORKDIR /src
COPY services/trainer/ services/trainer/
# torch is installed with its dependencies, which differ by build (CUDA's libraries); the rest is pinned completely.
RUN /tools/bin/pip --python /opt/quartet/trainer/bin/python install --no-cache-dir -c services/trainer/requirements${PROFILE}.txt torch \
    && /tools/bin/pip --python /opt/quartet/trainer/bin/python install --no-cache-dir --no-deps -r services/trainer/requirements${PROFILE}.txt
COPY protos/ protos/
COPY services/common/ services/common/
RUN /tools/bin/pip --python /opt/quartet/trainer/bin/python install --no-cache-dir --no-deps ./protos ./services/common ./services/trainer

FROM ${BASE}
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 tini && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --home-dir /var/lib/quartet --create-home --shell /usr/sbin/nologin quartet
COPY --from=build /opt/quartet/trainer /opt/quartet/trainer
COPY --chmod=755 deploy/containers/check.sh /usr/local/bin/quartet-check
ENV PATH=/opt/quartet/trainer/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/quartet
VOLUME /var/lib/quartet
# The run file is mounted; its [addresses] and [server] bind_host = "0.0.0.0" say where to listen (docs/containers.md).
HEALTHCHECK --interval=10s --timeout=40s --start-period=600s --retries=3 CMD ["quartet-check", "trainer"]
# tini forwards SIGTERM, which starts the drain, and reaps orphaned processes.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "quartet-trainer", "/etc/quartet/run.toml", "--log-format", "json"]
