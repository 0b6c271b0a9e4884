# A GPU node: the official vLLM image and our connector.
#   docker build -f deploy/docker/gpu-node.Dockerfile -t pdproxy-node .
# The version is part of the NIXL handshake: prefill and decode nodes must run the same one.
ARG VLLM_VERSION=v0.33.0

FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY connector connector
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ./connector

FROM vllm/vllm-openai:${VLLM_VERSION}
ARG VLLM_VERSION
LABEL org.opencontainers.image.title="pdproxy-node" \
      org.opencontainers.image.description="vLLM with the pdproxy connector" \
      org.opencontainers.image.base.name="docker.io/vllm/vllm-openai:${VLLM_VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# vLLM's own dependencies are there already, torch and numpy too, at the versions it was built with: nothing may change them.
# Of NIXL the one wheel for the CUDA that torch was built for, which `import nixl` looks for by the same number. Another NIXL of the
# base image goes first. The wheel brings UCX and its modules along: UCX_MODULE_DIR stays unset (docs/network.md).
RUN cuda="$(python3 -c 'import torch; print(torch.version.cuda.partition(".")[0])')" \
    && python3 -m pip uninstall --yes nixl nixl-cu12 nixl-cu13 \
    && python3 -m pip install --no-cache-dir --no-deps nixl==1.5.1 "nixl-cu${cuda}==1.5.1"
COPY --from=build /wheels /wheels
RUN python3 -m pip install --no-cache-dir --no-deps /wheels/*.whl
ENV VLLM_SSM_CONV_STATE_LAYOUT=DS VLLM_NO_USAGE_STATS=1 VLLM_PLUGINS=pdproxy_connector,pdproxy_endpoints
EXPOSE 8000 5600
# The interpreter asks, past any HTTP_PROXY; by HTTPS where NODE_TLS says so, whoever signed. Two hours: a node that loads a model of 400 GB from a slow disk is not ill.
HEALTHCHECK --interval=10s --timeout=5s --start-period=2h --retries=6 \
    CMD ["python3", "-c", "import http.client as h, os, ssl, sys; e = os.environ; t = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT); t.check_hostname = False; t.verify_mode = ssl.CERT_NONE; a = ('127.0.0.1', int(e.get('NODE_PORT', '8000'))); c = h.HTTPSConnection(*a, timeout=4, context=t) if e.get('NODE_TLS') else h.HTTPConnection(*a, timeout=4); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
STOPSIGNAL SIGTERM
# The official image's own entry point, said once more: what follows it in compose.yaml and in the chart depends on it.
ENTRYPOINT ["vllm", "serve"]
