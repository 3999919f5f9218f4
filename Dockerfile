# onnxfuse for hosts with NVIDIA GPUs:
#
#   docker build -t onnxfuse .
#   docker run --rm --gpus all --user "$(id -u)" -v "$PWD:/models" onnxfuse optimize model.onnx fused.onnx
#
# The CUDA libraries are those of the Python packages; the driver is the host's, which the NVIDIA Container Toolkit
# brings into the container.
FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
# cuBLASLt, cuDNN and NVRTC come with the packages of the extra.
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[cuda]" && rm -rf /wheels
# Without these, the toolkit offers the container no GPU.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Kernels and measurements outlive the container if this folder is a volume.
ENV ONNXFUSE_CACHE_DIR=/cache CUPY_CACHE_DIR=/cache/cupy
RUN mkdir --mode=1777 /cache
VOLUME /cache
USER 1000
WORKDIR /models
ENTRYPOINT ["onnxfuse"]
CMD ["--help"]
