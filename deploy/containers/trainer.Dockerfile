# The trainer; with --build-arg PROFILE=-gpu for CUDA (docs/containers.md#gpus).
#   docker build -f deploy/containers/trainer.Dockerfile -t quartet-trainer --build-arg QUARTET_COMMIT=$(git rev-parse HEAD) .
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
RUN python3 -m venv /tools && /tools/bin/pip install --no-cache-dir uv==0.13.8 && python3 -m venv --without-pip /opt/quartet/trainer
WORKDIR /src
COPY services/trainer/requirements${PROFILE}.txt services/trainer/overrides.txt services/trainer/
RUN /tools/bin/uv pip install --python /opt/quartet/trainer/bin/python --no-cache -r services/trainer/requirements${PROFILE}.txt \
        --overrides services/trainer/overrides.txt ${TORCH_BACKEND:+--torch-backend "$TORCH_BACKEND"}
# The code, in a layer of its own: a new build of it is a few MB to pull.
FROM build AS code
ARG QUARTET_COMMIT
COPY LICENSE ./
COPY protos/python/ protos/python/
COPY services/common/ services/common/
COPY services/trainer/ services/trainer/
RUN /tools/bin/pip --python /opt/quartet/trainer/bin/python install --no-cache-dir --no-deps --prefix /code ./services/trainer

FROM ${BASE}
# Debian keeps only the newest version of a package, so pinned versions would break with each update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 tini && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --home-dir /var/lib/quartet --create-home --shell /usr/sbin/nologin quartet
COPY --from=build /opt/quartet/trainer /opt/quartet/trainer
COPY --from=code /code /opt/quartet/trainer
COPY --chmod=755 deploy/containers/check.sh /usr/local/bin/quartet-check
ENV PATH=/opt/quartet/trainer/bin:$PATH PYTHONUNBUFFERED=1
ARG QUARTET_COMMIT
LABEL org.opencontainers.image.title="quartet-trainer" org.opencontainers.image.licenses="Apache-2.0" org.opencontainers.image.revision="${QUARTET_COMMIT}"
USER 10001:10001
WORKDIR /var/lib/quartet
VOLUME /var/lib/quartet
# The run file is mounted; its [addresses] and [server] bind_host = "0.0.0.0" say where to listen (docs/containers.md).
HEALTHCHECK --interval=10s --timeout=40s --start-period=600s --retries=3 CMD ["quartet-check", "trainer"]
# tini forwards SIGTERM, which starts the drain, and reaps orphaned processes.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "quartet-trainer", "/etc/quartet/run.toml", "--log-format", "json"]
