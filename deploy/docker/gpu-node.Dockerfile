# A GPU node: the official vLLM image and our connector.
#   docker build -f deploy/docker/gpu-node.Dockerfile -t pdproxy-node .
# The version is part of the NIXL handshake: prefill and decode nodes must run the same one.
ARG VLLM_VERSION=v0.33.0
FROM vllm/vllm-openai:${VLLM_VERSION}
LABEL org.opencontainers.image.title="pdproxy-node" \
      org.opencontainers.image.description="vLLM with the pdproxy connector" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /opt/pdproxy
RUN python3 -m pip install --no-cache-dir nixl==1.5.1
COPY pyproject.toml README.md LICENSE ./
COPY pdproxy pdproxy
COPY connector connector
# vLLM's own dependencies are there already, at the versions it was built with: nothing may change them.
RUN python3 -m pip install --no-cache-dir --no-deps .
WORKDIR /
ENV VLLM_SSM_CONV_STATE_LAYOUT=DS VLLM_NO_USAGE_STATS=1
EXPOSE 8000 5600
HEALTHCHECK --interval=10s --timeout=5s --start-period=20m --retries=6 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ.get('NODE_PORT', '8000')}/health\", timeout=4)"]
# The official image's entry point stays: it serves whatever follows as `vllm serve`'s arguments.
