//! Every wrong input has a separate error with the expectation, the value found and the remedy.

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor};
use rope_burn::rope_core::{
    AxisLayout, CosSinTable, Direction, Geometry, HeadsLayout, HeadsMut, HeadsRef, Layout, Pairing,
    Positions, RopeError, RotarySpec, Rotator, TokenAngles,
};
use rope_burn::{Implementation, OpError, Rotary, RotaryAngles, RotaryError, RotaryOp, RotaryOps};

/// Rows of a result, the variant of its error, and words that the message has.
macro_rules! refused {
    ($($result:expr => $pattern:pat, $($word:expr),+;)+) => {$({
        let error = match $result {
            Ok(_) => panic!("{} was accepted", stringify!($result)),
            Err(error) => error,
        };
        assert!(matches!(error, $pattern), "{error:?}");
        let message = error.to_string();
        assert!(!message.contains('\n'), "more than one line: {message}");
        $(assert!(message.contains($word), "`{}` is not in: {message}", $word);)+
    })+};
}

fn spec(head_dim: usize) -> RotarySpec {
    RotarySpec::builder(head_dim)
        .build()
        .expect("a valid specification")
}

#[test]
fn geometry() {
    refused! {
        RotarySpec::builder(0).build() =>
            RopeError::HeadDim { found: 0, .. }, "head_dim", "found 0";
        RotarySpec::builder(64).rotary_dim(31).build() =>
            RopeError::OddRotaryDim { found: 31 }, "even", "found 31";
        RotarySpec::builder(64).rotary_dim(0).build() =>
            RopeError::OddRotaryDim { found: 0 }, "at least 2";
        RotarySpec::builder(64).rotary_dim(48).rotary_offset(32).build() =>
            RopeError::RotaryOutsideHead { rotary_dim: 48, offset: 32, head_dim: 64 },
            "48", "offset 32", "head_dim 64";
        RotarySpec::builder(64).rotary_dim(2).rotary_offset(usize::MAX).build() =>
            RopeError::RotaryOutsideHead { .. }, "does not fit";
        RotarySpec::builder(64).rotary_dim(30).pairing(Pairing::Quarter).build() =>
            RopeError::PairingDivisibility { divisor: 4, found: 30, .. },
            "Quarter", "divisible by 4";
    }
}

#[test]
fn sections() {
    let axes = |layout| RotarySpec::builder(128).axis_layout(layout).build();
    refused! {
        axes(AxisLayout::Contiguous(vec![16, 24, 23])) =>
            RopeError::SectionSum { sum: 63, expected: 64, .. },
            "[16, 24, 23]", "rotary_dim/2 = 64";
        // Sections that count channels instead of pairs.
        axes(AxisLayout::Striped(vec![48, 40, 40])) =>
            RopeError::SectionSum { sum: 128, .. }, "count pairs";
        axes(AxisLayout::Contiguous(vec![usize::MAX, 2, 64])) =>
            RopeError::SectionSum { .. }, "expected rotary_dim/2";
        axes(AxisLayout::Contiguous(vec![])) =>
            RopeError::SectionCount { found: 0, .. }, "one per position axis", "found 0";
        axes(AxisLayout::PerAxis(vec![16, 16, 16, 8, 8])) =>
            RopeError::SectionCount { found: 5, .. }, "1 to 4";
        axes(AxisLayout::Ernie(vec![32, 32])) =>
            RopeError::SectionCount { found: 2, .. }, "Ernie", "takes 3";
        axes(AxisLayout::Striped(vec![8, 28, 28])) =>
            RopeError::SectionsNotRealisable { pairs: 64, .. }, "Striped", "axis 0";
    }
}

#[test]
fn numbers() {
    for theta in [f64::NAN, 0.0, -1.0, f64::INFINITY] {
        refused! {
            RotarySpec::builder(64).theta(theta).build() =>
                RopeError::Theta { .. }, "positive finite";
        }
    }
    for scaling in [f64::NAN, 0.0, -2.0] {
        refused! {
            RotarySpec::builder(64).attention_scaling(scaling).build() =>
                RopeError::AttentionScaling { .. }, "attention scaling";
        }
    }
}

