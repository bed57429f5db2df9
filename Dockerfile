# docker build --target cpu  -t flowrl:cpu .      tests, tiny models, docs
# docker build --target cuda -t flowrl:cuda .     training: docker run --gpus all --shm-size 8g -v "$PWD:/work" flowrl:cuda train recipe.yaml
# The stages differ in their base alone: the wheels of torch for Linux hold CUDA's libraries, the driver is the host's.
# uv installs several times faster than pip.

FROM python:3.11-slim AS cpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgl1 libglib2.0-0 \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY flowrl /src/flowrl
COPY rewards /src/rewards
COPY assets /src/assets
COPY configs /src/configs
RUN python -m pip install --no-cache-dir uv \
    && uv pip install --python "$(command -v python)" --no-cache --compile-bytecode \
        --constraint /src/constraints.txt "/src[ocr,serve,data,trackers]" \
    && python -m pip uninstall --yes uv && rm -rf /src
WORKDIR /work
ENTRYPOINT ["flowrl"]
CMD ["--help"]

FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04 AS cuda
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv build-essential python3-dev libgl1 libglib2.0-0 \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/flowrl
ENV PATH=/opt/flowrl/bin:$PATH
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY flowrl /src/flowrl
COPY rewards /src/rewards
COPY assets /src/assets
COPY configs /src/configs
RUN python -m pip install --no-cache-dir uv \
    && uv pip install --python "$(command -v python)" --no-cache --compile-bytecode \
        --constraint /src/constraints.txt "/src[ocr,serve,data,trackers,quant]" \
    && python -m pip uninstall --yes uv && rm -rf /src
WORKDIR /work
ENTRYPOINT ["flowrl"]
CMD ["--help"]
