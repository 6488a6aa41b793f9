//! The operations of the models on tensors without elements, as burn's CPU backend and the kernels
//! of `burn-attention` and `rope-burn` allocate.

use super::dry::{Ghost, Run, Var};
use super::packing::{self, Product};

/// A matrix with its bias and adapter.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Linear {
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) has_bias: bool,
    pub(super) is_trained: bool,
    pub(super) adapter: Option<Adapter>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Adapter {
    pub(super) rank: usize,
    /// True if B is multiplied by a factor.
    pub(super) is_scaled: bool,
    pub(super) drops: bool,
}

/// The product of two matrices, `[rows, columns]`.
pub(super) fn product(run: &Run, [x, y]: [Ghost; 2], [rows, columns]: [usize; 2]) -> Ghost {
    let (width, wide) = (x.width, run.types.wide);
    let inner = x.elems / rows.max(1);
    let widens = run.types.widens && width < wide;
    let of = Product {
        rows,
        columns,
        inner,
        transposed: [&x, &y].map(|x| !widens && !x.is_in_order()),
        is_f16: run.types.is_f16 && width < wide,
    };
    if !widens {
        let out = run.zeros(rows * columns, width);
        let _packed = run.tensor(of.packed(), 1);
        return out;
    }
    // burn holds a factor until the end, beside its copy in order.
    let given = [x, y];
    let dense = given.clone().map(Ghost::dense);
    let _factors = dense.each_ref().map(|x| run.tensor(x.elems, wide));
    let _sums = run.zeros(rows * columns, wide);
    drop(run.tensor(of.packed(), 1));
    run.tensor(rows * columns, width)
}

/// The same, where the kernel of `burn-attention` computes it.
fn multiplied(run: &Run, factors: [Ghost; 2], [rows, columns]: [usize; 2]) -> Ghost {
    let width = factors[0].width;
    let is_f16 = run.types.is_f16 && width < run.types.wide;
    if is_f16 || !packing::has_kernel() {
        return product(run, factors, [rows, columns]);
    }
    let inner = factors[0].elems / rows.max(1);
    let out = run.zeros(rows * columns, width);
    drop(run.tensor(packing::tiles(rows, inner), 1));
    out
}

/// x weight + bias, by burn. A `weight` whose elements lie in the order of the product is not a
/// view.
fn plain(run: &Run, x: Var, weight: Var, bias: Option<Var>, [inputs, outputs]: [usize; 2]) -> Var {
    let x = x.seen_as(Ghost::dense);
    let rows = x.value.elems / inputs;
    let bias = bias.and_then(|bias| bias.node);
    let parents = [x.node, weight.node, bias];
    let (x, matrix) = (x.value, weight.value);
    let kept = weight.node.map(|_| x.clone());
    let value = multiplied(run, [x, matrix.clone()], [rows, outputs]);
    run.op(parents, value, move |run, gradient, onward| {
        let gradient = gradient.dense();
        if onward.wants(0) {
            let elems = matrix.elems;
            let factors = [gradient.clone(), matrix.view(elems)];
            onward.give(0, multiplied(run, factors, [rows, inputs]));
        }
        if let Some(x) = kept {
            let elems = x.elems;
            let factors = [x.view(elems), gradient.clone()];
            onward.give(1, product(run, factors, [inputs, outputs]));
        }
        if onward.wants(2) {
            onward.give(2, gradient.reduced(outputs));
        }
    })
}

pub(super) fn cast(run: &Run, x: Var, width: usize) -> Var {
    let before = x.value.width;
    if before == width {
        return x;
    }
    run.op([x.node], x.value.cast(width), move |_, gradient, onward| {
        onward.give(0, gradient.cast(before));
    })
}

/// A sum; its gradient is that of both terms.
pub(super) fn add(run: &Run, x: Var, y: Var) -> Var {
    let value = x.value.zip(y.value);
    run.op([x.node, y.node], value, |_, gradient, onward| {
        onward.give(0, gradient.clone());
        onward.give(1, gradient);
    })
}

