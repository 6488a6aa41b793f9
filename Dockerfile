# mrope on the CPU, a static program without CANN:
#   docker build -t mrope . && docker run --rm -v "$PWD:/data" mrope verify /data/mine.safetensors
FROM rust:1.95-alpine AS build
RUN apk add --no-cache musl-dev
WORKDIR /src
COPY . .
RUN cargo build --release --locked --package=rope-cli

FROM scratch
COPY --from=build /src/target/release/mrope /mrope
WORKDIR /data
ENTRYPOINT ["/mrope"]
