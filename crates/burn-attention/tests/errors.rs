//! Each wrong input is one error with the expectation and the value found.

use burn::tensor::{DType, Device, Tensor};
use burn_attention::{Attention, AttentionError, AttentionMask, MaskRules, Window};

const ALL: MaskRules<'static> = MaskRules {
    causal: false,
    window: None,
    cu_seqlens: None,
    attended: None,
};

fn refused(rules: &MaskRules, queries: usize, keys: usize) -> AttentionError {
    AttentionMask::new(rules, 2, queries, keys).expect_err("a wrong mask")
}

#[test]
fn masks_that_do_not_fit() {
    let causal = MaskRules {
        causal: true,
        ..ALL
    };
    for keys in [1 << 32, usize::MAX] {
        let error = refused(&ALL, 1, keys);
        assert_eq!(error, AttentionError::TooManyKeys { batch: 2, keys });
    }
    for queries in [1 << 32, 1 << 60, usize::MAX] {
        let error = refused(&ALL, queries, 1);
        assert_eq!(error, AttentionError::TooManyQueries { queries });
    }
    let error = refused(&causal, 5, 4);
    let more = |rule| AttentionError::MoreQueries {
        rule,
        queries: 5,
        keys: 4,
    };
    assert_eq!(error, more("causal"));
    assert!(
        error.to_string().contains("5 queries for 4 keys"),
        "{error}"
    );
    let window = MaskRules {
        window: Some(Window {
            before: 1,
            after: 1,
        }),
        ..ALL
    };
    assert_eq!(refused(&window, 5, 4), more("window"));

    let attended = MaskRules {
        attended: Some(&[true; 7]),
        ..ALL
    };
    let (batch, keys, found) = (2, 4, 7);
    let expected = AttentionError::Attended { batch, keys, found };
    assert_eq!(refused(&attended, 4, 4), expected);

    let packed = |cu_seqlens: &[usize], queries, message: &str| {
        let rules = MaskRules {
            cu_seqlens: Some(cu_seqlens),
            ..ALL
        };
        let error = refused(&rules, queries, 4).to_string();
        assert!(error.contains(message), "{message} is not in {error}");
    };
    packed(&[], 4, "cu_seqlens[0] is missing, expected 0");
    packed(&[1, 4], 4, "cu_seqlens[0] is 1, expected 0");
    packed(&[0, 3, 2, 4], 4, "cu_seqlens[2] is 2, expected at least 3");
    packed(&[0, 3], 4, "cu_seqlens[1] is 3, expected 4");
    packed(&[0, 5], 4, "cu_seqlens[1] is 5, expected 4");
    packed(&[0, 4], 3, "q of packed sequences has 3 in tokens, k has 4");
}

/// Shapes of q, k and v, the type of k, the shape and type of a bias, and the message.
type Wrong = (
    [[usize; 4]; 3],
    DType,
    Option<([usize; 4], DType)>,
    &'static str,
);

