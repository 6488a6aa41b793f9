//! An operation in the autodiff graph with a hand-written backward.

use std::fmt;

use burn::backend::Backend;
use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads,
    ops::{Backward, NodeGuard, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;

/// The gradients of `N` tensors; `None` where not needed.
pub type Gradients<B, const N: usize> = [Option<FloatTensor<B>>; N];

/// The function that computes gradients from the kept state and the gradient of the output.
type Rule<B, S, const N: usize> = fn(S, FloatTensor<B>, [bool; N]) -> Gradients<B, N>;

/// As [`Rule`], from the gradient of the first parent too that siblings have computed.
type SiblingRule<B, S, const N: usize> =
    fn(S, FloatTensor<B>, Option<FloatTensor<B>>, [bool; N]) -> Gradients<B, N>;

/// A tensor whose gradient says that one of the siblings has run.
type Mark<B> = FloatTensor<Autodiff<B>>;

enum Node<B: Backend, S, const N: usize> {
    Alone(Rule<B, S, N>),
    Sibling(SiblingRule<B, S, N>, Option<Mark<B>>),
}

impl<B: Backend, S, const N: usize> fmt::Debug for Node<B, S, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::any::type_name::<S>())
    }
}

impl<B, S, const N: usize> Backward<B, N> for Node<B, S, N>
where
    B: Backend,
    S: Clone + Send + fmt::Debug + 'static,
{
    type State = S;

    fn backward(self, ops: Ops<S, N>, grads: &mut grads::Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let gradients = match self {
            Self::Alone(rule) => rule(ops.state, gradient, wanted),
            Self::Sibling(rule, mark) => {
                // The gradient of a leaf stays registered, so its terms are summed there.
                let shared = ops.parents[0].as_ref();
                let shared = shared.filter(|parent| !parent.parents.is_empty());
                let earlier = mark.zip(shared).and_then(|(mark, parent)| {
                    // Each pass has gradients of its own, in which the first sibling sets the mark.
                    if grads.get::<B>(&mark).is_some() {
                        return Some(grads.consume::<B>(parent));
                    }
                    grads.register::<B>(mark.id(), mark.into_primitive());
                    None
                });
                rule(ops.state, gradient, earlier, wanted)
            }
        };
        for (node, gradient) in ops.parents.into_iter().zip(gradients) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

/// Registers an operation. `forward` computes its output from `kept`, and `backward` computes the
/// gradients of the parents from `kept`.
///
/// If a parent is tracked, the node stores `kept` and `forward` gets a clone. Otherwise `forward`
/// gets the only copy, so a kernel may overwrite its tensors. `backward` owns the gradient of the
/// output and may overwrite it. Its flags state the gradients needed; any others that it returns
/// are dropped.
///
/// The node is compute-bound: it keeps outputs of other operations, and recomputing them would cost
/// more than the memory they take.
pub fn node<B, C, S, const N: usize>(
    parents: [NodeGuard; N],
    kept: S,
    forward: impl FnOnce(S) -> FloatTensor<B>,
    backward: fn(S, FloatTensor<B>, [bool; N]) -> Gradients<B, N>,
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    C: CheckpointStrategy,
    S: Clone + Send + fmt::Debug + 'static,
{
    register::<B, C, S, N>(Node::Alone(backward), parents, kept, forward)
}

/// As [`node`], for one of several operations on the first parent. `mark` is an untracked tensor
/// that they alone share. `backward` also gets the gradient of the first parent that those before it
/// have computed: it returns the sum with its own, which one kernel may compute.
pub fn sibling_node<B, C, S, const N: usize>(
    parents: [NodeGuard; N],
    mark: Option<FloatTensor<Autodiff<B>>>,
    kept: S,
    forward: impl FnOnce(S) -> FloatTensor<B>,
    backward: SiblingRule<B, S, N>,
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    C: CheckpointStrategy,
    S: Clone + Send + fmt::Debug + 'static,
{
    register::<B, C, S, N>(Node::Sibling(backward, mark), parents, kept, forward)
}

fn register<B, C, S, const N: usize>(
    operation: Node<B, S, N>,
    parents: [NodeGuard; N],
    kept: S,
    forward: impl FnOnce(S) -> FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    C: CheckpointStrategy,
    S: Clone + Send + fmt::Debug + 'static,
{
    match operation.prepare::<C>(parents).compute_bound().stateful() {
        OpsKind::Tracked(node) => {
            let output = forward(kept.clone());
            node.finish(kept, output)
        }
        OpsKind::UnTracked(node) => node.finish(forward(kept)),
    }
}

/// Splits tensors into those of the inner backend and their nodes.
pub fn parts<B: Backend, const N: usize>(
    tensors: [FloatTensor<Autodiff<B>>; N],
) -> ([FloatTensor<B>; N], [NodeGuard; N]) {
    let nodes = tensors.each_ref().map(|tensor| tensor.node());
    (tensors.map(|tensor| tensor.into_primitive()), nodes)
}
