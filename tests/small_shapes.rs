//! Functions of tensors that return a `Result` do so for every shape: sizes from 0 to 3, ranks and
//! types that do not fit, by every implementation. None panics.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::LazyLock;

use crate::random::Random;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_attention::{
    AdamWOp, Adapter, Attention, AttentionMask, CrossEntropy, GatedDelta, GradientSource,
    MaskRules, Routes, Sequences, Window, adamw, adapted_linear_source, adapted_linears,
    backward_from, divided, flattened, gated_delta_step, gated_linear, gated_linear_source,
    grouped_linear, layer_norm, linear, linear_source, reshaped, rms_norm, routed_rows, routed_sum,
    short_convolution, stand_in, swiglu, swiglu_halves, wide_linear, wide_linear_onto,
    wide_linear_source, wide_linears,
};
use rope_burn::rope_core::{Layout, Pairing, Positions, RotarySpec};
use rope_burn::{Implementation, NormRotaryConfig, Rotary, RotaryAngles, RotaryConfig};
use rope_core::{HeadNorm, NormOrder};
use vlm_models::{ExpertAxis, ExpertShare, Parameter, VlmConfig};

/// How often each function is called.
const CALLS: usize = 300;

impl Random {
    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// Mostly the size that fits.
    fn size(&mut self, fits: usize) -> usize {
        if self.below(6) == 0 {
            self.below(4)
        } else {
            fits
        }
    }

    fn tensor<const D: usize>(&mut self, fits: [usize; D]) -> Tensor<D> {
        let shape = fits.map(|size| self.size(size));
        let dtype = match self.below(8) {
            0 => self.of(&[DType::F64, DType::F16, DType::BF16]),
            _ => DType::F32,
        };
        let x = Tensor::<D>::ones(shape, (&Device::flex().autodiff(), dtype));
        if self.below(2) == 0 {
            x.require_grad()
        } else {
            x
        }
    }
}

/// A parameter of four experts, mostly of eight elements.
fn axis(random: &mut Random) -> ExpertAxis {
    ExpertAxis {
        outer: random.size(2),
        experts: random.size(4),
        inner: random.size(1),
    }
}

/// Mostly one of two shares.
fn share(random: &mut Random) -> ExpertShare {
    ExpertShare {
        index: random.below(2),
        count: random.size(2),
    }
}

/// Mostly two rows of each of two tokens.
fn routes(random: &mut Random) -> Routes {
    let (tokens, per_token) = (random.size(2), random.size(2).max(1));
    let rows: Vec<usize> = (0..tokens * per_token).collect();
    let tokens: Vec<usize> = rows.iter().map(|row| row / per_token).collect();
    Routes::new(&tokens, &rows, per_token, &Device::flex().autodiff())
}