/// A product element by element, of tensors of one shape.
pub(super) fn multiply(run: &Run, x: Var, y: Var) -> Var {
    let kept = [
        y.node.map(|_| x.value.clone()),
        x.node.map(|_| y.value.clone()),
    ];
    let value = x.value.zip(y.value);
    run.op([x.node, y.node], value, move |_, gradient, onward| {
        let [x, y] = kept;
        if let Some(y) = y {
            onward.give(0, gradient.clone().zip(y));
        }
        if let Some(x) = x {
            onward.give(1, gradient.zip(x));
        }
    })
}

/// A sum over rows, each times a number.
pub(super) fn weighted_sum(run: &Run, [x, numbers]: [Var; 2], elems: usize) -> Var {
    let rows = x.value.elems;
    let kept = [
        numbers.node.map(|_| x.value.clone()),
        x.node.map(|_| numbers.value.clone()),
    ];
    let products = x.value.clone().zip(numbers.value.clone());
    let value = products.reduced(elems);
    drop(products);
    let parents = [x.node, numbers.node];
    run.op(parents, value, move |run, gradient, onward| {
        let [x, numbers] = kept;
        let width = gradient.width;
        let _expanded = run.tensor(rows, width);
        drop(gradient);
        if let Some(numbers) = numbers {
            onward.give(0, run.tensor(rows, width));
            drop(numbers);
        }
        if let Some(x) = x {
            let products = run.tensor(rows, width);
            drop(x);
            onward.give(1, products.reduced(rows / elems.max(1)));
        }
    })
}

/// A function whose backward has its input, or the copy of it that the function made.
pub(super) fn function(run: &Run, x: Var) -> Var {
    let kept = x.node.map(|_| x.value.clone());
    run.op([x.node], x.value.map(), move |_, gradient, onward| {
        if let Some(x) = kept {
            onward.give(0, x.zip(gradient));
        }
    })
}

/// A product with a number or a sum with one: nothing is kept.
pub(super) fn scaled(run: &Run, x: Var) -> Var {
    run.op([x.node], x.value.map(), |_, gradient, onward| {
        onward.give(0, gradient.map());
    })
}

/// A part of a tensor; the gradient is one of the whole.
pub(super) fn narrowed(run: &Run, x: Var, elems: usize) -> Var {
    let whole = x.value.elems;
    run.op(
        [x.node],
        x.value.view(elems),
        move |run, gradient, onward| {
            let zeros = run.zeros(whole, gradient.width);
            drop(gradient.dense());
            onward.give(0, zeros);
        },
    )
}

/// Rows chosen by their index; the gradient is one of all rows.
pub(super) fn select(run: &Run, x: Var, elems: usize) -> Var {
    let (value, node) = (x.value.dense(), x.node);
    let whole = value.elems;
    run.op(
        [node],
        value.reduced(elems),
        move |run, gradient, onward| {
            let zeros = run.zeros(whole, gradient.width);
            drop(gradient.dense());
            onward.give(0, zeros);
        },
    )
}