#[test]
fn tensors_that_do_not_fit() {
    let (q, k) = ([2, 4, 3, 8], [2, 2, 3, 8]);
    let f32 = DType::F32;
    let bias = |shape| Some((shape, f32));
    let wrong: [Wrong; 13] = [
        ([q, [1, 2, 3, 8], k], f32, None, "q has 2 in batch, k has 1"),
        (
            [q, [2, 2, 3, 4], k],
            f32,
            None,
            "q has 8 in head_dim, k has 4",
        ),
        ([q, k, [1, 2, 3, 8]], f32, None, "k has 2 in batch, v has 1"),
        ([q, k, [2, 1, 3, 8]], f32, None, "k has 2 in heads, v has 1"),
        (
            [q, k, [2, 2, 4, 8]],
            f32,
            None,
            "k has 3 in tokens, v has 4",
        ),
        (
            [q, [2, 3, 3, 8], [2, 3, 3, 8]],
            f32,
            None,
            "q has 4 heads, k and v have 3",
        ),
        (
            [q, [2, 0, 3, 8], [2, 0, 3, 8]],
            f32,
            None,
            "q has 4 heads, k and v have 0",
        ),
        (
            [[2, 4, 2, 8], k, k],
            f32,
            None,
            "q has 2 in tokens, the mask has 3",
        ),
        (
            [q, [2, 2, 4, 8], [2, 2, 4, 8]],
            f32,
            None,
            "k has 4 in tokens, the mask has 3",
        ),
        ([q, k, k], DType::F16, None, "k is F16, expected F32"),
        (
            [q, k, k],
            f32,
            bias([2, 2, 3, 3]),
            "[2, 2, 3, 3], expected [2, 4, 3, 3]",
        ),
        (
            [q, k, k],
            f32,
            bias([2, 4, 3, 4]),
            "[2, 4, 3, 4], expected [2, 4, 3, 3]",
        ),
        (
            [q, k, k],
            f32,
            Some(([1; 4], DType::BF16)),
            "the bias is BF16, expected F32",
        ),
    ];
    let device = Device::flex();
    let mask = AttentionMask::new(&ALL, 2, 3, 3).expect("valid");
    for ([q, k, v], k_dtype, bias, message) in wrong {
        let zeros = |shape, dtype| Tensor::<4>::zeros(shape, (&device, dtype));
        let bias = bias.map(|(shape, dtype)| zeros(shape, dtype));
        let (q, k, v) = (zeros(q, f32), zeros(k, k_dtype), zeros(v, f32));
        let attention = Attention::new(mask.clone()).with_bias(bias);
        let found = attention.try_forward(q, k, v);
        let error = found.expect_err(message).to_string();
        assert!(error.contains(message), "{message} is not in {error}");
    }
    let none = || Tensor::<4>::zeros([2, 4, 3, 0], &device);
    let attention = Attention::new(mask.clone()).with_scale(1.0);
    let error = attention.try_forward(none(), none(), none()).err();
    assert_eq!(error, Some(AttentionError::NoChannels));
    let x = || Tensor::<4>::zeros(k, &device);
    for (scale, dtype, fits) in [
        (f64::NAN, f32, false),
        (f64::INFINITY, DType::F64, false),
        // Infinite in the type of the scores, which is f32 for 16 bits.
        (1e39, f32, false),
        (-1e39, DType::BF16, false),
        (1e39, DType::F64, true),
        (1e30, DType::F16, true),
        (0.0, f32, true),
    ] {
        let x = || x().cast(dtype);
        let attention = Attention::new(mask.clone()).with_scale(scale);
        let error = attention.try_forward(x(), x(), x()).err();
        let refused = matches!(error, Some(AttentionError::Scale { .. }));
        assert_eq!(refused, !fits, "{scale}, {dtype:?}: {error:?}");
    }
}

#[test]
fn padding_of_another_batch() {
    let rules = MaskRules {
        attended: Some(&[true, false, true]),
        ..ALL
    };
    let mask = AttentionMask::new(&rules, 1, 3, 3).expect("valid");
    let x = || Tensor::<4>::zeros([2, 1, 3, 8], &Device::flex());
    let error = Attention::new(mask).try_forward(x(), x(), x());
    let message = error.expect_err("two samples").to_string();
    assert!(
        message.contains("q has 2 in batch, the mask's padding has 1"),
        "{message}"
    );
}

#[test]
fn nothing_to_attend_to_is_no_error() {
    for [queries, keys] in [[0, 3], [3, 0]] {
        let mask = AttentionMask::new(&ALL, 1, queries, keys).expect("valid");
        let zeros = |tokens| Tensor::<4>::zeros([1, 2, tokens, 8], &Device::flex());
        let out = Attention::new(mask).forward(zeros(queries), zeros(keys), zeros(keys));
        assert_eq!(out.dims(), [1, 2, queries, 8]);
        assert!(out.into_data().iter::<f32>().all(|x| x == 0.0));
    }
}
