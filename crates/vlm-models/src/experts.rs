//! A feed-forward network of experts: a router chooses some of them for each token.

use burn::module::Module;
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{DType, Device, Tensor};
use burn_attention::swiglu;

use crate::config::{ExpertConfig, TextConfig};
use crate::error::{Result, VlmError};
use crate::layers::{Activation, FeedForward, FeedForwardConfig, Gate, OF_CONVOLUTION};
use crate::linear::{Adaptable, Draw, Linear, Matrices};
use crate::tensors::indices;

/// The parameters of experts, in transformers' order, and the matrices of each.
pub(crate) const EXPERT_MATRICES: [(&str, &[&str]); 2] = [
    ("gate_up_proj", &["gate_proj", "up_proj"]),
    ("down_proj", &["down_proj"]),
];
pub(crate) const PARAMETERS: [&str; 2] = [EXPERT_MATRICES[0].0, EXPERT_MATRICES[1].0];

/// The sum of the chosen experts' outputs, each times its share of the router's probabilities, and
/// of the shared expert's output, times the sigmoid of its gate.
#[derive(Module, Debug)]
pub(crate) struct ExpertNetwork {
    /// The router.
    gate: Linear,
    experts: Experts,
    /// At most one, and its gate. A module cannot be in a box, and in place every layer of all models
    /// is larger.
    shared_expert: Vec<FeedForward>,
    shared_expert_gate: Vec<Linear>,
    #[module(skip)]
    per_token: usize,
    #[module(skip)]
    is_normalised: bool,
}

/// The matrices of all experts: gate and up together, gate first, and down.
#[derive(Module, Debug)]
struct Experts {
    gate_up_proj: Matrices,
    down_proj: Matrices,
}

/// The experts of some tokens.
#[derive(Debug, PartialEq, Eq)]
struct Routes {
    /// The experts of each token, likeliest first.
    experts: Vec<usize>,
    /// The tokens of each expert, in the order of experts.
    tokens: Vec<usize>,
    /// For each token and each of its experts, the row in that order.
    rows: Vec<usize>,
    /// The number of tokens of each expert.
    counts: Vec<usize>,
}

impl Routes {
    /// Chooses the likeliest experts of each token, of equally likely ones the first, from
    /// probabilities `[tokens, experts]`.
    fn new(probabilities: &[f32], experts: usize, per_token: usize) -> Self {
        let mut order: Vec<usize> = Vec::with_capacity(experts);
        let (mut chosen, mut counts) = (Vec::new(), vec![0; experts]);
        for token in probabilities.chunks_exact(experts) {
            order.clear();
            order.extend(0..experts);
            let likelier = |a: &usize, b: &usize| token[*b].total_cmp(&token[*a]).then(a.cmp(b));
            if per_token < experts {
                order.select_nth_unstable_by(per_token, likelier);
                order.truncate(per_token);
            }
            order.sort_unstable_by(likelier);
            order.iter().for_each(|expert| counts[*expert] += 1);
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
        let mut tokens = vec![0; chosen.len()];
        let row = |(place, expert): (usize, &usize)| {
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
        Self {
            gate: Linear::new(inputs, config.experts, false, device),
            experts: Experts {
                gate_up_proj: matrices(2 * hidden, inputs),
                down_proj: matrices(inputs, hidden),
            },
            shared_expert_gate: shared
                .iter()
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
        let mut found = vec![("gate", Adaptable::Gate(&mut self.gate))];
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
    pub(crate) fn forward(&self, x: Tensor<3>, draw: Draw) -> Result<Tensor<3>> {
        let [batch, seq, channels] = x.dims();
        let tokens = batch * seq;
        let flat = x.clone().reshape([tokens, channels]);
        let logits = self.gate.forward(flat.clone(), None)?;
        let wide = match x.dtype() {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let probabilities = softmax(logits.cast(wide), 1);
        let [_, experts] = probabilities.dims();
        let read = probabilities
            .clone()
            .detach()
            .cast(DType::F32)
            .try_into_data();
        let read = read.map_err(|error| VlmError::TensorUnreadable {
            name: "the router's probabilities".to_owned(),
            reason: error.reason().to_owned(),
        })?;
        let read: Vec<f32> = read.iter().collect();
        let routes = Routes::new(&read, experts, self.per_token);
        let device = &x.device();
        let chosen = indices(routes.experts, device).reshape([tokens, self.per_token]);
        let mut shares = probabilities.gather(1, chosen);
        if self.is_normalised {
            shares = shares.clone() / shares.sum_dim(1);
        }

        let rows = flat.select(0, indices(routes.tokens, device));
        let both = self.experts.gate_up_proj.forward(rows, &routes.counts)?;
        let hidden = both.dims()[1] / 2;
        let gate = both.clone().narrow(1, 0, hidden);
        let gated = swiglu(gate, both.narrow(1, hidden, hidden))?;
        let outputs = self.experts.down_proj.forward(gated, &routes.counts)?;
        let outputs = outputs.select(0, indices(routes.rows, device));
        let outputs = outputs.reshape([tokens, self.per_token, channels]);
        // The shares are rounded to the type of x, as in transformers, and the sum once.
        let shares = shares.cast(x.dtype()).cast(wide);
        let shares = shares.reshape([tokens, self.per_token, 1]);
        let sum = (outputs.cast(wide) * shares).sum_dim(1).cast(x.dtype());
        let sum = sum.reshape([batch, seq, channels]);
        match (&self.shared_expert[..], &self.shared_expert_gate[..]) {
            ([shared], [gate]) => {
                let open = sigmoid(gate.forward(x.clone(), draw)?);
                Ok(sum + open * shared.forward(x, draw)?)
            }
            _ => Ok(sum),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_sorted_by_their_likeliest_experts() {
        // The second token's last two experts are equally likely.
        let probabilities = [0.1, 0.2, 0.7, 0.6, 0.2, 0.2];
        let routes = Routes::new(&probabilities, 3, 2);
        assert_eq!(
            routes,
            Routes {
                experts: vec![2, 1, 0, 1],
                tokens: vec![1, 0, 1, 0],
                rows: vec![3, 1, 0, 2],
                counts: vec![1, 2, 1],
            }
        );
        let all = Routes::new(&probabilities, 3, 3);
        assert_eq!(all.counts, [2, 2, 2]);
    }
}