impl Linear {
    pub(super) fn forward(&self, run: &Run, x: Var) -> Var {
        let Self {
            inputs, outputs, ..
        } = *self;
        let narrow = run.types.narrow;
        let weight = run.weight(inputs * outputs, narrow, self.is_trained);
        let has_bias = self.has_bias;
        let bias = has_bias.then(|| run.weight(outputs, narrow, self.is_trained));
        let Some(adapter) = self.adapter else {
            return self.product(run, x, weight, bias);
        };
        let rank = adapter.rank;
        let a = run.weight(inputs * rank, run.types.wide, true);
        let mut b = run.weight(rank * outputs, run.types.wide, true);
        if adapter.is_scaled {
            b = scaled(run, b);
        }
        if adapter.drops {
            let y = self.product(run, x.clone(), weight, bias);
            let wide = run.types.wide;
            // On the host, in one more copy while the mask is made, and as a tensor.
            let mask = run.tensor(x.value.elems, wide);
            let x = cast(run, x, wide);
            let dropped = multiply(run, x, run.constant(mask));
            let term = plain(run, dropped, a, None, [inputs, rank]);
            let term = plain(run, term, b, None, [rank, outputs]);
            return self.sum(run, y, term);
        }
        if self.has_kernel(run) {
            return self.by_kernel(run, [x, weight], bias, Some(([a, b], rank)));
        }
        let y = plain(run, x.clone(), weight, bias, [inputs, outputs]);
        let x = cast(run, x, run.types.wide);
        let term = plain(run, x, a, None, [inputs, rank]);
        let term = plain(run, term, b, None, [rank, outputs]);
        self.sum(run, y, term)
    }

    /// The sum of the product and the adapter's term, rounded once.
    fn sum(&self, run: &Run, y: Var, term: Var) -> Var {
        let narrow = y.value.width;
        let y = cast(run, y, run.types.wide);
        cast(run, add(run, y, term), narrow)
    }

    fn has_kernel(&self, run: &Run) -> bool {
        let is_even = self.inputs.is_multiple_of(2) && self.outputs.is_multiple_of(2);
        run.types.has_kernel && is_even
    }

    fn product(&self, run: &Run, x: Var, weight: Var, bias: Option<Var>) -> Var {
        if self.has_kernel(run) {
            return self.by_kernel(run, [x, weight], bias, None);
        }
        plain(run, x, weight, bias, [self.inputs, self.outputs])
    }

    /// By the kernel for bf16, which keeps x alone and computes x A again.
    fn by_kernel(
        &self,
        run: &Run,
        [x, weight]: [Var; 2],
        bias: Option<Var>,
        adapter: Option<([Var; 2], usize)>,
    ) -> Var {
        let [inputs, outputs] = [self.inputs, self.outputs];
        let x = x.seen_as(Ghost::dense);
        let rows = x.value.elems / inputs;
        let (adapter, rank) = adapter.unzip();
        let rank = rank.unwrap_or(0);
        let [a, b] = match adapter {
            Some(adapter) => adapter.map(Some),
            None => [None, None],
        };
        let node = |var: &Option<Var>| var.as_ref().and_then(|var| var.node);
        let parents = [x.node, weight.node, node(&bias), node(&a), node(&b)];
        let keeps = parents[1].or(parents[3]).or(parents[4]).is_some();
        let kept = (keeps.then(|| x.value.clone()), b.map(|b| b.value));
        let wide = run.types.wide;
        let value = {
            let _bias = bias
                .is_none()
                .then(|| run.tensor(outputs, run.types.narrow));
            let _u = run.tensor(rows * rank, wide);
            let _b = run.tensor(rank * outputs, wide);
            run.tensor(rows * outputs, run.types.narrow)
        };
        run.op(parents, value, move |run, gradient, onward| {
            let (x, _b) = kept;
            let gradient = gradient.dense();
            let dx = onward.wants(0).then(|| {
                let _v = run.tensor(rows * rank, wide);
                run.tensor(rows * inputs, run.types.narrow)
            });
            let dbias = onward.wants(2).then(|| gradient.reduced(outputs));
            let weight = onward.wants(1).then(|| x.clone()).flatten();
            let dweight = weight.map(|x| {
                let elems = x.elems;
                product(run, [x.view(elems), gradient.clone()], [inputs, outputs])
            });
            let adapter = (rank > 0).then(|| {
                let _thin = run.tensor(2 * rows * rank, wide);
                [inputs, outputs].map(|channels| run.tensor(channels * rank, wide))
            });
            drop((x, gradient));
            let [da, db] = match adapter {
                Some(adapter) => adapter.map(Some),
                None => [None, None],
            };
            for (parent, gradient) in [dx, dweight, dbias, da, db].into_iter().enumerate() {
                if let Some(gradient) = gradient {
                    onward.give(parent, gradient);
                }
            }
        })
    }
}

