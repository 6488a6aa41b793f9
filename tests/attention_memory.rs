//! The memory of four operations, measured by a counting allocator: the forward of attention
//! against its output, the gated delta rule against its states, the loss in blocks of the
//! vocabulary against all logits at once, and the update of AdamW against its value.
//!
//! A file of its own, and one test that is not ignored: the allocator counts the whole process.

use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor};
use burn_attention::{
    AdamWOp, Attention, AttentionMask, CrossEntropy, GatedDelta, Implementation, MaskRules,
    Sequences, adamw, gated_delta_step,
};
use rope_check::alloc::CountingAllocator;

/// The implementation that computes, and the size of its blocks.
type Method = (Implementation, Option<usize>);

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

struct Head {
    rows: usize,
    vocabulary: usize,
    channels: usize,
}

impl Head {
    /// Bytes that the graph keeps, and the peak of forward and backward less the gradients, which
    /// are asked for.
    fn count(&self, dtype: DType, method: Method) -> [usize; 2] {
        let device = Device::flex().autodiff();
        let random = |rows| {
            let shape = [rows, self.channels];
            let x = Tensor::<2>::random(shape, Distribution::Default, &device);
            x.cast(dtype).require_grad()
        };
        let (hidden, weight) = (random(self.rows), random(self.vocabulary));
        let targets: Vec<i64> = (0..self.rows as i64).map(|row| row * 7).collect();
        let loss = CrossEntropy::new(&targets, self.vocabulary).expect("valid targets");
        let loss = loss.with_implementation(method.0).with_blocks(method.1);
        let mut inputs = Some((hidden.clone(), weight.clone()));
        let (out, forward) = ALLOCATOR.measure(usize::MAX, || {
            let (hidden, weight) = inputs.take().expect("one forward");
            loss.forward(hidden, weight)
        });
        let (gradients, backward) = ALLOCATOR.measure(usize::MAX, || out.backward());
        assert!(weight.grad(&gradients).is_some());
        let kept = usize::try_from(forward.retained_bytes).unwrap_or(0);
        let peak = forward.peak_bytes.max(kept + backward.peak_bytes);
        let gradients = (self.rows + self.vocabulary) * self.channels * dtype.size();
        let counted = [kept, peak - gradients];
        println!(
            "{dtype:?}, {} rows, {} words, {} channels, {method:?}: keeps {:.1} MiB, peak beside \
             the gradients {:.1} MiB",
            self.rows,
            self.vocabulary,
            self.channels,
            counted[0] as f64 / f64::from(1 << 20),
            counted[1] as f64 / f64::from(1 << 20),
        );
        counted
    }
}

#[test]
fn no_temporary_is_as_large_as_a_result() {
    attention_makes_its_output_alone();
    the_loss_makes_no_tensor_of_rows_x_vocabulary();
    the_gated_delta_rule_keeps_a_state_for_each_chunk();
    an_update_makes_no_tensor();
}

/// The new values take the memory of the old ones, or beside a held value that of the gradient.
fn an_update_makes_no_tensor() {
    let (count, op) = (
        1 << 18,
        AdamWOp {
            rate: 1e-3,
            decay: 0.1,
            betas: [0.9, 0.999],
            epsilon: 1e-8,
            steps: 1,
            scale: 0.5,
        },
    );
    let peak = |device: &Device, dtype: FloatDType, is_held: bool| {
        let random = |_| Tensor::<1>::random([count], Distribution::Default, device);
        let mut state = Some([0; 4].map(random));
        let held = state
            .as_ref()
            .filter(|_| is_held)
            .map(|state| state[0].clone());
        let (updated, usage) = ALLOCATOR.measure(usize::MAX, || {
            let [value, gradient, first, second] = state.take().expect("one update");
            adamw(value, gradient, [first, second], op, dtype).expect("it fits")
        });
        drop((updated, held));
        usage.peak_bytes as f64 / (4 * count) as f64
    };
    let flex = Device::flex();
    peak(&flex, FloatDType::F32, false); // pools are made on first use
    for (dtype, is_held, expected) in [
        (FloatDType::F32, false, 0.0),
        (FloatDType::F32, true, 0.0),
        (FloatDType::BF16, false, 0.5),
    ] {
        let peak = peak(&flex, dtype, is_held);
        println!("the peak of an update to {dtype:?} is {peak:.3} of its value");
        assert!(
            (peak - expected).abs() < 0.01,
            "{dtype:?}, held {is_held}: {peak}"
        );
    }
    // The same count must see ordinary operations' tensors, or it could not fail.
    let composed = peak(&flex.autodiff(), FloatDType::F32, true);
    println!("composed of ordinary operations it is {composed:.3}");
    assert!(composed > 0.9, "{composed}");
}

const DELTA_HEADS: usize = 4;
const DELTA_CHANNELS: usize = 32;

