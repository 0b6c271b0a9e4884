# A node without a GPU, with the tiny model inside: for a laptop.
#   docker build -f deploy/docker/cpu-node.Dockerfile -t pdproxy-cpu-node .
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv --without-pip /opt/pdproxy
# What is large and seldom changes comes first: each layer is kept until its lock changes.
COPY requirements/torch.txt requirements/torch.txt
RUN pip --python /opt/pdproxy/bin/python install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu -r requirements/torch.txt
COPY requirements/cpu.txt requirements/proxy.txt requirements/
RUN pip --python /opt/pdproxy/bin/python install --no-deps -r requirements/proxy.txt -r requirements/cpu.txt
COPY connector connector
RUN pip --python /opt/pdproxy/bin/python install --no-deps ./connector

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="pdproxy-cpu-node" \
      org.opencontainers.image.description="vLLM for CPUs with the pdproxy connector and its tiny hybrid model" \
      org.opencontainers.image.base.name="docker.io/library/python:3.11-slim-bookworm" \
      org.opencontainers.image.licenses="Apache-2.0"
# vLLM compiles small kernels when it starts. No versions: Debian keeps only the latest of each.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/pdproxy /opt/pdproxy
COPY deploy/local/model/tiny-hybrid /models/tiny-hybrid
# One thread: those of a second one wait by spinning, and take the cores that the other node needs.
ENV PATH=/opt/pdproxy/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp OMP_NUM_THREADS=1 \
    VLLM_PLUGINS=pdproxy_connector,pdproxy_endpoints \
    VLLM_SSM_CONV_STATE_LAYOUT=DS VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind TORCHDYNAMO_DISABLE=1 \
    VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
USER 65532:65532
EXPOSE 8000 5600
# The interpreter asks, past any HTTP_PROXY.
HEALTHCHECK --interval=5s --timeout=5s --start-period=3m --retries=6 \
    CMD ["python", "-c", "import http.client as h, os, sys; c = h.HTTPConnection('127.0.0.1', int(os.environ.get('NODE_PORT', '8000')), timeout=4); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
STOPSIGNAL SIGTERM
# As a module: the `vllm` command does not find itself under the name vllm-cpu.
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]
# Eager: vLLM does not start where it is to compile the model and TORCHDYNAMO_DISABLE forbids it.
CMD ["--model", "/models/tiny-hybrid", "--served-model-name", "tiny-hybrid", "--enforce-eager"]