/// The matrices of groups of rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupedLinear {
    pub(super) groups: usize,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) is_trained: bool,
    pub(super) adapter: Option<Adapter>,
}

impl GroupedLinear {
    pub(super) fn forward(self, run: &Run, x: Var) -> Var {
        let Self {
            groups,
            inputs,
            outputs,
            is_trained,
            adapter,
        } = self;
        let weight = run.weight(groups * inputs * outputs, run.types.narrow, is_trained);
        let y = grouped(run, [x.clone(), weight], [inputs, outputs]);
        let Some(Adapter {
            rank, is_scaled, ..
        }) = adapter
        else {
            return y;
        };
        let (narrow, wide) = (y.value.width, run.types.wide);
        let a = run.weight(groups * rank * inputs, wide, true);
        let b = run.weight(groups * outputs * rank, wide, true);
        let b = if is_scaled { scaled(run, b) } else { b };
        let x = cast(run, x, wide);
        let term = grouped(run, [x, a], [inputs, rank]);
        let term = grouped(run, [term, b], [rank, outputs]);
        cast(run, add(run, cast(run, y, wide), term), narrow)
    }
}

/// The products of groups of rows with a matrix each.
fn grouped(run: &Run, [x, weight]: [Var; 2], [inputs, outputs]: [usize; 2]) -> Var {
    let (rows, width, elems) = (x.value.elems / inputs, x.value.width, weight.value.elems);
    let kept = weight.node.map(|_| x.value.clone());
    // By ordinary operations: the groups' results, and then all together.
    let is_joined = width < run.types.wide && !(run.types.has_kernel && inputs.is_multiple_of(2));
    let result = move |run: &Run, elems: usize| {
        let _parts = is_joined.then(|| run.tensor(elems, width));
        run.tensor(elems, width)
    };
    let value = result(run, rows * outputs);
    run.op([x.node, weight.node], value, move |run, _, onward| {
        let _weight = weight.value;
        if onward.wants(0) {
            onward.give(0, result(run, rows * inputs));
        }
        if kept.is_some() {
            onward.give(1, result(run, elems));
        }
    })
}

/// Rows of tokens for their experts.
pub(super) fn routed_rows(run: &Run, x: Var, elems: usize) -> Var {
    let (whole, width) = (x.value.elems, x.value.width);
    let value = run.tensor(elems, width);
    run.op([x.node], value, move |run, gradient, onward| {
        onward.give(0, run.tensor(whole, width));
        drop(gradient);
    })
}

/// The sums of the rows of tokens, each times its share.
pub(super) fn routed_sum(run: &Run, [rows, shares]: [Var; 2], elems: usize) -> Var {
    let parents = [rows.node, shares.node];
    let kept = (rows.value, shares.value);
    let value = run.tensor(elems, kept.0.width);
    run.op(parents, value, move |run, gradient, onward| {
        let (rows, shares) = kept;
        let gradients = [&rows, &shares].map(|x| run.tensor(x.elems, x.width));
        drop((rows, shares, gradient));
        for (parent, gradient) in gradients.into_iter().enumerate() {
            onward.give(parent, gradient);
        }
    })
}

/// silu(gate) * up of two halves.
pub(super) fn swiglu_halves(run: &Run, both: Var) -> Var {
    let (parents, kept) = ([both.node], both.value);
    let value = run.tensor(kept.elems / 2, kept.width);
    run.op(parents, value, move |run, gradient, onward| {
        let dboth = run.tensor(kept.elems, kept.width);
        drop((kept, gradient.dense()));
        onward.give(0, dboth);
    })
}

/// A root-mean-square norm over `channels`.
#[derive(Clone, Copy, Debug)]
pub(super) struct RmsNorm {
    pub(super) channels: usize,
    pub(super) is_trained: bool,
    /// True if it multiplies by 1 + weight, in f32.
    pub(super) unit_offset: bool,
}