#[test]
fn positions() {
    refused! {
        Positions::new(3, &[0; 7]) => RopeError::PositionShape { ids: 7, axes: 3 }, "7", "3 axes";
        Positions::new(0, &[]) => RopeError::PositionShape { axes: 0, .. }, "0 axes";
        Positions::new(2, &[0, 1, 2, 0, -5, 2]) =>
            RopeError::PositionOutOfRange { found: -5, axis: 1, token: 1 }, "-5", "axis 1, token 1";
        Positions::new(1, &[(1 << 31) + 1]) =>
            RopeError::PositionOutOfRange { token: 0, .. }, "2147483649", "outside 0..=2147483648";
    }
    assert!(Positions::new(1, &[1 << 31]).is_ok());

    let mrope = RotarySpec::builder(128)
        .axis_layout(AxisLayout::Contiguous(vec![16, 24, 24]))
        .build()
        .expect("valid");
    let text = Positions::text(1, 0, 4).expect("small");
    refused! {
        TokenAngles::<f32>::new(&mrope, &text, None) =>
            RopeError::PositionAxes { expected: 3, found: 1 }, "3 position axes", "MRoPE";
    }
    let three = Positions::text(3, 0, 4).expect("small");
    refused! {
        TokenAngles::<f32>::new(&spec(64), &three, None) =>
            RopeError::PositionAxes { .. }, "1 position axes";
    }
}

#[test]
fn tables() {
    let mut table = CosSinTable::<f32>::new(&spec(64), None)
        .expect("valid")
        .with_budget_bytes(1 << 20);
    refused! {
        table.grow_to(1 << 20) =>
            RopeError::TableBudget { position: 1048576, budget_bytes: 1048576, .. },
            "TokenAngles::new";
    }
    assert_eq!(
        table.rows(),
        0,
        "a refused growth must leave the table alone"
    );
    table.grow_to(9).expect("fits");
    let positions = Positions::text(1, 8, 4).expect("small");
    refused! {
        TokenAngles::gather(&table, &positions) =>
            RopeError::TableTooShort { position: 11, rows: 10 }, "position 11", "grow_to";
    }
}

#[test]
fn tensors() {
    refused! {
        HeadsLayout::strided(Layout::Bsnd, &[1, 2, 3, 4], &[24, 12, 4, 3]) =>
            RopeError::LastStride { found: 3, .. }, "stride 3", "contiguous";
        HeadsLayout::strided(Layout::Tnd, &[1, 2, 3, 4], &[24, 12, 4, 1]) =>
            RopeError::ShapeMismatch { dimension: "rank", .. }, "rank 3", "4";
    }
    let layout = HeadsLayout::contiguous(Layout::Bsnd, 1, 3, 2, 64);
    let mut data = vec![0f32; layout.elems()];
    refused! {
        HeadsRef::new(&data[1..], layout) =>
            RopeError::BufferTooSmall { needed: 384, found: 383, .. }, "384", "383";
    }
    let mut overlapping = layout;
    overlapping.strides.seq = 64;
    refused! {
        HeadsMut::new(&mut data, overlapping) =>
            RopeError::Overlap { .. }, "overlap", "contiguous first";
    }

    let angles =
        TokenAngles::<f32>::new(&spec(64), &Positions::text(1, 0, 5).expect("small"), None)
            .expect("valid");
    let rotator = Rotator::new(spec(64).geometry(), angles.angles()).expect("valid");
    refused! {
        rotator.rotate(HeadsMut::new(&mut data, layout).expect("fits"), None) =>
            RopeError::AngleShape { what: "the angles", found: 320, expected: 192, .. },
            "3 tokens x 64";
    }
    let narrow = HeadsLayout::contiguous(Layout::Bsnd, 1, 3, 4, 32);
    refused! {
        rotator.rotate(HeadsMut::new(&mut data, narrow).expect("fits"), None) =>
            RopeError::ShapeMismatch { dimension: "head_dim", .. }, "head_dim 64", "32";
    }
    let shorter = HeadsLayout::contiguous(Layout::Bsnd, 1, 2, 2, 64);
    let mut k = vec![0f32; shorter.elems()];
    refused! {
        rotator.rotate(
            HeadsMut::new(&mut data, layout).expect("fits"),
            Some(HeadsMut::new(&mut k, shorter).expect("fits").into())
        ) =>
            RopeError::ShapeMismatch { left: "q", right: "k", dimension: "seq", .. }, "seq 3", "2";
        rotator.rotate((
            HeadsRef::new(&data, layout).expect("fits"),
            HeadsMut::new(&mut k, shorter).expect("fits")
        ), None) =>
            RopeError::ShapeMismatch { right: "the rotated q", .. }, "must agree";
        Geometry::new(64, 64, 1, Pairing::Half, false) =>
            RopeError::RotaryOutsideHead { .. }, "partial_rotary_factor";
    }
}

