//! A feed-forward network of experts: a router chooses some of them for each token.

use burn::module::{Module, Param, ParamId};
use burn::tensor::activation::sigmoid;
use burn::tensor::{DType, Device, Distribution, Shape, Tensor, TensorData};
use burn_attention::{Routes as RoutesOfRows, linear, routed_rows, routed_sum, swiglu_halves};

use crate::balance::on_host;
use crate::config::{ExpertConfig, ExpertGroups, TextConfig};
use crate::error::{Result, VlmError};
use crate::layers::{Activation, FeedForward, FeedForwardConfig, Gate, OF_CONVOLUTION};
use crate::linear::{Adaptable, Linear, Matrices, adapter_dtype};
use crate::step::Common;
use crate::tensors::indices;

/// The parameters of experts, in transformers' order, and the matrices of each.
pub(crate) const EXPERT_MATRICES: [(&str, &[&str]); 2] = [
    ("gate_up_proj", &["gate_proj", "up_proj"]),
    ("down_proj", &["down_proj"]),
];
pub(crate) const PARAMETERS: [&str; 2] = [EXPERT_MATRICES[0].0, EXPERT_MATRICES[1].0];

/// The sum of the chosen experts' outputs, each times its share of the router's scores, and of the
/// shared expert's output, times the sigmoid of its gate if it has one.
#[derive(Module, Debug)]
pub(crate) struct ExpertNetwork {
    gate: Router,
    experts: Experts,
    /// At most one, and at most one gate. A module cannot be in a box, and in place every layer of all models
    /// is larger.
    shared_expert: Vec<FeedForward>,
    shared_expert_gate: Vec<Linear>,
    #[module(skip)]
    per_token: usize,
    #[module(skip)]
    is_normalised: bool,
}

#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "a module cannot be in a box")]
enum Router {
    Softmax(Linear),
    Sigmoid(SigmoidRouter),
}

/// A router that is in f32 in a model of 16 bits, too.
#[derive(Module, Debug)]
struct SigmoidRouter {
    /// `[experts, inputs]`
    weight: Param<Tensor<2>>,
    /// Added to the scores for the choice, and not trained.
    e_score_correction_bias: Param<Tensor<1>>,
    #[module(skip)]
    groups: ExpertGroups,
}

/// The scores of a token's experts, `[tokens, experts]`.
struct Scores {
    /// Those in the sum, with gradients.
    shares: Tensor<2>,
    /// Those of the choice.
    choice: Tensor<2>,
    /// The logits, if the scores are no probabilities.
    logits: Option<Tensor<2>>,
}

impl Scores {
    /// The probabilities by a softmax.
    fn probabilities(&self) -> Tensor<2> {
        match &self.logits {
            Some(logits) => softmax(logits.clone()),
            None => self.shares.clone(),
        }
    }
}

/// The softmax of rows, by the same operations with gradients and without: backends have one of
/// their own, with other bits, for tensors that are not tracked.
fn softmax(logits: Tensor<2>) -> Tensor<2> {
    let largest = logits.clone().detach().max_dim(1);
    let powers = (logits - largest).exp();
    powers.clone() / powers.sum_dim(1)
}

impl Router {
    fn scores(&self, x: Tensor<2>, wide: DType) -> Result<Scores> {
        match self {
            Self::Softmax(linear) => {
                let logits = linear.forward(x, None)?;
                let shares = softmax(logits.cast(wide));
                let choice = shares.clone().detach();
                Ok(Scores {
                    shares,
                    choice,
                    logits: None,
                })
            }
            Self::Sigmoid(router) => {
                let weight = router.weight.val().cast(wide);
                let logits = linear(x.cast(wide), weight.transpose(), None, None)?;
                let shares = sigmoid(logits.clone());
                let correction = router.e_score_correction_bias.val().detach().cast(wide);
                let choice = shares.clone().detach() + correction.unsqueeze();
                Ok(Scores {
                    shares,
                    choice,
                    logits: Some(logits),
                })
            }
        }
    }

    /// The factors of the chosen experts, from their scores, `[tokens, per_token]`.
    fn factors(&self, shares: Tensor<2>, is_normalised: bool, narrow: DType) -> Tensor<2> {
        let wide = shares.dtype();
        match self {
            Self::Softmax(_) if is_normalised => shares.clone() / shares.sum_dim(1),
            Self::Softmax(_) => shares,
            Self::Sigmoid(router) => {
                let sum = shares.clone().sum_dim(1) + LEAST_SUM;
                let shares = if is_normalised { shares / sum } else { shares };
                return shares * router.groups.scale;
            }
        }
        // Rounded to the type of the model, as in transformers.
        .cast(narrow)
        .cast(wide)
    }