impl RmsNorm {
    pub(super) fn forward(&self, run: &Run, x: Var) -> Var {
        let (channels, wide, narrow) = (self.channels, run.types.wide, x.value.width);
        let mut weight = run.weight(channels, narrow, self.is_trained);
        if self.unit_offset {
            weight = scaled(run, cast(run, weight, wide));
        }
        let of_weight = weight.value.width;
        let rows = x.value.elems / channels;
        let parents = [x.node, weight.node];
        let kept = x.value;
        let rstd = run.tensor(rows, wide);
        let value = {
            let x = kept.clone().cast(wide);
            // Its squares, whose sums are the norms.
            drop(x.clone().zip(x.clone()));
            x.map().cast(narrow)
        };
        run.op(parents, value, move |run, gradient, onward| {
            let x = kept.cast(wide);
            let gradient = gradient.dense().cast(wide);
            let normalised = x.zip(rstd.clone());
            let products = gradient.clone().zip(normalised.clone());
            drop(products);
            let dx = gradient.map().zip(normalised);
            drop(rstd);
            onward.give(0, dx.cast(narrow));
            onward.give(1, run.tensor(channels, of_weight));
        })
    }
}

/// A layer norm as one operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerNorm {
    pub(super) channels: usize,
    pub(super) is_trained: bool,
}

impl LayerNorm {
    pub(super) fn forward(&self, run: &Run, x: Var) -> Var {
        let (channels, wide, narrow) = (self.channels, run.types.wide, x.value.width);
        let [weight, bias] = [(); 2].map(|()| run.weight(channels, narrow, self.is_trained));
        let parents = [x.node, weight.node, bias.node];
        let kept = x.value;
        let [mean, rstd] = [(); 2].map(|()| run.tensor(kept.elems / channels, wide));
        let value = {
            let centred = kept.clone().cast(wide).zip(mean.clone());
            // Its squares, whose sums are the variances.
            drop(centred.clone().zip(centred.clone()));
            centred.map().cast(narrow)
        };
        run.op(parents, value, move |run, gradient, onward| {
            let x = kept.cast(wide);
            let gradient = gradient.dense().cast(wide);
            let normalised = x.zip(mean).zip(rstd.clone());
            let products = gradient.clone().zip(normalised.clone());
            drop(products);
            let dx = gradient.map().zip(normalised);
            drop(rstd);
            onward.give(0, dx.cast(narrow));
            for parent in [1, 2] {
                onward.give(parent, run.tensor(channels, narrow));
            }
        })
    }
}

/// The means of rows; their gradient is one of all elements.
pub(super) fn mean(run: &Run, x: Var, rows: usize) -> Var {
    let elems = x.value.elems;
    run.op(
        [x.node],
        x.value.reduced(rows),
        move |run, gradient, onward| {
            onward.give(0, run.tensor(elems, gradient.width));
        },
    )
}

/// The rotation of q or k, over q or k if nothing else holds it.
pub(super) fn rotated(run: &Run, x: Var) -> Var {
    let is_free = x.value.is_alone();
    let value = if is_free { x.value } else { x.value.copied() };
    run.op([x.node], value, |_, gradient, onward| {
        let gradient = if gradient.is_alone() {
            gradient
        } else {
            gradient.copied()
        };
        onward.give(0, gradient);
    })
}

/// Norm and rotation of the heads of q or k, which the node keeps.
pub(super) fn normed_and_rotated(run: &Run, x: Var, channels: usize, is_trained: bool) -> Var {
    let weight = run.weight(channels, run.types.narrow, is_trained);
    let weight = cast(run, weight, run.types.wide);
    let kept = (x.node.or(weight.node)).map(|_| x.value.clone());
    let value = if x.value.is_alone() {
        x.value
    } else {
        x.value.copied()
    };
    let wide = run.types.wide;
    run.op(
        [x.node, weight.node],
        value,
        move |run, gradient, onward| {
            let gradient = if gradient.is_alone() {
                gradient
            } else {
                gradient.copied()
            };
            drop(kept);
            onward.give(0, gradient);
            onward.give(1, run.tensor(channels, wide));
        },
    )
}