#[test]
fn burn_tensors() {
    let device = Device::flex();
    let rotary = Rotary::new(spec(64), Layout::Bsnd);
    let angles = rotary.angles(&Positions::text(1, 0, 3).expect("small"), &device);
    let tensor = |shape: [usize; 4], dtype| Tensor::<4>::zeros(shape, (&device, dtype));
    let q = || tensor([2, 3, 4, 64], DType::F32);
    refused! {
        rotary.try_forward(q(), tensor([2, 3, 2, 64], DType::BF16), &angles) =>
            RotaryError::Op(OpError::MixedDTypes { .. }), "k is BF16", "expected F32", "cast";
        rotary.try_forward(q(), tensor([2, 3, 2, 32], DType::F32), &angles) =>
            RotaryError::Rope(RopeError::ShapeMismatch { dimension: "head_dim", .. }),
            "head_dim 64";
        rotary.try_forward_single(Tensor::<3>::zeros([3, 4, 64], &device), &angles) =>
            RotaryError::Rank { expected: 4, found: 3, .. }, "3 dimensions", "Bsnd";
        rotary.try_forward_single(tensor([2, 4, 2, 64], DType::F32), &angles) =>
            RotaryError::Layout { .. },
            "2 x 4 tokens", "Bsnd reads q [2, 4, 2, 64] as 2 heads of 4 tokens", "Layout::Bnsd";
        rotary.try_forward(q(), tensor([2, 2, 3, 64], DType::F32), &angles) =>
            RotaryError::Layout { .. },
            "q has seq 3, k has 2", "k [2, 2, 3, 64] as 3 heads of 2 tokens";
    }
    let cos = angles.rows().narrow(1, 0, 32);
    let angles_of = |cos: Tensor<2>| RotaryAngles::from_cos_sin(cos.clone(), cos);
    let half = angles_of(cos.clone().cast(DType::BF16)).expect("of one shape");
    refused! {
        rotary.try_forward_single(q(), &half) =>
            RotaryError::AngleDType { .. }, "the angles: found BF16, expected F32";
        rotary.try_forward_single(tensor([2, 3, 4, 64], DType::F64), &angles) =>
            RotaryError::AngleDType { .. }, "expected F64";
    }
    let narrow = angles_of(cos.clone().narrow(1, 0, 8)).expect("of one shape");
    refused! {
        rotary.try_forward_single(q(), &narrow) =>
            RotaryError::Rope(RopeError::AngleShape { what: "the angles", .. }), "3 tokens x 64";
    }
    refused! {
        RotaryAngles::from_cos_sin(cos.clone(), cos.clone().cast(DType::BF16)) =>
            RotaryError::AngleDType { what: "sin", .. }, "sin: found BF16, expected F32";
        RotaryAngles::from_cos_sin(cos.clone(), cos.narrow(1, 0, 16)) =>
            RotaryError::Rope(RopeError::AngleShape { what: "sin", .. }), "3 tokens x 32";
    }
    let ids = Tensor::<2, Int>::from_data([[0, 1, -2]], &device);
    refused! {
        rotary.try_angles_from_ids(ids) =>
            RotaryError::Rope(RopeError::PositionOutOfRange { found: -2, .. }), "-2";
    }
    let ids = Tensor::<2, Int>::from_data([[0, 1, 2], [0, 1, 2], [0, 1, 2]], &device);
    refused! {
        rotary.try_angles_from_ids(ids) =>
            RotaryError::Rope(RopeError::PositionAxes { expected: 1, found: 3 }),
            "one id per token";
    }
}

