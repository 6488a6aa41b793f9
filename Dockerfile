# mrope on the CPU, a static program without CANN. It runs as user 10001; for outputs in a mounted
# folder, run it as the owner of the folder:
#   docker build -t mrope . && docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/data" mrope \
#     verify /data/mine.safetensors
FROM rust:1.95.0-alpine AS build
RUN apk add --no-cache musl-dev
WORKDIR /src
COPY . .
RUN cargo build --release --locked --package=rope-cli

FROM scratch
COPY --from=build /src/target/release/mrope /mrope
WORKDIR /data
# A number, since `scratch` has no names of users.
USER 10001:10001
ENTRYPOINT ["/mrope"]
