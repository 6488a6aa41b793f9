// What the host tells the rotary kernels. Mirrored in crates/rope-ascend/src/rope/args.rs; size and
// offsets are asserted on both sides. Strides and lengths count elements unless the name says
// otherwise.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rope {

constexpr uint32_t kTensors = 2;   // q, k
constexpr uint32_t kSegments = 4;  // most channel runs that a pairing cuts a head into
constexpr uint32_t kSpans = 3;     // rotated channels, those before them, those after them

// How the rows (one head of one token) of q or k lie in global memory.
struct Tensor {
    uint64_t extent;  // from the first element to one past the last
    uint64_t batch_stride;
    uint64_t token_stride;
    uint64_t head_stride;
};

// Channels of a row that are moved together: `pieces` runs of `length`, one after the other in
// global memory; in the unified buffer each starts at a multiple of 32 bytes.
struct Span {
    uint32_t channel;
    uint32_t length;
    uint32_t pieces;
};

// How rows of one span become transfers.
struct Route {
    uint8_t fold;   // axis that is contiguous with the run and becomes part of it: kFold*
    uint8_t count;  // axis that one transfer runs over: kCount*
};

constexpr uint8_t kFoldNone = 0, kFoldPieces = 1, kFoldHeads = 2, kFoldTokens = 3;
constexpr uint8_t kCountPieces = 0, kCountHeads = 1, kCountTokens = 2;

struct Tiling {
    Tensor input[kTensors];   // x
    Tensor output[kTensors];  // y; for the angle gradient, the gradient of y
    // Tokens are counted over the batches: token = batch * seq + position in the batch.
    uint64_t tokens;
    uint64_t seq;
    uint64_t angle_batch_stride;  // rows of angles between batches; 0 shares them
    uint64_t angle_rows;
    uint32_t heads[kTensors];
    uint32_t head_groups;  // parts that a token's heads are split into when there are few tokens
    uint32_t tokens_per_tile;
    uint32_t heads_per_tile;
    uint32_t slots;       // tiles in flight
    uint32_t head_major;  // tile order in the unified buffer: 0 token, head; 1 head, token
    uint32_t segments;
    uint32_t segment_length;
    // Where the four segments of a quarter pairing lie in a slot while the arithmetic sees two, the
    // first members of all pairs and the second ones; else 0.
    uint32_t quarter_length;
    uint32_t quarter_pitch;
    uint32_t row_pitch;  // elements of a row in a slot, and f32 of a row in the work area
    Span load[kSpans];
    Span store[kSpans];
    Route load_route[kSpans][kTensors];
    Route store_route[kSpans][kTensors];
    // Coefficients of a token: y[k] = a[k] * x[k] +- b[k] * x[partner of k], for each segment k.
    uint32_t a_offset[kSegments];
    uint32_t b_offset[kSegments];
    uint32_t b_negative;   // bit k: the second term is subtracted
    uint32_t angle_width;  // W: cosines of a row, and sines
    uint32_t angle_pieces;
    uint32_t angle_length;
    uint32_t raw_pitch;   // f32 of a token's angles as loaded
    uint32_t coef_pitch;  // f32 of a token's coefficients
    uint32_t expand;      // coefficients are gathered from the loaded angles
    uint32_t map_words;   // words of the map (see rope_base.h)
    // Of rope_matrix.h: 1, or 2 where x is permuted too.
    uint32_t products;
    uint32_t reserved;
};

constexpr uint32_t kRuns = kSegments + 2;  // most runs of a row's channels

// Of the norm with the rotation. Of `rope`, the input is x and the output y, or the gradient of x;
// rows are whole heads; the coefficients are those of the forward.
struct NormTiling {
    Tiling rope;
    Tensor gradient[kTensors];  // of y
    Span gradient_load[kSpans];
    Route gradient_route[kSpans][kTensors];
    // Where the spans start in a row.
    uint32_t load_start[kSpans];
    uint32_t store_start[kSpans];
    uint32_t gradient_start[kSpans];
    uint32_t segment_start;  // in a row: of the first segment, and the distance of the segments
    uint32_t segment_pitch;
    uint32_t rotary_offset;  // channels before the rotated ones
    // Runs of lanes that hold the channels of a row.
    uint32_t runs;
    uint32_t run_start[kRuns];
    uint32_t run_length[kRuns];
    uint32_t adjoint_a_offset[kSegments];
    uint32_t adjoint_b_offset[kSegments];
    uint32_t adjoint_b_negative;
    uint32_t head_dim;
    uint32_t after;  // the norm comes after the rotation
    float inv_head_dim;
    float eps;
    float weight_offset;  // added to the weights: 0 or 1
    uint32_t reserved;
};

