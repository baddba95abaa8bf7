# For ranks on GPUs: the CUDA toolkit is there for what DeepSpeed compiles at its first use. In a checkout:
#   python -m build --wheel
#   docker build -f configs/launch/docker/cuda.Dockerfile -t dsx:cuda \
#       --build-arg VERSION=$(python -c 'import dsx; print(dsx.__version__)') .
FROM pytorch/pytorch:2.8.0-cuda12.8-cudnn9-devel
# That of one version: dist/ may hold wheels of others
ARG VERSION
COPY dist/dsx_train-${VERSION}-cp310-abi3-linux_*.whl /tmp/
RUN wheel=$(ls /tmp/dsx_train-${VERSION}-cp310-abi3-linux_$(uname -m).whl) \
    && pip install --no-cache-dir "dsx-train[deepspeed,data,links] @ file://$wheel" \
    && rm "$wheel"
COPY configs/launch/node.sh /usr/local/bin/dsx-node
RUN chmod +x /usr/local/bin/dsx-node
WORKDIR /work
CMD ["dsx", "doctor"]