/// Bytes that the graph of the gated delta rule keeps, the output included, and the peak of forward
/// and backward, the gradients included.
fn count_delta(tokens: usize, in_chunks: bool) -> [usize; 2] {
    let device = Device::flex().autodiff();
    let shape = [1, tokens, DELTA_HEADS, DELTA_CHANNELS];
    let random = || Tensor::<4>::random(shape, Distribution::Default, &device).require_grad();
    let numbers = [1, tokens, DELTA_HEADS];
    let number = |of| Tensor::<3>::full(numbers, of, &device).require_grad();
    let inputs = [random(), random(), random()];
    let rates = [number(-0.1), number(0.5)];
    let run = || {
        let ([q, k, v], [g, beta]) = (inputs.clone(), rates.clone());
        if in_chunks {
            let rule = GatedDelta::new(Sequences::whole(tokens)).with_blocks(1);
            return rule.forward(q, k, v, g, beta).0;
        }
        let state = [1, DELTA_HEADS, DELTA_CHANNELS, DELTA_CHANNELS];
        let mut state = Tensor::zeros(state, &device);
        let outs = (0..tokens).map(|token| {
            let of = |x: &Tensor<4>| x.clone().narrow(1, token, 1).squeeze_dim::<3>(1);
            let number = |x: &Tensor<3>| x.clone().narrow(1, token, 1).squeeze_dim::<2>(1);
            let inputs = [of(&q), of(&k), of(&v)];
            let (out, next) = gated_delta_step(inputs, [number(&g), number(&beta)], state.clone())
                .expect("it fits");
            state = next;
            out.unsqueeze_dim::<4>(1)
        });
        Tensor::cat(outs.collect(), 1)
    };
    let (out, forward) = ALLOCATOR.measure(usize::MAX, run);
    let (gradients, backward) = ALLOCATOR.measure(usize::MAX, || out.sum().backward());
    assert!(inputs[0].grad(&gradients).is_some());
    let kept = usize::try_from(forward.retained_bytes).unwrap_or(0);
    let peak = forward.peak_bytes.max(kept + backward.peak_bytes);
    let way = if in_chunks { "chunks" } else { "recurrence" };
    let kib = |bytes: usize| bytes as f64 / 1024.0;
    let (kept_kib, peak_kib) = (kib(kept), kib(peak));
    println!("{tokens} tokens, {way}: keeps {kept_kib:.0} KiB, peak {peak_kib:.0} KiB");
    [kept, peak]
}

fn the_gated_delta_rule_keeps_a_state_for_each_chunk() {
    count_delta(256, true); // pools are made on first use
    let [kept, peak] = count_delta(256, true);
    let [twice_kept, twice_peak] = count_delta(512, true);
    let per_head = DELTA_CHANNELS * DELTA_CHANNELS * 4;
    let states = |tokens: usize| (tokens / 64 + 1) * DELTA_HEADS * per_head;
    let out = |tokens: usize| tokens * DELTA_HEADS * DELTA_CHANNELS * 4;
    for (tokens, kept) in [(256, kept), (512, twice_kept)] {
        let expected = states(tokens) + out(tokens);
        assert!(kept < expected + (16 << 10), "{kept} for {expected}");
    }
    assert!(
        10 * twice_peak < 21 * peak,
        "{peak}, {twice_peak} of twice the tokens"
    );
    // The same count must see the states of all tokens, or it could not fail.
    let [each, _] = count_delta(256, false);
    assert!(each > 256 * DELTA_HEADS * per_head, "{each}");
}

/// With few keys and channels of q and k, so that the output is nearly all there is.
fn attention_makes_its_output_alone() {
    let [heads, queries, keys, head_dim, value_dim] = [16, 4096, 8, 4, 128];
    let device = Device::flex();
    let mask = AttentionMask::new(&MaskRules::default(), 1, queries, keys).expect("valid");
    for dtype in [DType::F32, DType::BF16] {
        let random = |tokens, channels| {
            let shape = [1, heads, tokens, channels];
            Tensor::<4>::random(shape, Distribution::Default, &device).cast(dtype)
        };
        let (q, k) = (random(queries, head_dim), random(keys, head_dim));
        let v = random(keys, value_dim);
        let output = heads * queries * value_dim * dtype.size();
        let peak = |method: Method| {
            let attention = Attention::new(mask.clone())
                .with_implementation(method.0)
                .with_blocks(method.1);
            let run = || attention.forward(q.clone(), k.clone(), v.clone());
            run(); // pools are made on first use
            let (out, usage) = ALLOCATOR.measure(usize::MAX, run);
            assert_eq!(out.dims(), [1, heads, queries, value_dim]);
            usage.peak_bytes as f64 / output as f64
        };
        let fused = peak((Implementation::Fused, None));
        println!("{dtype:?}: the peak of attention's forward is {fused:.2} of its output");
        // Beside it a tile of 128 rows for each thread, and a number for each row.
        assert!((1.0..1.5).contains(&fused), "{dtype:?}: {fused}");
        // The same count must see the other's tensors, or it could not fail.
        assert!(peak((Implementation::Composed, None)) > 1.9, "{dtype:?}");
    }
}

fn the_loss_makes_no_tensor_of_rows_x_vocabulary() {
    let head = Head {
        rows: 256,
        vocabulary: 16_384,
        channels: 4,
    };
    let (logits, scores) = (head.rows * head.vocabulary * 4, 1 << 19);
    for dtype in [DType::F32, DType::BF16] {
        let blocks = (Implementation::Fused, Some(scores));
        head.count(dtype, blocks); // pools are made on first use
        let [kept, peak] = head.count(dtype, blocks);
        assert!(kept < 64 << 10, "{dtype:?}: the graph keeps {kept} bytes");
        // A block of logits and the results from it.
        assert!(peak < 4 * 4 * scores, "{dtype:?}: {peak} bytes at the peak");
        // The same count must see the other's tensors, or it could not fail.
        let [kept, peak] = head.count(dtype, (Implementation::Composed, None));
        assert!(
            kept >= logits && peak >= 2 * logits,
            "{kept}, {peak} of composed"
        );
    }
}

#[test]
#[ignore = "minutes: more rows and blocks of the default size"]
fn figures() {
    let with_words = |vocabulary| Head {
        rows: 1024,
        vocabulary,
        channels: 16,
    };
    for dtype in [DType::F32, DType::BF16] {
        for method in [
            (Implementation::Fused, None),
            (Implementation::Composed, None),
        ] {
            with_words(8192).count(dtype, method); // pools are made on first use
            with_words(32_768).count(dtype, method);
        }
    }
}
