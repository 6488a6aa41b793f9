//! Rotation of q and k against a plain copy of the same bytes, by the same number of threads.
//!
//! `cargo bench -p rope-benches`. In place reads and writes each byte once, as a copy does.

use divan::counter::BytesCount;
use half::{bf16, f16};
use rope_benches::{QWEN3_VL_8B, QWEN3_VL_8B_DECODE, Shape};
use rope_core::{
    Direction, Element, HeadsMut, HeadsRef, Layout, Pairing, Parallelism, Positions, RotarySpec,
    Rotator, TokenAngles,
};

fn main() {
    divan::main();
}

struct Tensors<E> {
    q: Vec<E>,
    k: Vec<E>,
    q_out: Vec<E>,
    k_out: Vec<E>,
}

impl<E: Element<Acc = f32>> Tensors<E> {
    fn new(shape: Shape) -> Self {
        let fill = |elems: usize| {
            (0..elems)
                .map(|i| E::narrow((i % 251) as f32 / 251.0 - 0.5))
                .collect::<Vec<E>>()
        };
        let (q, k) = (
            fill(shape.q(Layout::Bsnd).elems()),
            fill(shape.k(Layout::Bsnd).elems()),
        );
        Self {
            q_out: q.clone(),
            k_out: k.clone(),
            q,
            k,
        }
    }

    fn bytes(&self) -> BytesCount {
        BytesCount::new(2 * size_of::<E>() * (self.q.len() + self.k.len()))
    }
}

fn angles(shape: Shape, pairing: Pairing) -> (RotarySpec, TokenAngles) {
    let spec = RotarySpec::builder(shape.head_dim)
        .pairing(pairing)
        .theta(5e6)
        .build()
        .expect("valid");
    let positions = Positions::text(1, 0, shape.seq).expect("small");
    let angles = TokenAngles::new(&spec, &positions, None).expect("valid");
    (spec, angles)
}

/// A copy by as many threads as the rotation uses.
#[divan::bench(types = [f32, bf16])]
fn copy<E: Element<Acc = f32>>(bencher: divan::Bencher) {
    let mut tensors = Tensors::<E>::new(QWEN3_VL_8B);
    let bytes = tensors.bytes();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    bencher.counter(bytes).bench_local(|| {
        for (from, to) in [
            (&tensors.q, &mut tensors.q_out),
            (&tensors.k, &mut tensors.k_out),
        ] {
            let chunk = from.len().div_ceil(threads);
            std::thread::scope(|scope| {
                for (from, to) in from.chunks(chunk).zip(to.chunks_mut(chunk)) {
                    scope.spawn(move || to.copy_from_slice(from));
                }
            });
        }
    });
}

const CASES: [(Pairing, Layout); 6] = [
    (Pairing::Half, Layout::Bsnd),
    (Pairing::Half, Layout::Bnsd),
    (Pairing::Adjacent, Layout::Bsnd),
    (Pairing::Adjacent, Layout::Bnsd),
    (Pairing::Quarter, Layout::Bsnd),
    (Pairing::InterleaveHalf, Layout::Bsnd),
];

#[divan::bench(types = [f32, bf16, f16], args = CASES)]
fn in_place<E: Element<Acc = f32>>(bencher: divan::Bencher, (pairing, layout): (Pairing, Layout)) {
    rotate_in_place::<E>(
        bencher,
        QWEN3_VL_8B,
        pairing,
        layout,
        Parallelism::default(),
    );
}

#[divan::bench(types = [f32, bf16])]
fn decode<E: Element<Acc = f32>>(bencher: divan::Bencher) {
    rotate_in_place::<E>(
        bencher,
        QWEN3_VL_8B_DECODE,
        Pairing::Half,
        Layout::Bsnd,
        Parallelism::SERIAL,
    );
}

#[divan::bench(types = [f32, bf16])]
fn decode_copy<E: Element<Acc = f32>>(bencher: divan::Bencher) {
    let mut tensors = Tensors::<E>::new(QWEN3_VL_8B_DECODE);
    let bytes = tensors.bytes();
    bencher.counter(bytes).bench_local(|| {
        divan::black_box(&mut tensors.q_out).copy_from_slice(&tensors.q);
        divan::black_box(&mut tensors.k_out).copy_from_slice(&tensors.k);
    });
}

fn rotate_in_place<E: Element<Acc = f32>>(
    bencher: divan::Bencher,
    shape: Shape,
    pairing: Pairing,
    layout: Layout,
    parallelism: Parallelism,
) {
    let mut tensors = Tensors::<E>::new(shape);
    let (spec, angles) = angles(shape, pairing);
    let rotator = Rotator::new(spec.geometry(), angles.angles())
        .expect("valid")
        .with_parallelism(parallelism);
    let bytes = tensors.bytes();
    let mut direction = Direction::Forward;
    bencher.counter(bytes).bench_local(|| {
        let q = HeadsMut::new(&mut tensors.q, shape.q(layout)).expect("fits");
        let k = HeadsMut::new(&mut tensors.k, shape.k(layout)).expect("fits");
        rotator.apply(direction, q, Some(k.into())).expect("valid");
        direction = direction.transposed();
    });
}

#[divan::bench(types = [f32, bf16], args = CASES)]
fn into_buffers<E: Element<Acc = f32>>(
    bencher: divan::Bencher,
    (pairing, layout): (Pairing, Layout),
) {
    let mut tensors = Tensors::<E>::new(QWEN3_VL_8B);
    let (spec, angles) = angles(QWEN3_VL_8B, pairing);
    let rotator = Rotator::new(spec.geometry(), angles.angles()).expect("valid");
    let bytes = tensors.bytes();
    let (q_layout, k_layout) = (QWEN3_VL_8B.q(layout), QWEN3_VL_8B.k(layout));
    bencher.counter(bytes).bench_local(|| {
        let q = (
            HeadsRef::new(&tensors.q, q_layout).expect("fits"),
            HeadsMut::new(&mut tensors.q_out, q_layout).expect("fits"),
        );
        let k = (
            HeadsRef::new(&tensors.k, k_layout).expect("fits"),
            HeadsMut::new(&mut tensors.k_out, k_layout).expect("fits"),
        );
        rotator.rotate(q, Some(k.into())).expect("valid");
    });
}
