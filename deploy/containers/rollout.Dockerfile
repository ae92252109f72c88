# A rollout with vLLM's CPU build, or with --build-arg PROFILE=-gpu its CUDA build (docs/containers.md#gpus).
#   docker build -f deploy/containers/rollout.Dockerfile -t quartet-rollout .
# Built from the checkout's root. Packages come from where pip is configured to look, or --build-arg PIP_INDEX_URL=…
ARG BASE=debian:bookworm-slim
FROM ${BASE} AS build
ARG PIP_INDEX_URL
# "-gpu": packages for CUDA; it needs the BASE of docs/containers.md.
ARG PROFILE=
# vLLM's CPU build needs torch's CPU build, which only PyTorch's own index has. Empty, for CUDA: use pip's index alone.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates
RUN python3 -m venv /tools && python3 -m venv --without-pip /opt/quartet/rollout
WORKDIR /src
COPY services/rollout/ services/rollout/
# torch is installed with its dependencies, which differ by build (CUDA's libraries); the rest is pinned completely.
RUN /tools/bin/pip --python /opt/quartet/rollout/bin/python install --no-cache-dir -c services/rollout/requirements${PROFILE}.txt torch ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} \
    && /tools/bin/pip --python /opt/quartet/rollout/bin/python install --no-cache-dir --no-deps -r services/rollout/requirements${PROFILE}.txt
COPY protos/ protos/
COPY services/common/ services/common/
RUN /tools/bin/pip --python /opt/quartet/rollout/bin/python install --no-cache-dir --no-deps ./protos ./services/common ./services/rollout

FROM ${BASE}
# vLLM compiles small kernels when it starts, so it needs a compiler at run time.
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-dev gcc g++ libnuma1 tini && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --home-dir /var/lib/quartet --create-home --shell /usr/sbin/nologin quartet
COPY --from=build /opt/quartet/rollout /opt/quartet/rollout
COPY --chmod=755 deploy/containers/check.sh /usr/local/bin/quartet-check
ENV PATH=/opt/quartet/rollout/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/quartet
VOLUME /var/lib/quartet
# The run file is mounted; its [addresses] and [server] bind_host = "0.0.0.0" say where to listen (docs/containers.md).
HEALTHCHECK --interval=10s --timeout=40s --start-period=600s --retries=3 CMD ["quartet-check", "rollout"]
# tini forwards SIGTERM, which starts the drain, and reaps orphaned processes.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "quartet-rollout", "/etc/quartet/run.toml", "--log-format", "json"]
