//! Attention and norms on a served device: results are bit-identical to the same kernels in this
//! process, and tensors of wrong shapes are refused before they are sent.

use burn::backend::Dispatch;
use burn::backend::flex::{Flex, FlexDevice};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_ascend::operations;
use burn_ascend::serve::Server;
use burn_attention::{
    Attention, AttentionError, AttentionMask, AttentionOp, AttentionOps, Bias, Kept, MaskRules,
    OpError, RmsNormOps, Window, rms_norm,
};

const SIZES: [usize; 4] = [2, 4, 13, 8];
const KV_HEADS: usize = 2;

fn values(seed: usize, shape: [usize; 4], (device, dtype): (&Device, DType)) -> Tensor<4> {
    let value = |index: usize| ((index * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0;
    let count: usize = shape.iter().product();
    let data = TensorData::new((0..count).map(value).collect::<Vec<f32>>(), shape);
    Tensor::from_data(data.convert_dtype(dtype), (device, dtype)).require_grad()
}

/// The output, and the gradients of q, k, v and the bias.
fn attended(attention: &Attention, biased: bool, device: &Device, dtype: DType) -> Vec<TensorData> {
    let [batch, heads, tokens, _] = SIZES;
    let keys = [batch, KV_HEADS, tokens, 8];
    let to = (device, dtype);
    let (q, k, v) = (
        values(1, SIZES, to),
        values(2, keys, to),
        values(3, keys, to),
    );
    let bias = values(4, [1, heads, 1, tokens], (device, DType::F32));
    let attention = attention.clone().with_bias(biased.then(|| bias.clone()));
    let out = attention.forward(q.clone(), k.clone(), v.clone());
    let gradients = (out.clone() * values(5, SIZES, to).detach())
        .sum()
        .backward();
    let mut found = vec![out.inner().into_data()];
    let given = [q, k, v, bias]
        .into_iter()
        .filter_map(|x| x.grad(&gradients));
    found.extend(given.map(Tensor::into_data));
    assert_eq!(found.len(), if biased { 5 } else { 4 });
    found
}

#[test]
fn a_served_attention_has_the_bits_of_the_servers_kernels() {
    let server = Server::start::<Flex>([FlexDevice], operations()).expect("it starts");
    let served = server.connect(0).expect("it answers").autodiff();
    let local = Device::flex().autodiff();
    let [batch, _, tokens, _] = SIZES;
    let mut flags = vec![true; batch * tokens];
    flags[..4].fill(false);
    let causal = MaskRules {
        causal: true,
        ..MaskRules::default()
    };
    let window = Some(Window {
        before: 2,
        after: 1,
    });
    for (name, rules, biased) in [
        ("all keys, a bias", MaskRules::default(), true),
        ("causal", causal, false),
        (
            "a window",
            MaskRules {
                window,
                ..MaskRules::default()
            },
            false,
        ),
        (
            "packed",
            MaskRules {
                cu_seqlens: Some(&[0, 5, 13]),
                ..causal
            },
            true,
        ),
        (
            "padded",
            MaskRules {
                attended: Some(&flags),
                ..causal
            },
            false,
        ),
    ] {
        let mask = AttentionMask::new(&rules, batch, tokens, tokens).expect(name);
        for dtype in [DType::F32, DType::BF16] {
            for blocks in [None, Some(1)] {
                let attention = Attention::new(mask.clone()).with_blocks(blocks);
                let expected = attended(&attention, biased, &local, dtype);
                let found = attended(&attention, biased, &served, dtype);
                for (found, expected) in found.iter().zip(&expected) {
                    assert_eq!(
                        found.bytes(),
                        expected.bytes(),
                        "{name} {dtype:?} {blocks:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_served_norm_has_the_bits_of_the_servers_operations() {
    let server = Server::start::<Flex>([FlexDevice], operations()).expect("it starts");
    let served = server.connect(0).expect("it answers").autodiff();
    let local = Device::flex().autodiff();
    let (wide, narrow) = (DType::F32, DType::BF16);
    for [dtype, of_weight] in [[wide; 2], [narrow; 2], [narrow, wide]] {
        let found = [&served, &local].map(|device| {
            let x = values(1, SIZES, (device, dtype));
            let weight = Tensor::<1>::from_data([0.5, -1.0, 2.0, 1.5, 0.1, 0.2, 0.3, 0.4], device);
            let weight = weight.cast(of_weight).require_grad();
            let y = rms_norm(x.clone(), weight.clone(), 1e-5).expect("it fits");
            let dy = values(2, SIZES, (device, dtype)).detach();
            let gradients = (y.clone() * dy).sum().backward();
            let dx = x.grad(&gradients).expect("tracked").into_data();
            let dweight = weight.grad(&gradients).expect("tracked").into_data();
            [y.inner().into_data(), dx, dweight].map(|x| x.bytes().to_vec())
        });
        assert_eq!(found[0], found[1], "{dtype:?}");
    }
}

#[test]
fn tensors_that_do_not_fit_never_reach_the_server() {
    let server = Server::start::<Flex>([FlexDevice], operations()).expect("it starts");
    let device = server.connect(0).expect("it answers");
    let mask = AttentionMask::new(&MaskRules::default(), 1, 4, 4).expect("valid rules");
    let x = |heads| Tensor::<4>::zeros([1, heads, 4, 8], &device);
    let refused = Attention::new(mask).try_forward(x(3), x(2), x(2));
    let error = refused.map(drop).expect_err("3 heads do not divide by 2");
    assert!(
        matches!(error, AttentionError::HeadGroups { .. }),
        "{error}"
    );
    let elsewhere = Tensor::<1>::ones([8], &Device::flex());
    let refused = rms_norm(x(1), elsewhere, 1e-5).map(drop);
    assert!(
        matches!(
            &refused,
            Err(AttentionError::Op(OpError::Device { what: "weight", .. }))
        ),
        "{refused:?}"
    );
    // The session goes on.
    assert_eq!(x(1).sum().into_scalar::<f32>(), 0.0);
}

/// A server of its own, since a client does not open a session anew, and whether an operation on its
/// first device brings a result. The second device answers in any case.
fn comes_back(operation: impl FnOnce(&Device) -> bool) -> bool {
    let server = Server::start::<Flex>([FlexDevice; 2], operations()).expect("it starts");
    let came = operation(&server.connect(0).expect("it answers"));
    let other = server.connect(1).expect("it answers still");
    let sum = Tensor::<1>::ones([2], &other).sum();
    assert_eq!(sum.into_scalar::<f32>(), 2.0);
    came
}

/// Operations that no client of ours sends, straight to the wire: each ends its session alone.
#[test]
fn operations_whose_tensors_do_not_fit_end_their_session_alone() {
    const Q: [usize; 4] = [1, 4, 4, 8];
    const KV: [usize; 4] = [1, 1, 4, 8];
    const ROWS: [usize; 4] = [1, 4, 4, 2];
    let mask = AttentionMask::new(&MaskRules::default(), 1, 4, 4).expect("valid rules");
    let right = [Q, KV, KV, Q, ROWS, Q];
    let types = [DType::F32; 6];
    let backward = |shapes: [[usize; 4]; 6], types: [DType; 6], blocks, device: &Device| {
        let tensor = |index: usize| {
            Tensor::<4>::zeros(shapes[index], (device, types[index])).into_dispatch()
        };
        let kept = Kept {
            q: tensor(0),
            k: tensor(1),
            v: tensor(2),
            bias: Bias::Absent,
            out: tensor(3),
            softmax: tensor(4),
        };
        let op = AttentionOp {
            mask: mask.clone(),
            scale: 0.5,
            blocks,
        };
        let (dq, ..) = Dispatch::attention_backward(kept, tensor(5), false, op);
        Tensor::<4>::from_dispatch(dq).try_into_data().is_ok()
    };
    for blocks in [None, Some(1)] {
        let came = comes_back(|device| backward(right, types, blocks, device));
        assert!(came, "{blocks:?}: the right ones");
    }
    // q, k and v are checked as a forward's are; here is what a backward has besides.
    let mut wrong = vec![];
    for index in 3..6 {
        for dim in 0..4 {
            let mut shapes = right;
            shapes[index][dim] = if dim == 0 { 0 } else { 7 };
            wrong.push((shapes, types));
        }
        let mut types = types;
        types[index] = DType::BF16;
        wrong.push((right, types));
    }
    for ((shapes, types), blocks) in wrong.into_iter().zip([None, Some(1)].into_iter().cycle()) {
        let came = comes_back(|device| backward(shapes, types, blocks, device));
        assert!(!came, "{blocks:?}: {shapes:?} of {types:?}");
    }
    let norm = |shapes: [&[usize]; 4], device: &Device| {
        let tensor = |index: usize| match *shapes[index] {
            [rows, channels] => Tensor::<2>::ones([rows, channels], device).into_dispatch(),
            ref shape => Tensor::<1>::ones([shape[0]], device).into_dispatch(),
        };
        let (dx, _) = Dispatch::rms_norm_backward(tensor(0), tensor(1), tensor(2), tensor(3));
        Tensor::<2>::from_dispatch(dx).try_into_data().is_ok()
    };
    let right = [&[3, 4][..], &[4], &[3, 1], &[3, 4]];
    assert!(comes_back(|device| norm(right, device)));
    for shapes in [
        [&[3, 4][..], &[5], &[3, 1], &[3, 4]],
        [&[3, 4], &[4], &[3, 4], &[3, 4]],
        [&[3, 4], &[4], &[2, 1], &[3, 4]],
        [&[3, 4], &[4], &[3], &[3, 4]],
        [&[3, 4], &[4], &[3, 1], &[1, 4]],
        [&[3, 4], &[4, 1], &[3, 1], &[3, 4]],
    ] {
        assert!(!comes_back(|device| norm(shapes, device)), "{shapes:?}");
    }
}