    /// The number of experts, and of channels.
    fn sizes(&self) -> [usize; 2] {
        match self {
            Self::Softmax(linear) => {
                let [channels, experts] = linear.weight.lazy_shape().dims();
                [experts, channels]
            }
            Self::Sigmoid(router) => router.weight.lazy_shape().dims(),
        }
    }

    fn groups(&self) -> Option<ExpertGroups> {
        match self {
            Self::Softmax(_) => None,
            Self::Sigmoid(router) => Some(router.groups),
        }
    }
}

/// Added to a sum of sigmoids that is a divisor.
const LEAST_SUM: f64 = 1e-20;

/// The matrices of the experts of this rank: gate and up together, gate first, and down.
#[derive(Module, Debug)]
pub(crate) struct Experts {
    gate_up_proj: Matrices,
    down_proj: Matrices,
}

/// The experts of some tokens.
#[derive(Debug, PartialEq, Eq)]
struct Routes {
    /// The experts of each token, likeliest first.
    experts: Vec<usize>,
    /// The tokens of each expert without padding, in the order of experts.
    tokens: Vec<usize>,
    /// For each token and each of its experts, the row in that order; for padding, an index beyond
    /// them.
    rows: Vec<usize>,
    /// The number of tokens of each expert.
    counts: Vec<usize>,
}

impl Routes {
    /// Chooses the experts of each token with the highest scores, of equal ones the first, from
    /// scores `[tokens, experts]`.
    fn new(
        scores: &[f32],
        [experts, per_token]: [usize; 2],
        groups: Option<ExpertGroups>,
        attended: Option<&[bool]>,
    ) -> Self {
        let is_attended = |token: usize| attended.is_none_or(|attended| attended[token]);
        let mut order: Vec<usize> = Vec::with_capacity(experts);
        let (mut chosen, mut counts) = (Vec::new(), vec![0; experts]);
        let groups = groups.filter(|groups| groups.per_token < groups.groups);
        for (index, token) in scores.chunks_exact(experts).enumerate() {
            order.clear();
            match &groups {
                Some(groups) => order.extend(groups.best(token)),
                None => order.extend(0..experts),
            }
            let likelier = |a: &usize, b: &usize| token[*b].total_cmp(&token[*a]).then(a.cmp(b));
            if per_token < order.len() {
                order.select_nth_unstable_by(per_token, likelier);
                order.truncate(per_token);
            }
            order.sort_unstable_by(likelier);
            if is_attended(index) {
                order.iter().for_each(|expert| counts[*expert] += 1);
            }
            chosen.extend(&order);
        }
        let mut next: Vec<usize> = counts
            .iter()
            .scan(0, |end, count| {
                let start = *end;
                *end += count;
                Some(start)
            })
            .collect();
        let all = counts.iter().sum();
        let mut tokens = vec![0; all];
        let row = |(place, expert): (usize, &usize)| {
            if !is_attended(place / per_token) {
                return all;
            }
            let row = next[*expert];
            next[*expert] += 1;
            tokens[row] = place / per_token;
            row
        };
        let rows = chosen.iter().enumerate().map(row).collect();
        Self {
            experts: chosen,
            tokens,
            rows,
            counts,
        }
    }
}

impl ExpertGroups {
    /// The experts of a token's best groups, from its scores.
    fn best(&self, scores: &[f32]) -> impl Iterator<Item = usize> {
        let size = scores.len() / self.groups;
        let group = |scores: &[f32]| {
            let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
            for score in scores.iter().copied() {
                match score > first {
                    true => (first, second) = (score, first),
                    false => second = second.max(score),
                }
            }
            first + second
        };
        let sums: Vec<f32> = scores.chunks_exact(size).map(group).collect();
        let mut order: Vec<usize> = (0..self.groups).collect();
        order.sort_by(|a, b| sums[*b].total_cmp(&sums[*a]));
        order.truncate(self.per_token);
        order
            .into_iter()
            .flat_map(move |group| group * size..(group + 1) * size)
    }
}