/// burn's habit is to panic; the message must then be the error's.
#[test]
fn panicking_twins_say_the_same() {
    let device = Device::flex();
    let rotary = Rotary::new(spec(64), Layout::Bsnd);
    let panic = std::panic::catch_unwind(|| {
        rotary.angles(&Positions::text(3, 0, 2).expect("small"), &device);
    });
    let payload = panic.expect_err("three axes for a one-axis rotation");
    let message = payload
        .downcast_ref::<String>()
        .expect("a formatted message");
    assert!(
        message.contains("driven by 1 position axes, the positions have 3"),
        "{message}"
    );
}

#[test]
fn nothing_is_rotated_to_nothing() {
    let device = Device::flex().autodiff();
    for [batch, tokens, heads] in [[0, 3, 2], [2, 0, 2], [2, 3, 0], [0, 0, 0]] {
        let positions = Positions::text(1, 0, tokens).expect("small");
        for implementation in [Implementation::Fused, Implementation::Composed] {
            let rotary = Rotary::new(spec(8), Layout::Bsnd).with_implementation(implementation);
            let angles = rotary.angles(&positions, &device);
            let shape = [batch, tokens, heads, 8];
            let x = || Tensor::<4>::zeros(shape, &device).require_grad();
            let (q, k) = (x(), x());
            let rotated = rotary.try_forward(q.clone(), k.clone(), &angles);
            let (q_out, k_out) = rotated.expect("it fits");
            assert_eq!([q_out.dims(), k_out.dims()], [shape; 2]);
            let gradients = (q_out.sum() + k_out.sum()).backward();
            for x in [q, k] {
                assert_eq!(x.grad(&gradients).expect("tracked").dims(), shape);
            }
        }
    }
    let (positions, frequencies) = (
        Tensor::<2>::zeros([2, 0], &device),
        Tensor::<3>::ones([2, 4, 3], &device),
    );
    let angles = RotaryAngles::from_frequencies(positions, frequencies).expect("no tokens");
    assert_eq!(angles.rows().dims(), [0, 6]);
}

