# For tests, and for `dsx rendezvous`: PyTorch's CPU build. In a checkout:
#   python -m build --wheel
#   docker build -f configs/launch/docker/cpu.Dockerfile -t dsx:cpu \
#       --build-arg VERSION=$(python -c 'import dsx; print(dsx.__version__)') .
FROM python:3.11-slim
# DeepSpeed compiles what it needs at its first use
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ ninja-build \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir "torch>=2.6" --index-url https://download.pytorch.org/whl/cpu
# That of one version: dist/ may hold wheels of others
ARG VERSION
COPY dist/dsx_train-${VERSION}-cp310-abi3-linux_*.whl /tmp/
RUN wheel=$(ls /tmp/dsx_train-${VERSION}-cp310-abi3-linux_$(uname -m).whl) \
    && pip install --no-cache-dir "dsx-train[deepspeed,data,links] @ file://$wheel" \
    && rm "$wheel"
COPY configs/launch/node.sh /usr/local/bin/dsx-node
RUN chmod +x /usr/local/bin/dsx-node
ENV DS_ACCELERATOR=cpu
WORKDIR /work
CMD ["dsx", "doctor"]