impl ExpertNetwork {
    pub(crate) fn new(text: &TextConfig, config: &ExpertConfig, device: &Device) -> Self {
        let (inputs, hidden) = (text.hidden_size, config.intermediate_size);
        let matrices = |outputs: usize, inputs: usize| {
            let shape = [config.experts, outputs, inputs];
            Matrices::of(OF_CONVOLUTION.init_with(shape, Some(inputs), Some(outputs), device))
        };
        let shared = config.shared_size.map(|hidden| FeedForwardConfig {
            input: inputs,
            hidden,
            output: inputs,
            gate: Gate::Own,
            bias: false,
            activation: Activation::Silu,
        });
        let gate = match config.groups {
            None => Router::Softmax(Linear::new(inputs, config.experts, false, device)),
            Some(groups) => {
                Router::Sigmoid(SigmoidRouter::new([config.experts, inputs], groups, device))
            }
        };
        Self {
            gate,
            experts: Experts {
                gate_up_proj: matrices(2 * hidden, inputs),
                down_proj: matrices(inputs, hidden),
            },
            shared_expert_gate: shared
                .iter()
                .filter(|_| config.has_shared_gate)
                .map(|_| Linear::new(inputs, 1, false, device))
                .collect(),
            shared_expert: shared
                .map(|config| config.init(device))
                .into_iter()
                .collect(),
            per_token: config.per_token,
            is_normalised: config.is_normalised,
        }
    }

    /// The layers that adapters may be beside, by name. PEFT takes the names of the shared expert's
    /// for those of the others, so none may be beside it.
    pub(crate) fn adaptable(&mut self) -> Vec<(&'static str, Adaptable<'_>)> {
        let mut found = Vec::new();
        if let Router::Softmax(gate) = &mut self.gate {
            found.push(("gate", Adaptable::Gate(gate)));
        }
        let shared = self.shared_expert_gate.first_mut();
        found.extend(shared.map(|gate| ("shared_expert_gate.0", Adaptable::Gate(gate))));
        let Experts {
            gate_up_proj,
            down_proj,
        } = &mut self.experts;
        found.push(("experts.gate_up_proj", Adaptable::Experts(gate_up_proj)));
        found.push(("experts.down_proj", Adaptable::Experts(down_proj)));
        found
    }

    /// # Shapes
    /// x and the output: `[batch, seq, hidden_size]`
    ///
    /// # Errors
    /// [`VlmError::Walk`] if the experts are divided among ranks.
    pub(crate) fn forward(&self, x: Tensor<3>, common: Common) -> Result<Tensor<3>> {
        if self.is_divided() {
            let reason = "the experts are divided among ranks, and a single one computes nothing";
            return Err(VlmError::Walk(reason.to_owned()));
        }
        let routed = self.route(x.clone(), common)?;
        let outputs = self.experts.pass(routed.rows(x.clone())?, &routed.counts)?;
        self.combine(x, outputs, routed, common)
    }

    /// Chooses the experts of each token.
    pub(crate) fn route(&self, x: Tensor<3>, common: Common) -> Result<Routed> {
        let [batch, seq, channels] = x.dims();
        let tokens = batch * seq;
        let device = &x.device();
        let wide = adapter_dtype(x.dtype());
        let scores = self
            .gate
            .scores(x.clone().reshape([tokens, channels]), wide)?;
        let [_, experts] = scores.shares.dims();
        let sizes = [experts, self.per_token];
        if let Some(balance) = common.balance {
            balance.see(scores.probabilities(), |probabilities| {
                Routes::new(probabilities, sizes, None, None).experts
            })?;
        }
        let Scores { shares, choice, .. } = scores;
        let (choice, groups) = (on_host(choice)?, self.gate.groups());
        let routes = Routes::new(&choice, sizes, groups, common.attended);
        let chosen = indices(routes.experts, device).reshape([tokens, self.per_token]);
        let shares = shares.gather(1, chosen);
        let mut shares = self.gate.factors(shares, self.is_normalised, x.dtype());
        if let Some(attended) = common.attended {
            let attended: Vec<f32> = attended.iter().map(|at| f32::from(u8::from(*at))).collect();
            let attended = TensorData::new(attended, [tokens, 1]);
            shares = shares * Tensor::from_data(attended, (device, wide));
        }
        Ok(Routed {
            routes: RoutesOfRows::new(&routes.tokens, &routes.rows, self.per_token, device),
            counts: routes.counts,
            shares,
        })
    }

    /// The output, from those of the experts for [`Routed::rows`].
    pub(crate) fn combine(
        &self,
        x: Tensor<3>,
        outputs: Tensor<2>,
        routed: Routed,
        common: Common,
    ) -> Result<Tensor<3>> {
        let [batch, seq, channels] = x.dims();
        let draw = common.draw;
        let sum = routed_sum(outputs, routed.shares, &routed.routes)?;
        let sum = sum.reshape([batch, seq, channels]);
        let Some(shared) = self.shared_expert.first() else {
            return Ok(sum);
        };
        Ok(match self.shared_expert_gate.first() {
            Some(gate) => {
                let open = sigmoid(gate.forward(x.clone(), draw)?);
                sum + open * shared.forward(x, draw)?
            }
            None => sum + shared.forward(x, draw)?,
        })
    }

