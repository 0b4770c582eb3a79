# The server of docs/serving.md: docker build -t evenhand . && docker run -p 8000:8000 -v ./runs/first:/runs/model:ro evenhand
FROM python:3.11-slim

# PyTorch for the CPU: the one for GPUs is gigabytes larger.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt pyproject.toml README.md LICENSE NOTICE /source/
COPY src /source/src
RUN pip install --constraint /source/constraints.txt '/source[serve,faiss,postgres]' \
    && rm -r /source \
    && useradd --create-home --uid 10001 evenhand

USER 10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["evenhand"]
CMD ["serve", "/runs/model", "--host", "0.0.0.0", "--port", "8000"]
