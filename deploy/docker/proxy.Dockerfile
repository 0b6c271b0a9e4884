# The proxy: slim, non-root, fine with a read-only root file system, no torch.
#   docker build -f deploy/docker/proxy.Dockerfile -t pdproxy .
# Its Python is built with a profile of how it runs: a quarter fewer instructions (docs/decisions/request-cost.md#interpreters).
# The full image has binutils; nothing of it but the environment is in the result.
FROM python:3.13-trixie AS build
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv --without-pip /opt/pdproxy
# The lock first: it changes less often than the code, and the layer is kept. The extras are in it.
COPY requirements/proxy.txt requirements/proxy.txt
RUN pip --python /opt/pdproxy/bin/python install --no-deps -r requirements/proxy.txt
# The full image has a C compiler as well: pdproxy/stream/_scan.c is built (hatch_build.py).
COPY pyproject.toml hatch_build.py LICENSE ./
COPY pdproxy pdproxy
# uvloop's wheel comes with debugging symbols: 11 of its 13 MB.
RUN pip --python /opt/pdproxy/bin/python install --no-deps . && \
    find /opt/pdproxy -name '*.so' -exec strip --strip-debug {} +

FROM python:3.13-slim-trixie
LABEL org.opencontainers.image.title="pdproxy" \
      org.opencontainers.image.description="Prefill/decode proxy for hybrid models on vLLM" \
      org.opencontainers.image.base.name="docker.io/library/python:3.13-slim-trixie" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/pdproxy /opt/pdproxy
ENV PATH=/opt/pdproxy/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    PDPROXY_LISTEN_HOST=0.0.0.0 PDPROXY_LISTEN_ADMIN_HOST=0.0.0.0 PDPROXY_LISTEN_ADMIN_PORT=8081 PDPROXY_LOG_FORMAT=json
USER 65532:65532
EXPOSE 8080 8081
# No curl in the image: the interpreter asks, past any HTTP_PROXY, at the address above or whatever replaces it.
# Alive is enough here; readiness is the orchestrator's question.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import http.client as h, os, sys; e = os.environ; c = h.HTTPConnection(e['PDPROXY_LISTEN_ADMIN_HOST'], int(e['PDPROXY_LISTEN_ADMIN_PORT']), timeout=4); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
# Exec form: signals reach the proxy itself, which lets streams end within deadlines.shutdown.
STOPSIGNAL SIGTERM
ENTRYPOINT ["pdproxy"]
CMD ["serve"]
