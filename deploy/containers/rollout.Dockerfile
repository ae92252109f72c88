# A rollout with vLLM's CPU build, or with --build-arg PROFILE=-gpu its CUDA build (docs/containers.md#gpus).
#   docker build -f deploy/containers/rollout.Dockerfile -t quartet-rollout --build-arg QUARTET_COMMIT=$(git rev-parse HEAD) .
# Built from the checkout's root. Packages come from PyPI, or from --build-arg PIP_INDEX_URL=…
ARG BASE=debian:bookworm-slim
FROM ${BASE} AS build
ARG PIP_INDEX_URL
ENV UV_DEFAULT_INDEX=${PIP_INDEX_URL}
# "-gpu": packages for CUDA; it needs the BASE of docs/containers.md.
ARG PROFILE=
# The CPU build of torch, which only PyTorch's own index has. Empty, for CUDA or an index that has it: the index alone.
ARG TORCH_BACKEND=cpu
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /tools && /tools/bin/pip install --no-cache-dir uv==0.13.8 && python3 -m venv --without-pip /opt/quartet/rollout
WORKDIR /src
COPY services/rollout/requirements${PROFILE}.txt services/rollout/overrides.txt services/rollout/
RUN /tools/bin/uv pip install --python /opt/quartet/rollout/bin/python --no-cache -r services/rollout/requirements${PROFILE}.txt \
        --overrides services/rollout/overrides.txt ${TORCH_BACKEND:+--torch-backend "$TORCH_BACKEND"}
# The code, in a layer of its own: a new build of it is a few MB to pull.
FROM build AS code
ARG QUARTET_COMMIT
COPY LICENSE ./
COPY protos/python/ protos/python/
COPY services/common/ services/common/
COPY services/rollout/ services/rollout/
RUN /tools/bin/pip --python /opt/quartet/rollout/bin/python install --no-cache-dir --no-deps --prefix /code ./services/rollout

FROM ${BASE}
# vLLM compiles small kernels when it starts, so it needs a compiler at run time.
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-dev gcc g++ libnuma1 tini && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --home-dir /var/lib/quartet --create-home --shell /usr/sbin/nologin quartet
COPY --from=build /opt/quartet/rollout /opt/quartet/rollout
COPY --from=code /code /opt/quartet/rollout
COPY --chmod=755 deploy/containers/check.sh /usr/local/bin/quartet-check
ENV PATH=/opt/quartet/rollout/bin:$PATH PYTHONUNBUFFERED=1
ARG QUARTET_COMMIT
LABEL org.opencontainers.image.title="quartet-rollout" org.opencontainers.image.licenses="Apache-2.0" org.opencontainers.image.revision="${QUARTET_COMMIT}"
USER 10001:10001
WORKDIR /var/lib/quartet
VOLUME /var/lib/quartet
# The run file is mounted; its [addresses] and [server] bind_host = "0.0.0.0" say where to listen (docs/containers.md).
HEALTHCHECK --interval=10s --timeout=40s --start-period=600s --retries=3 CMD ["quartet-check", "rollout"]
# tini forwards SIGTERM, which starts the drain, and reaps orphaned processes.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "quartet-rollout", "/etc/quartet/run.toml", "--log-format", "json"]
