# undrop with its workbench, on CPUs.
#   docker build -t undrop .
#   docker run --rm undrop demo
#   docker run --rm -v "$PWD:/work" undrop diagnose --model mine:model --data mine:batches
# pip's default build of torch brings gigabytes of CUDA libraries. For the CPU build, name the package index that has it:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=… -t undrop .
FROM python:3.11-slim
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN pip install --no-cache-dir -c constraints.txt torch numpy
COPY src src
RUN pip install --no-cache-dir -c constraints.txt '.[workbench]' && rm -rf /src
RUN useradd --create-home undrop
USER undrop
WORKDIR /work
ENTRYPOINT ["undrop"]
CMD ["--help"]