/// Attention of tokens with `heads` heads.
pub(super) fn attention(run: &Run, [q, k, v]: [Var; 3], [tokens, heads]: [usize; 2]) -> Var {
    let parents = [q.node, k.node, v.node];
    let wide = run.types.wide;
    let out = run.tensor(q.value.elems, q.value.width);
    let softmax = run.tensor(2 * tokens * heads, wide);
    let kept = ([q.value, k.value, v.value], out.clone(), softmax);
    run.op(parents, out, move |run, gradient, onward| {
        let ([q, k, v], out, softmax) = kept;
        let gradients = [&q, &k, &v].map(|x| run.tensor(x.elems, x.width));
        // The product of output and gradient in each row.
        let _along = run.tensor(2 * tokens * heads, wide);
        drop((gradient, q, k, v, out, softmax));
        for (parent, gradient) in gradients.into_iter().enumerate() {
            onward.give(parent, gradient);
        }
    })
}

/// silu(gate) * up.
pub(super) fn swiglu(run: &Run, gate: Var, up: Var) -> Var {
    let parents = [gate.node, up.node];
    let kept = [gate.value, up.value];
    let value = {
        let [gate, _up] = kept.clone().map(Ghost::dense);
        run.tensor(gate.elems, gate.width)
    };
    run.op(parents, value, move |run, gradient, onward| {
        let [gate, up] = kept.map(Ghost::dense);
        let gradient = gradient.dense();
        let [dgate, dup] = [&gate, &up].map(|x| run.tensor(x.elems, x.width));
        drop((gate, up, gradient));
        onward.give(0, dgate);
        onward.give(1, dup);
    })
}

/// x sigmoid(1.702 x)
pub(super) fn quick_gelu(run: &Run, x: Var) -> Var {
    let inner = scaled(run, x.clone());
    let sigmoid = function(run, inner);
    multiply(run, x, sigmoid)
}

/// Gelu in its tanh approximation, as one operation.
pub(super) fn gelu_tanh(run: &Run, x: Var) -> Var {
    let (wide, narrow) = (run.types.wide, x.value.width);
    let (parents, kept) = ([x.node], x.value);
    let value = {
        let x = kept.clone().cast(wide);
        x.clone().zip(x.clone()).map().zip(x).cast(narrow)
    };
    run.op(parents, value, move |_, gradient, onward| {
        let x = kept.cast(wide);
        let gradient = gradient.dense().cast(wide);
        let squares = x.clone().zip(x.clone());
        let tanh = squares.clone().map().zip(x.clone());
        let of_inner = squares.map();
        let of_tanh = tanh.clone().zip(tanh.clone());
        let slope = tanh.map().zip(of_tanh.zip(of_inner).zip(x));
        onward.give(0, gradient.zip(slope).cast(narrow));
    })
}

/// Elements given to other ranks and received from them. The graph ends at both: it keeps what was
/// given until the gradients have come back.
pub(super) fn exchanged(run: &Run, x: Var, elems: usize) -> Var {
    let (given, width) = (x.value.elems, x.value.width);
    let kept = x.node.map(|_| x.value.clone());
    let value = run.tensor(elems, width);
    run.op([x.node], value, move |run, gradient, onward| {
        let returned = run.tensor(given, width);
        drop((gradient, kept));
        onward.give(0, returned);
    })
}

/// Word embeddings of tokens.
pub(super) fn embedding(run: &Run, table: &Var, elems: usize) -> Var {
    let (words, width) = (table.value.elems, table.value.width);
    let value = run.tensor(elems, width);
    run.op([table.node], value, move |run, gradient, onward| {
        let zeros = run.zeros(words, width);
        drop(gradient.dense());
        onward.give(0, zeros);
    })
}