    /// The experts among which the router chooses, and the channels of their inputs.
    pub(crate) fn sizes(&self) -> [usize; 2] {
        self.gate.sizes()
    }

    /// The experts of this rank: all, or its share of them.
    pub(crate) fn experts(&self) -> &Experts {
        &self.experts
    }

    /// True if other ranks have some of the experts.
    pub(crate) fn is_divided(&self) -> bool {
        self.experts.count() < self.sizes()[0]
    }
}

/// The tokens of experts, and the factors on their outputs.
pub(crate) struct Routed {
    /// The token of each row, sorted by expert, and the rows of each token.
    routes: RoutesOfRows,
    /// The number of rows of each expert.
    pub(crate) counts: Vec<usize>,
    /// `[tokens, per_token]`
    shares: Tensor<2>,
}

impl Routed {
    /// The inputs of the experts, sorted by expert, `[rows, channels]`.
    pub(crate) fn rows(&self, x: Tensor<3>) -> Result<Tensor<2>> {
        let [batch, seq, channels] = x.dims();
        Ok(routed_rows(
            x.reshape([batch * seq, channels]),
            &self.routes,
        )?)
    }
}

impl Experts {
    /// Passes rows through the experts. `counts`: the rows of each, in order.
    pub(crate) fn pass(&self, rows: Tensor<2>, counts: &[usize]) -> Result<Tensor<2>> {
        let both = self.gate_up_proj.forward(rows, counts)?;
        self.down_proj.forward(swiglu_halves(both)?, counts)
    }

    /// The number of experts.
    pub(crate) fn count(&self) -> usize {
        self.down_proj.count()
    }

    /// The matrices of all experts.
    pub(crate) fn matrices(&self) -> [&Matrices; 2] {
        [&self.gate_up_proj, &self.down_proj]
    }
}

impl SigmoidRouter {
    fn new([experts, inputs]: [usize; 2], groups: ExpertGroups, device: &Device) -> Self {
        let bound = 1.0 / (inputs as f64).sqrt();
        Self {
            weight: drawn([experts, inputs], bound, device),
            e_score_correction_bias: drawn([experts], 0.0, device).set_require_grad(false),
            groups,
        }
    }
}

/// A parameter that is in f32 in a model of 16 bits, too: uniform within a bound, drawn when it is
/// first used.
fn drawn<const D: usize>(shape: [usize; D], bound: f64, device: &Device) -> Param<Tensor<D>> {
    let draw = move |device: &Device, is_trained: bool| {
        let dtype = adapter_dtype(device.settings().float_dtype.into());
        let range = Distribution::Uniform(-bound, bound);
        let tensor = match bound > 0.0 {
            true => Tensor::random(shape, range, (device, dtype)),
            false => Tensor::zeros(shape, (device, dtype)),
        };
        tensor.set_require_grad(is_trained)
    };
    Param::uninitialized(
        ParamId::new(),
        draw,
        device.clone(),
        true,
        Shape::from(shape),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_sorted_by_their_likeliest_experts() {
        // The second token's last two experts are equally likely.
        let probabilities = [0.1, 0.2, 0.7, 0.6, 0.2, 0.2];
        let routes = Routes::new(&probabilities, [3, 2], None, None);
        assert_eq!(
            routes,
            Routes {
                experts: vec![2, 1, 0, 1],
                tokens: vec![1, 0, 1, 0],
                rows: vec![3, 1, 0, 2],
                counts: vec![1, 2, 1],
            }
        );
        let all = Routes::new(&probabilities, [3, 3], None, None);
        assert_eq!(all.counts, [2, 2, 2]);
        // The first token is padding.
        let second = Routes::new(&probabilities, [3, 2], None, Some(&[false, true]));
        assert_eq!(second.experts, [2, 1, 0, 1]);
        assert_eq!(
            (&second.tokens[..], &second.rows[..]),
            (&[1, 1][..], &[2, 2, 0, 1][..])
        );
        assert_eq!(second.counts, [1, 1, 0]);
    }

    #[test]
    fn experts_are_of_the_groups_with_the_best_pairs() {
        let groups = ExpertGroups {
            groups: 3,
            per_token: 2,
            scale: 1.0,
        };
        // The best expert is in the worst group.
        let scores = [0.9, 0.1, 0.0, 0.6, 0.5, 0.0, 0.5, 0.7, 0.4];
        let routes = Routes::new(&scores, [9, 3], Some(groups), None);
        assert_eq!(routes.experts, [7, 3, 4]);
    }
}