#[test]
fn angles_per_head() {
    let positions = Positions::new(2, &[0, 0, 0, 0, 1, 2]).expect("valid positions");
    let refused_frequencies = |frequencies: &[f64], heads| {
        refused! {
            TokenAngles::<f32>::per_head(&positions, frequencies, heads) =>
                RopeError::HeadFrequencies { axes: 2, .. }, "[axes, heads, lanes] with 2 axes",
                format!("found {} frequencies", frequencies.len()).as_str();
        }
    };
    refused_frequencies(&[1.0; 10], 4);
    refused_frequencies(&[1.0; 8], 0);
    refused_frequencies(&[], 4);
    refused! {
        TokenAngles::<f32>::per_head(&positions, &[1.0, f64::NAN, 1.0, 1.0], 2) =>
            RopeError::Frequency { index: 1, .. }, "at most 1e280";
    }

    for [heads, lanes] in [[0, 4], [4, 0], [0, 0]] {
        let none = || Tensor::<3>::zeros([3, heads, lanes], &Device::flex());
        refused! {
            RotaryAngles::per_head(none(), none()) =>
                RotaryError::Rope(RopeError::AngleShape { found: 0, .. }), "cos: expected";
        }
    }

    let host = TokenAngles::<f32>::per_head(&positions, &[0.5; 16], 4).expect("valid");
    let rotator = Rotator::new(spec(4).geometry(), host.angles()).expect("valid");
    let layout = |seq, heads| HeadsLayout::contiguous(Layout::Bsnd, 1, seq, heads, 4);
    let (mut q, mut k) = (vec![0f32; 48], vec![0f32; 24]);
    let q_heads = |q| HeadsMut::new(q, layout(3, 4)).expect("fits");
    let two_heads = HeadsMut::new(&mut k, layout(3, 2)).expect("fits");
    refused! {
        rotator.rotate(q_heads(&mut q), Some(two_heads.into())) =>
            RopeError::ShapeMismatch { dimension: "heads", left_size: 4, right_size: 2, .. },
            "the angles has heads 4, k has 2";
    }
    let two_heads = HeadsMut::new(&mut k, layout(3, 2)).expect("fits");
    refused! {
        rotator.rotate(two_heads, None) => RopeError::ShapeMismatch { .. }, "q has 2";
    }
    let two_tokens = HeadsMut::new(&mut q[..32], layout(2, 4)).expect("fits");
    refused! {
        rotator.rotate(two_tokens, None) =>
            RopeError::AngleShape { found: 48, .. }, "2 tokens x 16";
    }
    let gradient = HeadsRef::new(&k, layout(3, 2)).expect("fits");
    refused! {
        rotator.angle_gradients((gradient, gradient), None, &mut [0.0; 48]) =>
            RopeError::ShapeMismatch { .. }, "the angles has heads 4, q has 2";
    }

    let device = Device::flex();
    let rotary = Rotary::new(spec(4), Layout::Bsnd);
    let angles = RotaryAngles::upload(host, &device);
    let x = |seq, heads| Tensor::<4>::zeros([2, seq, heads, 4], (&device, DType::F32));
    refused! {
        rotary.try_forward_single(x(3, 2), &angles) =>
            RotaryError::Rope(RopeError::ShapeMismatch { .. }), "the angles has heads 4, q has 2";
        rotary.try_forward(x(3, 4), x(3, 2), &angles) =>
            RotaryError::Rope(RopeError::ShapeMismatch { .. }), "q has heads 4, k has 2";
        rotary.try_forward(x(3, 4), x(2, 4), &angles) =>
            RotaryError::Rope(RopeError::ShapeMismatch { dimension: "seq", .. }),
            "q has seq 3, k has 2";
        rotary.try_forward_single(x(2, 4), &angles) =>
            RotaryError::Rope(RopeError::PositionTokens { batch: 2, seq: 2, found: 3 }),
            "2 x 2 tokens";
    }

    let positions = |axes, dtype| Tensor::<2>::zeros([axes, 3], (&device, dtype));
    let frequencies = |lanes| Tensor::<3>::zeros([2, 4, lanes], (&device, DType::F32));
    refused! {
        RotaryAngles::from_frequencies(positions(3, DType::F32), frequencies(2)) =>
            RotaryError::Rope(RopeError::PositionAxes { expected: 2, found: 3 }), "2 position axes";
        RotaryAngles::from_frequencies(positions(2, DType::F64), frequencies(2)) =>
            RotaryError::AngleDType { .. }, "the frequencies: found F32, expected F64";
        RotaryAngles::from_frequencies(positions(2, DType::F32), frequencies(0)) =>
            RotaryError::Rope(RopeError::HeadFrequencies { axes: 2, heads: 4, found: 0 }),
            "at least one lane";
    }
}

/// x and its gradient have the same heads, unlike q and k.
#[test]
#[should_panic(expected = "x has heads 2, its gradient has 8")]
fn a_gradient_of_other_heads() {
    let device = Device::flex();
    let op = RotaryOp {
        geometry: spec(16).geometry(),
        layout: Layout::Bsnd,
        direction: Direction::Forward,
    };
    let heads = |heads| Tensor::<4>::zeros([1, 3, heads, 16], &device).into_dispatch();
    let angles = Tensor::<2>::zeros([3, 16], &device).into_dispatch();
    Dispatch::rotary_angle_gradients(heads(2), heads(8), angles, op);
}
