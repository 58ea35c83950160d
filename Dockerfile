# Three images: `slim` (tokenizer, scheduler, client; no torch), `worker` (with torch), and `gateway`
# (smg alone, the gateway for OpenAI clients; nothing of ours is in it).
#
#   docker build --target slim -t quire:slim .
#   docker build --target worker -t quire:worker .
#   docker build --target gateway -t quire:gateway .
#
# torch: constraints.txt fixes its version, pip picks the build. Where no CPU build is on offer, pip
# takes the CUDA one, which is several GB and is what a GPU machine needs. For the small CPU build either
# put its wheel into wheels/ or name an index that has it: --build-arg PIP_EXTRA_INDEX_URL=...
ARG BASE=python:3.12-slim

FROM ${BASE} AS base
# Services ask no hub for anything; `quire model pull` does, where HF_HUB_OFFLINE is set to 0.
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PATH=/opt/ours/bin:/opt/quire/bin:${PATH} \
    PYTHONPATH=/opt/ours \
    QUIRE_HOME=/var/lib/quire \
    HF_HUB_OFFLINE=1 \
    TRANSFORMERS_NO_ADVISORY_WARNINGS=1
# The folder must exist and belong to the user, so that a new volume mounted on it does too.
RUN groupadd --gid 10001 quire \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin quire \
 && install -d -o quire -g quire /var/lib/quire

FROM base AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
ARG PIP_EXTRA_INDEX_URL=
WORKDIR /src
RUN python -m venv /opt/quire
# `wheels*` may match nothing: the folder is there only on machines that bring wheels along.
COPY pyproject.toml constraints.txt README.md LICENSE wheels* /src/wheels/
RUN mv wheels/pyproject.toml wheels/constraints.txt wheels/README.md wheels/LICENSE . \
 && mkdir benchmarks kernels quire services \
 && touch benchmarks/__init__.py kernels/__init__.py quire/__init__.py services/__init__.py

FROM scratch AS source
COPY benchmarks /benchmarks
COPY kernels /kernels
COPY quire /quire
COPY services /services

# What others made and what is ours become two layers, so that a change of ours is a small one: first
# what others made, around empty packages that go away again.
FROM build AS build-slim
# smg-grpc-proto: the stubs of the door that the scheduler opens for the gateway.
RUN pip install -q --find-links wheels -c constraints.txt '.[tokenizer,scheduler]' smg-grpc-proto \
 && pip uninstall -q -y quire-llm

FROM build AS build-worker
RUN pip install -q --find-links wheels -c constraints.txt '.[worker]' \
 && pip uninstall -q -y quire-llm

FROM build AS build-ours
COPY --from=source / ./
RUN pip install -q --no-deps --target /opt/ours .

FROM build AS build-gateway
RUN pip install -q --find-links wheels -c constraints.txt smg

FROM base AS slim
COPY --from=build-slim /opt/quire /opt/quire
COPY --from=build-ours /opt/ours /opt/ours
USER quire
WORKDIR /tmp
CMD ["quire", "--help"]

FROM base AS worker
COPY --from=build-worker /opt/quire /opt/quire
COPY --from=build-ours /opt/ours /opt/ours
USER quire
WORKDIR /tmp
CMD ["quire-worker"]

FROM base AS gateway
COPY --from=build-gateway /opt/quire /opt/quire
USER quire
WORKDIR /tmp
CMD ["smg", "--help"]