/// Two tensors, one after the other.
pub(super) fn cat(run: &Run, x: Var, y: Var) -> Var {
    let elems = [x.value.elems, y.value.elems];
    let value = Ghost::cat(vec![x.value, y.value]);
    run.op([x.node, y.node], value, move |_, gradient, onward| {
        for (parent, elems) in elems.into_iter().enumerate() {
            onward.give(parent, gradient.clone().view_of_rows(elems));
        }
    })
}

/// Adds rows to those of their index.
pub(super) fn select_add(run: &Run, x: Var, rows: Var) -> Var {
    let elems = rows.value.elems;
    run.op(
        [x.node, rows.node],
        x.value.map(),
        move |_, gradient, onward| {
            onward.give(0, gradient.clone());
            if onward.wants(1) {
                onward.give(1, gradient.reduced(elems));
            }
        },
    )
}

/// Words whose exponentials are summed together.
pub(super) const STRETCH: usize = 512;

/// The loss of rows of hidden states by the matrix of the head, over blocks of `words` words.
pub(super) fn cross_entropy(
    run: &Run,
    [hidden, head]: [Var; 2],
    channels: usize,
    words: usize,
) -> Var {
    let (wide, narrow) = (run.types.wide, hidden.value.width);
    let vocabulary = head.value.elems / channels;
    let rows = hidden.value.elems / channels;
    let parents = [hidden.node, head.node];
    let factors = if run.types.is_f16 { wide } else { narrow };
    let logits = move |run: &Run, hidden: &Ghost, head: &Ghost, words: usize| {
        let block = head.clone().view(words * channels).cast(factors);
        let elems = block.elems;
        let factors = [hidden.clone(), block.view(elems)];
        multiplied(run, factors, [rows, words]).cast(wide)
    };
    let whole = vocabulary / STRETCH * STRETCH;
    let blocks = move || {
        let starts = (0..whole).step_by(words);
        let blocks = starts.map(move |start| whole.min(start + words) - start);
        blocks.chain((whole < vocabulary).then_some(vocabulary - whole))
    };
    let (hidden, head) = (hidden.value, head.value);
    let sums = run.tensor(rows, wide);
    {
        let hidden = hidden.clone().cast(factors);
        let of_stretches = blocks().map(|words| {
            // Their exponentials are written over them.
            drop(logits(run, &hidden, &head, words));
            run.tensor(rows * words.div_ceil(STRETCH), wide)
        });
        let of_stretches: Vec<Ghost> = of_stretches.collect();
        drop(run.tensor(rows * vocabulary.div_ceil(STRETCH), wide));
        drop(of_stretches);
    }
    let loss = run.tensor(1, wide);
    run.op(parents, loss, move |run, _, onward| {
        let hidden = hidden.cast(factors);
        let wants = onward.wants(1);
        let dhead = wants.then(|| run.zeros(vocabulary * channels, narrow));
        let mut dhidden: Option<Ghost> = None;
        for words in blocks() {
            let dlogits = logits(run, &hidden, &head, words).cast(factors);
            let block = head.clone().view(words * channels).cast(factors);
            let part = product(run, [dlogits.clone(), block], [rows, channels]).cast(wide);
            dhidden = Some(match dhidden.take() {
                Some(earlier) => earlier.zip(part),
                None => part,
            });
            if wants {
                let elems = dlogits.elems;
                let factors = [dlogits.view(elems), hidden.clone()];
                drop(product(run, factors, [words, channels]).cast(narrow));
            }
        }
        drop((sums, head, hidden));
        if let Some(dhidden) = dhidden {
            onward.give(0, dhidden.cast(narrow));
        }
        if let Some(dhead) = dhead {
            onward.give(1, dhead);
        }
    })
}
