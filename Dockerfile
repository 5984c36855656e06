# syntax=docker/dockerfile:1

# A static binary in an image with nothing else: no shell, no libraries, no root.

FROM rust:1.95-slim-bookworm AS build
# Whatever patch release of these Debian has will do: they end up in no image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends musl-tools \
    && rm -rf /var/lib/apt/lists/*
RUN rustup target add "$(uname -m)-unknown-linux-musl"
WORKDIR /src
COPY Cargo.toml Cargo.lock ./
COPY src src
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked --target "$(uname -m)-unknown-linux-musl" \
    && cp "target/$(uname -m)-unknown-linux-musl/release/mcp-sidecar" /mcp-sidecar \
    && mkdir /state

FROM scratch
COPY --from=build /mcp-sidecar /mcp-sidecar
COPY --from=build --chown=65532:65532 /state /var/lib/mcp-sidecar
ENV STATE_DIRECTORY=/var/lib/mcp-sidecar
USER 65532:65532
EXPOSE 7080
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s CMD ["/mcp-sidecar", "health"]
ENTRYPOINT ["/mcp-sidecar"]
CMD ["serve"]
