# A node without a GPU, with the tiny model inside: for a laptop.
#   docker build -f deploy/docker/cpu-node.Dockerfile -t pdproxy-cpu-node .
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/pdproxy
COPY requirements/torch.txt requirements/cpu.txt requirements/proxy.txt requirements/
RUN /opt/pdproxy/bin/pip install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu -r requirements/torch.txt
RUN /opt/pdproxy/bin/pip install --no-deps -r requirements/cpu.txt
COPY pyproject.toml README.md LICENSE ./
COPY pdproxy pdproxy
COPY connector connector
RUN /opt/pdproxy/bin/pip install --no-deps .

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="pdproxy-cpu-node" \
      org.opencontainers.image.description="vLLM for CPUs with the pdproxy connector and its tiny hybrid model" \
      org.opencontainers.image.licenses="Apache-2.0"
# vLLM compiles small kernels when it starts.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/pdproxy /opt/pdproxy
COPY deploy/local/model/tiny-hybrid /models/tiny-hybrid
ENV PATH=/opt/pdproxy/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp \
    VLLM_SSM_CONV_STATE_LAYOUT=DS VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind TORCHDYNAMO_DISABLE=1 \
    VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
USER 65532:65532
EXPOSE 8000 5600
HEALTHCHECK --interval=5s --timeout=5s --start-period=3m --retries=6 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ.get('NODE_PORT', '8000')}/health\", timeout=4)"]
STOPSIGNAL SIGTERM
# As a module: the `vllm` command does not find itself under the name vllm-cpu.
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]
CMD ["--model", "/models/tiny-hybrid", "--served-model-name", "tiny-hybrid"]
