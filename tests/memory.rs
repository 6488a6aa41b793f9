//! The memory that the autodiff graph keeps and that forward and backward allocate, by a counting
//! allocator: fused against composed against `burn::nn::RotaryEncoding`.
//!
//! One test in a file of its own: the allocator counts the whole process, other tests' threads
//! included.

use burn::nn::{RotaryEncoding, RotaryEncodingConfig};
use burn::tensor::{Device, Distribution, Tensor};
use rope_burn::rope_core::{Layout, Pairing, Positions, RotarySpec};
use rope_burn::{Implementation, Rotary, RotaryAngles};
use rope_check::alloc::{CountingAllocator, Usage};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

const SEQ: usize = 256;
const HEADS: usize = 8;
const HEAD_DIM: usize = 64;
/// Bytes of q; k is as large, for `RotaryEncoding` knows no other.
const Q_BYTES: usize = SEQ * HEADS * HEAD_DIM * 4;
/// The bytes that a layer's two nodes may take in the graph itself.
const BOOKKEEPING_BYTES: isize = 4 << 10;

#[allow(clippy::large_enum_variant, reason = "one of each in a run")]
enum Scheme {
    Ours(Rotary, RotaryAngles),
    Inverse(Rotary, RotaryAngles),
    Burn(RotaryEncoding),
}

impl Scheme {
    fn rotate(&self, q: Tensor<4>, k: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        match self {
            Self::Ours(rotary, angles) => rotary.forward(q, k, angles),
            Self::Inverse(rotary, angles) => (
                rotary.adjoint_single(q, angles),
                rotary.adjoint_single(k, angles),
            ),
            Self::Burn(encoding) => (encoding.forward(q), encoding.forward(k)),
        }
    }
}

/// Forward and backward of q and k through `layers` rotations.
fn run(scheme: &Scheme, layers: usize, device: &Device) -> (Usage, Usage) {
    let random = || {
        Tensor::<4>::random([1, HEADS, SEQ, HEAD_DIM], Distribution::Default, device).require_grad()
    };
    let (q, k) = (random(), random());
    // A product in front, so that the first rotation's input is uniquely held and not a leaf.
    let (start_q, start_k) = (q.clone() * 2.0, k.clone() * 2.0);
    let ((q_out, k_out), forward) = ALLOCATOR.measure(Q_BYTES, || {
        (0..layers).fold((start_q, start_k), |(q, k), _| scheme.rotate(q, k))
    });
    let loss = q_out.sum() + k_out.sum();
    let (gradients, backward) = ALLOCATOR.measure(Q_BYTES, || loss.backward());
    assert!(q.grad(&gradients).is_some() && k.grad(&gradients).is_some());
    (forward, backward)
}

/// The amounts that one layer adds: (bytes kept by forward, large allocations of forward, large
/// allocations of backward).
fn per_layer(name: &str, scheme: &Scheme, device: &Device) -> (isize, usize, usize) {
    run(scheme, 1, device); // pools and tables are made on first use
    let ((forward_1, backward_1), (forward_16, backward_16)) =
        (run(scheme, 1, device), run(scheme, 16, device));
    let kept = (forward_16.retained_bytes - forward_1.retained_bytes) / 15;
    let large =
        |sixteen: Usage, one: Usage| (sixteen.large_allocations - one.large_allocations) / 15;
    let row = (
        kept,
        large(forward_16, forward_1),
        large(backward_16, backward_1),
    );
    println!(
        "{name:28} keeps {kept:>8} B a layer; q-sized allocations a layer: {} forward, {} backward; peak of 16: {:>9} B \
         forward, {:>9} B backward",
        row.1, row.2, forward_16.peak_bytes, backward_16.peak_bytes
    );
    row
}

#[test]
fn the_graph_keeps_no_tensor_and_makes_no_temporary() {
    let spec = RotarySpec::builder(HEAD_DIM)
        .pairing(Pairing::Adjacent)
        .build()
        .expect("a valid specification");
    let positions = Positions::text(1, 0, SEQ).expect("small positions");
    println!("q and k: {Q_BYTES} B each");
    for checkpointing in [false, true] {
        let plain = Device::flex().autodiff();
        let device = if checkpointing {
            plain.gradient_checkpointing()
        } else {
            plain
        };
        println!("gradient checkpointing: {checkpointing}");
        let rotary = Rotary::new(spec.clone(), Layout::Bnsd);
        let angles = rotary.angles(&positions, &device);
        let ours = |implementation| {
            Scheme::Ours(
                rotary.clone().with_implementation(implementation),
                angles.clone(),
            )
        };
        let inverse = Scheme::Inverse(rotary.clone(), angles.clone());
        for (name, scheme) in [("fused", ours(Implementation::Fused)), ("inverse", inverse)] {
            let (kept, forward, backward) = per_layer(name, &scheme, &device);
            assert!(
                kept <= BOOKKEEPING_BYTES,
                "{name}: the fused graph keeps {kept} bytes a layer"
            );
            assert_eq!(
                (forward, backward),
                (0, 0),
                "{name}: the fused rotation makes temporaries of q's size"
            );
        }

        // The same measurement must see the others' tensors, or it could not fail.
        let (_, forward, backward) =
            per_layer("composed", &ours(Implementation::Composed), &device);
        assert!(
            forward > 0 && backward > 0,
            "the measurement misses the composed temporaries"
        );
        let encoding = RotaryEncodingConfig::new(SEQ, HEAD_DIM).init(&device);
        let (_, forward, backward) =
            per_layer("burn::nn::RotaryEncoding", &Scheme::Burn(encoding), &device);
        assert!(
            forward > 0 && backward > 0,
            "the measurement misses RotaryEncoding's temporaries"
        );
    }
}