constexpr uint32_t kLowRankSlots = 3;   // tiles in flight
constexpr uint32_t kLowRankChunk = 8;   // ranks whose values are spread over blocks at once
constexpr uint32_t kLowRankPlanes = 2;  // products of a rank with a tile's columns

// Of rope_low_rank.h.
struct LowRankTiling {
    uint64_t rows;
    uint64_t part_stride;  // f32 between the parts of h
    uint32_t columns;
    uint32_t rank;
    uint32_t parts;        // 1 or 2
    uint32_t row_tile;     // a multiple of 16, at most 240
    uint32_t column_tile;  // a multiple of 64
    uint32_t stores_h;     // of 16-bit types alone
};

// Of rope_short_convolution.h.
struct ShortConvolutionTiling {
    uint64_t rows;
    uint32_t channels;
    uint32_t taps;
    uint32_t sequences;
    uint32_t parts;        // of the rows, at most one for each of their tiles
    uint32_t row_tile;
    uint32_t column_tile;  // a multiple of 64
};

// Of the kernels over dense tensors: rope_swiglu.h, and the sums of rope_update.h.
struct DenseTiling {
    uint64_t elements;
    uint32_t tile;  // elements of a tile: a multiple of 64, of sums a power of two
    uint32_t reserved;
};

// Of the update of rope_update.h.
struct AdamWTiling {
    uint64_t elements;
    uint32_t tile;  // elements of a tile, a multiple of 64
    float scale;
    float of_gradient;
    float of_square;
    float kept;
    float correction;
    float epsilon;
    float stay;
    float step;
    uint32_t reserved;
};

constexpr uint32_t kDeltaNumbers = 6;  // rows of numbers of a chunk's tokens

// Of rope_delta.h.
struct DeltaTiling {
    uint64_t tokens;    // of a sample
    uint64_t units;     // chunks times matrices
    uint32_t matrices;  // samples times heads
    uint32_t first_chunk;
    uint32_t key_heads;
    uint32_t heads;
    uint32_t key_dim;    // multiples of 8
    uint32_t value_dim;
    uint32_t row_tile;  // tokens of a tile: 8, 16, 32 or 64
    uint32_t keeps;     // v, P and the output's gradient are stored
    float scale;        // of q
    float epsilon;
};

static_assert(sizeof(Tensor) == 32, "mirrored in args.rs");
static_assert(sizeof(Span) == 12, "mirrored in args.rs");
static_assert(sizeof(Route) == 2, "mirrored in args.rs");
static_assert(sizeof(Tiling) == 376, "mirrored in args.rs");
static_assert(alignof(Tiling) == 8, "mirrored in args.rs");
static_assert(offsetof(Tiling, tokens) == 128, "mirrored in args.rs");
static_assert(offsetof(Tiling, heads) == 160, "mirrored in args.rs");
static_assert(offsetof(Tiling, load) == 208, "mirrored in args.rs");
static_assert(offsetof(Tiling, load_route) == 280, "mirrored in args.rs");
static_assert(offsetof(Tiling, a_offset) == 304, "mirrored in args.rs");
static_assert(offsetof(Tiling, map_words) == 364, "mirrored in args.rs");
static_assert(sizeof(NormTiling) == 648, "mirrored in args.rs");
static_assert(offsetof(NormTiling, gradient) == 376, "mirrored in args.rs");
static_assert(offsetof(NormTiling, load_start) == 488, "mirrored in args.rs");
static_assert(offsetof(NormTiling, run_start) == 540, "mirrored in args.rs");
static_assert(offsetof(NormTiling, adjoint_a_offset) == 588, "mirrored in args.rs");
static_assert(offsetof(NormTiling, weight_offset) == 640, "mirrored in args.rs");
static_assert(sizeof(LowRankTiling) == 40, "mirrored in args.rs");
static_assert(offsetof(LowRankTiling, columns) == 16, "mirrored in args.rs");
static_assert(sizeof(ShortConvolutionTiling) == 32, "mirrored in args.rs");
static_assert(offsetof(ShortConvolutionTiling, channels) == 8, "mirrored in args.rs");
static_assert(sizeof(DenseTiling) == 16, "mirrored in args.rs");
static_assert(sizeof(AdamWTiling) == 48, "mirrored in args.rs");
static_assert(offsetof(AdamWTiling, scale) == 12, "mirrored in args.rs");
static_assert(sizeof(DeltaTiling) == 56, "mirrored in args.rs");
static_assert(offsetof(DeltaTiling, scale) == 48, "mirrored in args.rs");

}  // namespace rope
