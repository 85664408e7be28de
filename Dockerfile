# undrop with its workbench, on CPUs.
#   docker build -t undrop .
#   docker run --rm undrop demo
#   docker run --rm -v "$PWD:/work" undrop diagnose --model mine:model --data mine:batches
FROM python:3.11-slim
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN pip install --no-cache-dir -c constraints.txt torch
COPY src src
RUN pip install --no-cache-dir -c constraints.txt '.[workbench]' && rm -rf /src
RUN useradd --create-home undrop
USER undrop
WORKDIR /work
ENTRYPOINT ["undrop"]
CMD ["--help"]