/// The function, and its name in the lists of public items.
type Function = (&'static str, fn(&mut Random) -> bool);

const PAIRINGS: [Pairing; 2] = [Pairing::Half, Pairing::Adjacent];
const IMPLEMENTATIONS: [Implementation; 2] = [Implementation::Fused, Implementation::Composed];

/// A rotation of heads of 4 channels in a layout of 4 dimensions.
fn rotary(random: &mut Random) -> Rotary {
    let builder = RotarySpec::builder(4).pairing(random.of(&PAIRINGS));
    let spec = builder.build().expect("valid");
    let layout = random.of(&[Layout::Bsnd, Layout::Bnsd, Layout::Sbnd]);
    Rotary::new(spec, layout).with_implementation(random.of(&IMPLEMENTATIONS))
}

fn angles(random: &mut Random, tokens: usize, heads: usize) -> Option<RotaryAngles> {
    match random.below(3) {
        0 => {
            RotaryAngles::from_cos_sin(random.tensor([tokens, 2]), random.tensor([tokens, 2])).ok()
        }
        1 => {
            let sizes = [tokens, heads, 2];
            RotaryAngles::per_head(random.tensor(sizes), random.tensor(sizes)).ok()
        }
        _ => {
            let positions = random.tensor([tokens, 1]);
            RotaryAngles::from_frequencies(positions, random.tensor([1, 1, 2])).ok()
        }
    }
}

fn pair(random: &mut Random) -> (Tensor<4>, Tensor<4>, RotaryAngles) {
    loop {
        let sizes = [2, 3, 2, 4].map(|size| random.size(size));
        let (q, k) = (random.tensor(sizes), random.tensor(sizes));
        let heads = random.below(3);
        let tokens = random.of(&[sizes[0], sizes[1], sizes[2], sizes[0] * sizes[1]]);
        if let Some(angles) = angles(random, tokens, heads) {
            return (q, k, angles);
        }
    }
}

fn norm(random: &mut Random) -> HeadNorm {
    let order = random.of(&[NormOrder::BeforeRotation, NormOrder::AfterRotation]);
    HeadNorm::new(1e-6).expect("valid").with_order(order)
}

/// A parameter of six elements at most that fit.
fn parameter(random: &mut Random) -> Parameter {
    static PARAMETERS: LazyLock<Vec<Parameter>> = LazyLock::new(|| {
        let folder = rope_check::fixtures().expect("the test runs in the workspace");
        let config = VlmConfig::from_folder(folder.join("models/qwen2_vl_tiny"));
        let model = config.expect("reads").init(&Device::flex().autodiff());
        model.expect("a model").parameters()
    });
    let mut parameter = PARAMETERS[random.below(PARAMETERS.len())].clone();
    parameter.shape = vec![random.size(2), random.size(3)];
    parameter
}

/// Mostly those of 3 tokens.
fn sequences(random: &mut Random) -> Sequences {
    let tokens = random.size(3);
    match random.below(2) {
        0 => Sequences::whole(tokens),
        _ => Sequences::packed(&[0, tokens / 2, tokens], tokens).expect("ends at `tokens`"),
    }
}

/// An output that an autodiff graph can go back through.
fn goes_back<const D: usize>(outputs: &[Tensor<D>]) -> bool {
    for out in outputs {
        if out.is_require_grad() {
            out.clone().sum().backward();
        }
    }
    true
}

/// As [`goes_back`].
fn goes_back_from(source: GradientSource) -> bool {
    if source.is_tracked() {
        backward_from([source]);
    }
    true
}

const FUNCTIONS: &[Function] = &[
    ("rope-burn Rotary::try_forward", |random| {
        let (q, k, angles) = pair(random);
        let out = rotary(random).try_forward(q, k, &angles);
        out.is_ok_and(|(q, k)| goes_back(&[q, k]))
    }),
    ("rope-burn Rotary::try_adjoint", |random| {
        let (q, k, angles) = pair(random);
        let out = rotary(random).try_adjoint(q, k, &angles);
        out.is_ok_and(|(q, k)| goes_back(&[q, k]))
    }),
    ("rope-burn Rotary::try_forward_single", |random| {
        let (q, _, angles) = pair(random);
        let out = rotary(random).try_forward_single(q, &angles);
        out.is_ok_and(|q| goes_back(&[q]))
    }),
    ("rope-burn Rotary::try_adjoint_single", |random| {
        let (q, _, angles) = pair(random);
        let out = rotary(random).try_adjoint_single(q, &angles);
        out.is_ok_and(|q| goes_back(&[q]))
    }),
    ("rope-burn Rotary::try_forward_norm", |random| {
        let (q, k, angles) = pair(random);
        let weights = [(); 2].map(|()| random.tensor([4]));
        let norm = norm(random);
        let out = rotary(random).try_forward_norm(q, k, weights, norm, &angles);
        out.is_ok_and(|(q, k)| goes_back(&[q, k]))
    }),
    ("rope-burn NormRotary::try_forward", |random| {
        let (q, k, angles) = pair(random);
        let config = RotaryConfig::new(RotarySpec::builder(4).build().expect("valid"));
        let config = NormRotaryConfig::new(config, norm(random));
        let module = config.init(&Device::flex().autodiff());
        let out = module.try_forward(q, k, &angles);
        out.is_ok_and(|(q, k)| goes_back(&[q, k]))
    }),
    ("rope-burn Rotary::try_angles_from_ids", |random| {
        let shape = [1, 3].map(|size| random.size(size));
        let ids = Tensor::<2, Int>::ones(shape, &Device::flex());
        rotary(random).try_angles_from_ids(ids).is_ok()
    }),
    ("rope-burn Rotary::try_angles", |random| {
        let (axes, tokens) = (1 + random.below(3), random.below(3));
        let positions = Positions::new(axes, &vec![1; axes * tokens]).expect("whole axes");
        rotary(random)
            .try_angles(&positions, &Device::flex())
            .is_ok()
    }),
    ("rope-burn Rotary::try_angles_for", |random| {
        let dtype = random.of(&[DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64]);
        let positions = Positions::new(1, &vec![1; random.below(3)]).expect("one axis");
        let device = Device::flex();
        rotary(random)
            .try_angles_for(dtype, &positions, &device)
            .is_ok()
    }),
    ("rope-burn RotaryAngles::from_cos_sin", |random| {
        RotaryAngles::from_cos_sin(random.tensor([3, 2]), random.tensor([3, 2])).is_ok()
    }),
    ("rope-burn RotaryAngles::per_head", |random| {
        RotaryAngles::per_head(random.tensor([3, 2, 2]), random.tensor([3, 2, 2])).is_ok()
    }),
    ("rope-burn RotaryAngles::from_frequencies", |random| {
        RotaryAngles::from_frequencies(random.tensor([3, 2]), random.tensor([2, 1, 3])).is_ok()
    }),
    ("burn-attention Attention::try_forward", |random| {
        let [batch, queries, keys] = [2, 3, 3].map(|size| random.size(size));
        let flags = vec![random.below(2) == 0; batch * keys];
        let window = Window {
            before: random.below(3),
            after: random.below(2),
        };
        let rules = MaskRules {
            causal: random.below(2) == 0,
            window: (random.below(2) == 0).then_some(window),
            attended: (random.below(2) == 0).then_some(&flags),
            ..MaskRules::default()
        };
        let Ok(mask) = AttentionMask::new(&rules, batch, queries, keys) else {
            return false;
        };
        let blocks = random.below(20);
        let bias = (random.below(2) == 0).then(|| random.tensor([batch, 1, queries, keys]));
        let attention = Attention::new(mask)
            .with_bias(bias)
            .with_implementation(random.of(&IMPLEMENTATIONS))
            .with_blocks(random.of(&[None, Some(blocks)]))
            .with_scale(random.of(&[0.5, 0.0, -1.0, f64::NAN, 1e300]));
        let q = random.tensor([batch, 4, queries, 2]);
        let (k, v) = (
            random.tensor([batch, 2, keys, 2]),
            random.tensor([batch, 2, keys, 3]),
        );
        let out = attention.try_forward(q, k, v);
        out.is_ok_and(|out| goes_back(&[out]))
    }),
    ("burn-attention AttentionMask::new", |random| {
        const SIZES: [usize; 6] = [0, 1, 2, 3, 1 << 59, usize::MAX];
        let [batch, queries, keys] = [(); 3].map(|()| random.of(&SIZES));
        let totals = [random.below(4), random.below(4), random.of(&SIZES)];
        let flags = vec![true; random.below(10)];
        let window = Window {
            before: random.of(&SIZES),
            after: random.of(&SIZES),
        };
        let rules = MaskRules {
            causal: random.below(2) == 0,
            window: (random.below(2) == 0).then_some(window),
            cu_seqlens: (random.below(2) == 0).then_some(&totals[..random.below(4)]),
            attended: (random.below(2) == 0).then_some(&flags),
        };
        AttentionMask::new(&rules, batch, queries, keys).is_ok()
    }),
    ("burn-attention CrossEntropy::try_forward", |random| {
        let targets = vec![random.of(&[0, 1, 2, -100, -1, i64::MIN]); random.size(3)];
        let Ok(loss) = CrossEntropy::new(&targets, random.size(3)) else {
            return false;
        };
        let scores = random.below(9);
        let loss = loss
            .with_implementation(random.of(&IMPLEMENTATIONS))
            .with_blocks(random.of(&[None, Some(scores)]));
        let out = loss.try_forward(random.tensor([3, 2]), random.tensor([3, 2]));
        out.is_ok_and(|out| goes_back(&[out]))
    }),
    ("burn-attention CrossEntropy::by_row", |random| {
        let targets = vec![random.of(&[0, 1, 2, -100, -1]); random.size(3)];
        let Ok(loss) = CrossEntropy::new(&targets, random.size(3)) else {
            return false;
        };
        let loss = loss.with_implementation(random.of(&IMPLEMENTATIONS));
        let out = loss.by_row(random.tensor([3, 2]), random.tensor([3, 2]));
        out.is_ok_and(|out| goes_back(&[out]))
    }),
    ("burn-attention rms_norm", |random| {
        let epsilon = random.of(&[1e-6, 0.0, -1.0, f64::NAN, f64::INFINITY]);
        let out = rms_norm(random.tensor([2, 3]), random.tensor([3]), epsilon);
        out.is_ok_and(|out| goes_back(&[out]))
    }),
    ("burn-attention layer_norm", |random| {
        let epsilon = random.of(&[1e-6, 0.0, -1.0, f64::NAN, f64::INFINITY]);
        let (weight, bias) = (random.tensor([3]), random.tensor([3]));
        let out = layer_norm(random.tensor([2, 3]), weight, bias, epsilon);
        out.is_ok_and(|out| goes_back(&[out]))
    }),
    ("burn-attention swiglu", |random| {
        let out = swiglu(random.tensor([2, 3]), random.tensor([2, 3]));
        out.is_ok_and(|out| goes_back(&[out]))
    }),
    ("burn-attention flattened", |random| {
        let tensors = vec![random.tensor([2, 3]).inner(), random.tensor([4, 1]).inner()];
        let flat = flattened(tensors.into_iter().map(Tensor::into_dispatch).collect());
        flat[0].dims() == [6]
    }),
    ("burn-attention divided", |random| {
        let flat = random.tensor([6]).inner();
        let parts = divided(flat, &[[1, 2], [2, 2]]);
        parts.is_ok_and(|parts| parts.iter().all(|x| x.to_data().num_elements() > 0))
    }),
    ("burn-attention reshaped", |random| {
        let tensors = vec![random.tensor([6]).inner(), random.tensor([2]).inner()];
        let shapes = vec![[2, 3].into(), [2, 1, 1].into()];
        reshaped(tensors, shapes).is_ok_and(|parts| parts.len() == 2)
    }),
    ("burn-attention adamw", |random| {
        let mut number = |usual| random.of(&[usual, usual, usual, 0.0, 1.0, -1.0, f64::NAN]);
        let op = AdamWOp {
            rate: number(1e-3),
            decay: number(0.1),
            betas: [number(0.9), number(0.999)],
            epsilon: number(1e-8),
            scale: 0.5,
            steps: random.of(&[0, 1, 2, u64::MAX]),
        };
        let dtype = random.of(&[DType::F32, DType::BF16, DType::F16, DType::F64]);
        let (value, gradient) = (random.tensor([2, 3]), random.tensor([2, 3]));
        let moments = [random.tensor([2, 3]), random.tensor([2, 3])];
        adamw(value, gradient, moments, op, dtype.into()).is_ok()
    }),
    ("burn-attention linear", |random| {
        let (x, weight) = (random.tensor([1, 3, 2]), random.tensor([2, 4]));
        let bias = (random.below(2) == 0).then(|| random.tensor([4]));
        let rank = 1 + random.below(2);
        let adapter = [random.tensor([2, rank]), random.tensor([rank, 4])];
        let out = linear(x, weight, bias, (random.below(2) == 0).then_some(adapter));
        out.is_ok_and(|out| goes_back(&[out]))
    }),
    ("burn-attention adapted_linears", |random| {
        let (x, weight) = (random.tensor([1, 3, 2]), random.tensor([2, 4]));
        let bias = (random.below(2) == 0).then(|| random.tensor([4]));
        let rank = 1 + random.below(2);
        let (a, b) = (random.tensor([rank, 2]), random.tensor([rank, 4]));
        let factors = [random.tensor([rank, 2]), random.tensor([rank, 4])];
        let out = adapted_linears(x, [(weight, bias, Adapter { a, b, factors })]);
        out.is_ok_and(|out| goes_back(&out))
    }),
    ("burn-attention wide_linear", |random| {
        let (x, weight) = (random.tensor([1, 3, 2]), random.tensor([2, 4]));
        let bias = (random.below(2) == 0).then(|| random.tensor([4]));
        wide_linear(x, weight, bias).is_ok_and(|out| goes_back(&[out]))
    }),
    ("burn-attention wide_linears", |random| {
        let (x, weight) = (random.tensor([1, 3, 2]), random.tensor([2, 4]));
        let layers = [(weight, None), (random.tensor([2, 3]), None)];
        wide_linears(x, layers).is_ok_and(|out| goes_back(&out))
    }),
    ("burn-attention wide_linear_onto", |random| {
        let (y, x) = (random.tensor([1, 3, 4]), random.tensor([1, 3, 2]));
        let out = wide_linear_onto(y, x, random.tensor([2, 4]));
        out.is_ok_and(|out| goes_back(&[out]))
    }),
    ("burn-attention gated_linear", |random| {
        let (gate, up) = (random.tensor([1, 3, 2]), random.tensor([1, 3, 2]));
        let y = (random.below(2) == 0).then(|| random.tensor([1, 3, 4]));
        let out = gated_linear(gate, up, random.tensor([2, 4]), y);
        out.is_ok_and(|out| goes_back(&[out]))
    }),
    ("burn-attention gated_linear_source", |random| {
        let (gate, up) = (random.tensor([1, 3, 2]), random.tensor([1, 3, 2]));
        let (weight, gradient) = (random.tensor([2, 4]), random.tensor([1, 3, 4]).inner());
        gated_linear_source(gate, up, weight, gradient).is_ok_and(goes_back_from)
    }),
    ("burn-attention stand_in", |random| {
        let (x, value) = (random.tensor([2, 3]), random.tensor([2, 3]).detach());
        stand_in(x, value).is_ok_and(|out| goes_back(&[out]))
    }),
    ("burn-attention GradientSource::new", |random| {
        let (output, gradient) = (random.tensor([2, 3]), random.tensor([2, 3]).inner());
        GradientSource::new(output, gradient).is_ok_and(goes_back_from)
    }),
    ("burn-attention GradientSource::with", |random| {
        let [output, other] = [(); 2].map(|()| random.tensor([2, 3]));
        let [gradient, of_other] = [(); 2].map(|()| random.tensor([2, 3]).inner());
        let source = GradientSource::new(output, gradient);
        let both = source.and_then(|source| source.with(other, of_other));
        both.is_ok_and(goes_back_from)
    }),
    ("burn-attention linear_source", |random| {
        let (x, weight) = (random.tensor([1, 3, 2]), random.tensor([2, 4]));
        let gradient = random.tensor([1, 3, 4]).inner();
        linear_source(x, weight, None, None, gradient).is_ok_and(goes_back_from)
    }),
    ("burn-attention wide_linear_source", |random| {
        let (x, weight) = (random.tensor([1, 3, 2]), random.tensor([2, 4]));
        let gradient = random.tensor([1, 3, 4]).inner();
        wide_linear_source(x, weight, None, gradient).is_ok_and(goes_back_from)
    }),
    ("burn-attention adapted_linear_source", |random| {
        let (x, weight) = (random.tensor([1, 3, 2]), random.tensor([2, 4]));
        let (a, b) = (random.tensor([1, 2]), random.tensor([1, 4]));
        let factors = [random.tensor([1, 2]), random.tensor([1, 4])];
        let layer = (weight, None, Adapter { a, b, factors });
        let gradient = random.tensor([1, 3, 4]).inner();
        adapted_linear_source(x, layer, gradient).is_ok_and(goes_back_from)
    }),
    ("burn-attention GatedDelta::try_forward", |random| {
        let [q, k] = [(); 2].map(|()| random.tensor([1, 3, 1, 2]));
        let v = random.tensor([1, 3, 2, 3]);
        let [g, beta] = [(); 2].map(|()| random.tensor([1, 3, 2]));
        let rule = GatedDelta::new(sequences(random)).with_blocks(random.of(&[None, Some(0)]));
        let out = rule.try_forward(q, k, v, g, beta);
        out.is_ok_and(|(out, state)| goes_back(&[out, state]))
    }),
    ("burn-attention gated_delta_step", |random| {
        let [q, k] = [(); 2].map(|()| random.tensor([1, 1, 2]));
        let v = random.tensor([1, 2, 3]);
        let numbers = [(); 2].map(|()| random.tensor([1, 2]));
        let out = gated_delta_step([q, k, v], numbers, random.tensor([1, 2, 2, 3]));
        out.is_ok_and(|(out, state)| goes_back(&[out]) && goes_back(&[state]))
    }),
    ("burn-attention grouped_linear", |random| {
        let (x, weight) = (random.tensor([3, 2]), random.tensor([2, 4, 2]));
        let groups = [random.size(1), random.size(2)];
        let out = grouped_linear(x, weight, &groups);
        out.is_ok_and(|out| goes_back(&[out]))
    }),
    ("burn-attention routed_rows", |random| {
        let out = routed_rows(random.tensor([2, 3]), &routes(random));
        out.is_ok_and(|out| goes_back(&[out]))
    }),
    ("burn-attention routed_sum", |random| {
        let (rows, shares) = (random.tensor([4, 3]), random.tensor([2, 2]));
        let out = routed_sum(rows, shares, &routes(random));
        out.is_ok_and(|out| goes_back(&[out]))
    }),
    ("burn-attention swiglu_halves", |random| {
        let out = swiglu_halves(random.tensor([2, 4]));
        out.is_ok_and(|out| goes_back(&[out]))
    }),
    ("burn-attention short_convolution", |random| {
        let (x, weight) = (random.tensor([1, 3, 2]), random.tensor([2, 4]));
        let out = short_convolution(x, weight, &sequences(random));
        out.is_ok_and(|out| goes_back(&[out]))
    }),
    ("vlm-models Parameter::sample", |random| {
        let parameter = parameter(random);
        parameter.sample(random.tensor([6]), random.size(6)).is_ok()
    }),
    ("vlm-models Parameter::sample_at", |random| {
        let (parameter, first) = (parameter(random), random.below(3));
        let length = random.size(6);
        let part = random.tensor([length]);
        let sampled = parameter.sample_at(part, random.size(6), |element| first + element / 2);
        sampled.is_ok()
    }),
    ("vlm-models ExpertAxis::cut", |random| {
        let (axis, share) = (axis(random), share(random));
        axis.cut(random.tensor([8]).inner(), share).is_ok()
    }),
    ("vlm-models ExpertAxis::join", |random| {
        let axis = axis(random);
        let shares = (0..random.size(2)).map(|_| random.tensor([4]).inner());
        axis.join(shares.collect()).is_ok()
    }),
    ("vlm-models ExpertPass::backward", |random| {
        let folder = rope_check::fixtures().expect("the test runs in the workspace");
        let config = VlmConfig::from_folder(folder.join("models/qwen3_moe_tiny")).expect("reads");
        let model = config.init(&Device::flex().autodiff()).expect("a model");
        let [experts, channels] = model.expert_sizes().expect("experts");
        let mut counts = vec![0; random.size(experts)];
        counts
            .iter_mut()
            .take(2)
            .for_each(|count| *count = random.below(3));
        let rows = counts.iter().sum();
        let [given, gradient] = [(); 2].map(|()| random.tensor([rows, channels]).inner());
        let with_gradients = random.below(4) > 0;
        let pass = model.pass_experts(random.below(2), given, &counts, with_gradients);
        pass.is_ok_and(|pass| pass.backward(gradient, &mut |_, _| ()).is_ok())
    }),
    ("vlm-models VisionConfig::patches", |random| {
        let folder = rope_check::fixtures().expect("the test runs in the workspace");
        let config = VlmConfig::from_folder(folder.join("models/qwen2_vl_tiny")).expect("reads");
        let vision = config.vision.expect("a tower");
        let [colours, frames, rows, columns] = vision.patch;
        let (rows, columns) = (
            2 * rows * vision.spatial_merge,
            columns * vision.spatial_merge,
        );
        vision
            .patches(random.tensor([frames, colours, rows, columns]))
            .is_ok()
    }),
];

#[test]
fn every_result_is_returned() {
    thread_local! {
        static SAID: RefCell<String> = const { RefCell::new(String::new()) };
    }
    let hook = take_hook();
    set_hook(Box::new(|panic| {
        SAID.with_borrow_mut(|said| *said = panic.to_string());
    }));
    let mut panics = BTreeSet::new();
    let mut rare = Vec::new();
    for (name, function) in FUNCTIONS {
        let mut random = Random(7);
        let mut succeeded = 0;
        for _ in 0..CALLS {
            match catch_unwind(AssertUnwindSafe(|| function(&mut random))) {
                Ok(success) => succeeded += usize::from(success),
                Err(_) => drop(panics.insert((*name, SAID.with_borrow(String::clone)))),
            }
        }
        // Both outcomes must be seen, or the shapes would show little.
        if !(CALLS / 50..CALLS).contains(&succeeded) {
            rare.push((*name, succeeded));
        }
    }
    set_hook(hook);
    assert!(panics.is_empty(), "{panics:#?}");
    assert!(rare.is_empty(), "succeeded so often of {CALLS}: {rare:?}");
}

/// The lists of public items name every function: none of tensors is left out.
#[test]
fn each_public_function_of_tensors_is_called() {
    let lists = rope_check::fixtures().expect("the test runs in the workspace");
    let lists = lists.join("../../docs/api");
    let mut missing = Vec::new();
    for package in ["rope-burn", "burn-attention", "vlm-models"] {
        let list = std::fs::read_to_string(lists.join(format!("{package}.txt")));
        for line in list.expect("the list reads").lines() {
            let takes_tensors = line.contains("Tensor<") && line.contains("-> Result<");
            let Some((path, item)) = line.split_once(": ").filter(|_| takes_tensors) else {
                continue;
            };
            // A trait as a whole: each of its functions has a line of its own.
            if item.starts_with("pub trait ") {
                continue;
            }
            let function = item.split(['(', '<']).next().unwrap_or_default();
            let function = function.rsplit(' ').next().unwrap_or_default();
            let name = match path.rsplit_once("struct.") {
                Some((_, kind)) => format!("{package} {kind}::{function}"),
                None => format!("{package} {function}"),
            };
            // A whole model's are in the tests of models, and those of walks refuse by default.
            let is_of_a_model = name.starts_with("vlm-models Vlm::") || path.contains("trait.Walk");
            if !is_of_a_model && !FUNCTIONS.iter().any(|(known, _)| *known == name) {
                missing.push(name);
            }
        }
    }
    assert!(missing.is_empty(), "{missing:?}");
}
