//! Tensors that have sizes and no elements.
//!
//! A step that runs on them holds the bytes that the CPU backend holds, at the same moments: an
//! operation writes over an input that nothing else holds, a view shares the memory of its tensor,
//! and the graph keeps the tensors that a backward needs. burn's names: `FlexTensor`, `Autodiff`.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use vlm_models::Block;

use crate::shards::part;

/// Bytes held now, and the most since the last phase began.
#[derive(Default)]
struct Count {
    live: Cell<usize>,
    peak: Cell<usize>,
}

struct Memory {
    count: Rc<Count>,
    bytes: usize,
}

impl Memory {
    fn new(count: &Rc<Count>, bytes: usize) -> Rc<Self> {
        let live = count.live.get() + bytes;
        count.live.set(live);
        count.peak.set(count.peak.get().max(live));
        let count = Rc::clone(count);
        Rc::new(Self { count, bytes })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.count.live.set(self.count.live.get() - self.bytes);
    }
}

/// A tensor without elements.
#[derive(Clone)]
pub(super) struct Ghost {
    memory: Rc<Memory>,
    pub(super) elems: usize,
    /// Bytes of an element.
    pub(super) width: usize,
    /// True if its elements follow each other in memory, and nothing else is there.
    is_dense: bool,
}

impl Ghost {
    fn of(count: &Rc<Count>, elems: usize, width: usize) -> Self {
        Self {
            memory: Memory::new(count, elems * width),
            elems,
            width,
            is_dense: true,
        }
    }

    fn new_like(&self, elems: usize) -> Self {
        Self::of(&self.memory.count, elems, self.width)
    }

    fn is_free(&self) -> bool {
        self.is_dense && Rc::strong_count(&self.memory) == 1
    }

    pub(super) fn is_in_order(&self) -> bool {
        self.is_dense
    }

    /// True if nothing else holds the memory.
    pub(super) fn is_alone(&self) -> bool {
        Rc::strong_count(&self.memory) == 1
    }

    /// Some of the elements, or all in another order, in the same memory.
    pub(super) fn view(self, elems: usize) -> Self {
        Self {
            elems,
            is_dense: false,
            ..self
        }
    }

    /// Some rows, one after another, in the same memory.
    pub(super) fn view_of_rows(self, elems: usize) -> Self {
        Self { elems, ..self }
    }

    /// The same elements one after another.
    pub(super) fn dense(self) -> Self {
        if self.is_dense {
            return self;
        }
        self.new_like(self.elems)
    }

    /// The elements of a view in the order of a dense tensor, which a reshape needs.
    pub(super) fn copied(self) -> Self {
        self.new_like(self.elems)
    }

    /// The same memory, read as other elements.
    pub(super) fn read_as(&self, elems: usize, width: usize) -> Self {
        Self {
            elems,
            width,
            ..self.clone()
        }
    }

    /// A function of each element.
    pub(super) fn map(self) -> Self {
        if self.is_free() {
            return self;
        }
        self.new_like(self.elems)
    }

    /// A function of two tensors, element by element; the smaller one is repeated.
    pub(super) fn zip(self, other: Self) -> Self {
        let elems = self.elems.max(other.elems);
        if self.is_free() && self.elems == elems {
            return self;
        }
        if other.is_free() && other.elems == elems {
            return other;
        }
        self.new_like(elems)
    }

    /// A sum or another number of each row or column.
    pub(super) fn reduced(&self, elems: usize) -> Self {
        self.new_like(elems)
    }

    pub(super) fn cast(self, width: usize) -> Self {
        if self.width == width {
            return self;
        }
        let dense = self.dense();
        Self::of(&dense.memory.count, dense.elems, width)
    }

    pub(super) fn cat(mut parts: Vec<Self>) -> Self {
        if parts.len() > 1 {
            let elems = parts.iter().map(|part| part.elems).sum();
            return parts[0].new_like(elems);
        }
        parts.remove(0)
    }
}

/// A tensor with its node in the graph, if it is tracked.
#[derive(Clone)]
pub(super) struct Var {
    pub(super) value: Ghost,
    pub(super) node: Option<usize>,
}

impl Var {
    pub(super) fn is_tracked(&self) -> bool {
        self.node.is_some()
    }

    pub(super) fn detached(self) -> Self {
        Self { node: None, ..self }
    }

    /// A view or reshape, whose gradient is one too.
    pub(super) fn seen_as(self, value: impl FnOnce(Ghost) -> Ghost) -> Self {
        let Self { value: seen, node } = self;
        Self {
            value: value(seen),
            node,
        }
    }
}

/// The gradients that a rule passes on.
pub(super) struct Onward<'a> {
    parents: &'a [Option<usize>],
    gradients: &'a mut HashMap<usize, Ghost>,
}

impl Onward<'_> {
    /// The number of inputs.
    pub(super) fn len(&self) -> usize {
        self.parents.len()
    }

    pub(super) fn wants(&self, parent: usize) -> bool {
        self.parents[parent].is_some()
    }

    /// Adds a gradient to those that a parent has.
    pub(super) fn give(&mut self, parent: usize, gradient: Ghost) {
        if let Some(node) = self.parents[parent] {
            let sum = match self.gradients.remove(&node) {
                Some(earlier) => gradient.zip(earlier),
                None => gradient,
            };
            self.gradients.insert(node, sum);
        }
    }
}

/// Computes gradients of an operation's inputs from that of its output; it holds what it needs.
type Rule = Box<dyn FnOnce(&Run, Ghost, &mut Onward<'_>)>;

struct Node {
    parents: Vec<Option<usize>>,
    /// None of a leaf.
    rule: Option<Rule>,
}

/// Bytes of an element, and how products are computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Types {
    /// Of weights and activations.
    pub(super) narrow: usize,
    /// Of sums, adapters and losses.
    pub(super) wide: usize,
    /// True if burn converts both factors of a product to f32 first.
    pub(super) widens: bool,
    /// True if a linear layer has a kernel that does not.
    pub(super) has_kernel: bool,
    /// True in f16: layer norms and losses are computed in f32.
    pub(super) is_f16: bool,
}

/// Bytes of an operation's nodes and shapes, with those of the reshapes around it, as measured.
const OF_OPERATION: usize = 800;

/// The micro-batches of a step before one, by the gradients that they left for all parameters.
#[derive(Clone, Copy)]
pub(super) enum Earlier {
    /// `is_alone`: no other rank adds to the gradients.
    None { is_alone: bool },
    /// Gradients in their types.
    One,
    /// Sums in f32.
    More,
}

/// A run over a micro-batch.
pub(super) struct Run {
    pub(super) types: Types,
    count: Rc<Count>,
    /// The memory that is counted elsewhere.
    others: Rc<Memory>,
    nodes: RefCell<Vec<Option<Node>>>,
    /// What burn keeps of each operation, tracked or not, until the next backward.
    operations: RefCell<Vec<Ghost>>,
    /// The leaves that are parameters.
    parameters: RefCell<Vec<usize>>,
    /// Sums of gradients, beyond those that are counted elsewhere.
    sums: RefCell<Vec<Ghost>>,
    earlier: Earlier,
    phases: RefCell<Vec<(&'static str, usize)>>,
    is_quiet: Cell<bool>,
    divided: Option<Divided>,
    /// The ranks that divide the tokens.
    pub(super) context: usize,
}

/// What ranks divide within a pass: `passes`, without elements.
struct Divided {
    blocks: Arc<Blocks>,
    /// The blocks that the pass will enter.
    order: RefCell<VecDeque<Block>>,
    /// The weights of the next block.
    ahead: RefCell<Option<Ghost>>,
    /// Gradients of blocks that are not complete.
    gradients: RefCell<Vec<Ghost>>,
    /// The gradients of the last complete block, end to end, and this rank's part of their sum.
    behind: RefCell<Option<[Ghost; 2]>>,
}

/// The sizes of a model's blocks, of which each rank has a part.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    pub(super) ranks: usize,
    /// Bytes of the weights and elements of the gradients.
    pub(super) sizes: BTreeMap<Block, [usize; 2]>,
    /// True if weights are divided, too.
    pub(super) has_weights: bool,
}

impl Blocks {
    /// The most bytes of the weights of two blocks at a time.
    pub(super) fn most(&self) -> usize {
        let mut sizes: Vec<usize> = self.sizes.values().map(|[weights, _]| *weights).collect();
        sizes.sort_unstable();
        sizes.iter().rev().take(2).sum()
    }
}

impl Run {
    /// The gradients of earlier micro-batches are counted elsewhere.
    pub(super) fn new(types: Types, earlier: Earlier) -> Self {
        let count = Rc::default();
        Self {
            types,
            others: Memory::new(&count, 0),
            count,
            nodes: RefCell::default(),
            operations: RefCell::default(),
            parameters: RefCell::default(),
            sums: RefCell::default(),
            earlier,
            phases: RefCell::default(),
            is_quiet: Cell::new(false),
            divided: None,
            context: 1,
        }
    }

    /// Divides the tokens among ranks, of which the run is one.
    pub(super) fn in_parts(mut self, context: usize) -> Self {
        self.context = context;
        self
    }

    /// Divides gradients, and weights, of these blocks among ranks.
    pub(super) fn divided(mut self, blocks: Option<Arc<Blocks>>) -> Self {
        self.divided = blocks.map(|blocks| Divided {
            blocks,
            order: RefCell::default(),
            ahead: RefCell::default(),
            gradients: RefCell::default(),
            behind: RefCell::default(),
        });
        self
    }

    /// States the blocks that the pass will enter.
    pub(super) fn will_enter(&self, order: impl Iterator<Item = Block>) {
        if let Some(divided) = &self.divided {
            *divided.order.borrow_mut() = order.collect();
        }
    }

    /// The weights of the next block, while those of the one after it are gathered.
    pub(super) fn enter(&self) -> Option<Ghost> {
        let divided = self.divided.as_ref()?;
        if !divided.blocks.has_weights {
            return None;
        }
        let mut order = divided.order.borrow_mut();
        let weights = |block: Block| {
            let [weights, _] = divided
                .blocks
                .sizes
                .get(&block)
                .copied()
                .unwrap_or_default();
            self.tensor(weights, 1)
        };
        let ahead = divided.ahead.take();
        let current = order.pop_front()?;
        let current = ahead.unwrap_or_else(|| weights(current));
        *divided.ahead.borrow_mut() = order.front().copied().map(weights);
        Some(current)
    }

    /// The gradients of a block are complete, and summed over ranks.
    pub(super) fn complete(&self, block: Block) {
        let Some(divided) = &self.divided else {
            return;
        };
        let own = divided.gradients.take().into_iter();
        let own: Vec<Ghost> = own.map(|gradient| gradient.cast(self.types.wide)).collect();
        if own.is_empty() {
            return;
        }
        let [_, trained] = divided
            .blocks
            .sizes
            .get(&block)
            .copied()
            .unwrap_or_default();
        let (ranks, wide) = (divided.blocks.ranks, self.types.wide);
        let part = part(trained, ranks);
        self.add_sums(divided);
        let is_of_words = matches!(block, Block::Words | Block::Head);
        let flat = if is_of_words {
            // The matrix of the words is a flat.
            own.into_iter().max_by_key(|gradient| gradient.elems)
        } else {
            let flat = self.tensor(part * ranks, wide);
            drop(own);
            Some(flat)
        };
        *divided.behind.borrow_mut() = flat.map(|flat| [flat, self.tensor(part, wide)]);
        if is_of_words {
            self.add_sums(divided);
        }
    }

    fn add_sums(&self, divided: &Divided) {
        let behind = divided.behind.take();
        let (Some([_, part]), Earlier::None { .. }) = (behind, self.earlier) else {
            return;
        };
        self.sums.borrow_mut().push(part);
    }

    pub(super) fn tensor(&self, elems: usize, width: usize) -> Ghost {
        Ghost::of(&self.count, elems, width)
    }

    /// A tensor of zeros or an empty one, which burn allocates as bytes and copies to memory that is
    /// aligned for any type; so it allocates the result of a product.
    pub(super) fn zeros(&self, elems: usize, width: usize) -> Ghost {
        let _bytes = self.tensor(elems, width);
        self.tensor(elems, width)
    }

    /// A tensor that others hold and that is counted elsewhere.
    pub(super) fn held(&self, elems: usize, width: usize) -> Ghost {
        Ghost {
            memory: Rc::clone(&self.others),
            elems,
            width,
            is_dense: true,
        }
    }

    pub(super) fn constant(&self, value: Ghost) -> Var {
        Var { value, node: None }
    }

    pub(super) fn leaf(&self, value: Ghost) -> Var {
        let mut nodes = self.nodes.borrow_mut();
        nodes.push(Some(Node {
            parents: Vec::new(),
            rule: None,
        }));
        let node = Some(nodes.len() - 1);
        Var { value, node }
    }

    /// A weight, whose elements are counted elsewhere.
    pub(super) fn weight(&self, elems: usize, width: usize, is_trained: bool) -> Var {
        let value = self.held(elems, width);
        if !is_trained || self.is_quiet() {
            return self.constant(value);
        }
        let weight = self.leaf(value);
        self.parameters.borrow_mut().extend(weight.node);
        weight
    }

    /// An operation: its output, and the rule of its gradients.
    pub(super) fn op(
        &self,
        parents: impl IntoIterator<Item = Option<usize>>,
        value: Ghost,
        rule: impl FnOnce(&Self, Ghost, &mut Onward<'_>) + 'static,
    ) -> Var {
        let parents: Vec<_> = parents.into_iter().collect();
        let kept = self.tensor(OF_OPERATION, 1);
        self.operations.borrow_mut().push(kept);
        if parents.iter().all(Option::is_none) {
            return self.constant(value);
        }
        let mut nodes = self.nodes.borrow_mut();
        nodes.push(Some(Node {
            parents,
            rule: Some(Box::new(rule)),
        }));
        let node = Some(nodes.len() - 1);
        Var { value, node }
    }

    /// While quiet, no weight is trained.
    pub(super) fn be_quiet(&self, is_quiet: bool) {
        self.is_quiet.set(is_quiet);
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.is_quiet.get()
    }

    /// The gradients of the leaves, from the gradient of an output, which the graph keeps.
    pub(super) fn against(&self, output: Var, gradient: Ghost) -> HashMap<usize, Ghost> {
        self.against_all(vec![(output, gradient)])
    }

    /// As [`against`](Self::against), of several outputs.
    pub(super) fn against_all(&self, terms: Vec<(Var, Ghost)>) -> HashMap<usize, Ghost> {
        let mut nodes = Vec::new();
        for (output, gradient) in terms {
            let (elems, width) = (output.value.elems, output.value.width);
            let product = output.value.zip(gradient.clone());
            drop(product);
            let scalar = self.tensor(1, width);
            let term = self.op([output.node], scalar, move |run, _, onward| {
                let ones = run.tensor(elems, width);
                onward.give(0, ones.zip(gradient));
            });
            nodes.push(term);
        }
        let parents: Vec<_> = nodes.iter().map(|term| term.node).collect();
        let root = self.op(parents, self.tensor(1, 1), |run, _, onward| {
            for parent in 0..onward.len() {
                onward.give(parent, run.tensor(1, 1));
            }
        });
        drop(nodes);
        self.backward(root, self.tensor(1, 1))
    }

    /// The gradients of the leaves, from the gradient of `root`.
    pub(super) fn backward(&self, root: Var, gradient: Ghost) -> HashMap<usize, Ghost> {
        let Some(last) = root.node else {
            return HashMap::new();
        };
        drop(root);
        let mut gradients = HashMap::from([(last, gradient)]);
        for index in (0..=last).rev() {
            let Some(node) = self.nodes.borrow_mut()[index].take() else {
                continue;
            };
            let Some(rule) = node.rule else {
                self.nodes.borrow_mut()[index] = Some(node);
                continue;
            };
            if let Some(gradient) = gradients.remove(&index) {
                let mut onward = Onward {
                    parents: &node.parents,
                    gradients: &mut gradients,
                };
                rule(self, gradient, &mut onward);
            }
        }
        self.nodes.borrow_mut().truncate(last + 1);
        self.operations.take();
        gradients
    }

    /// Takes the gradient of a leaf.
    pub(super) fn take(leaf: &Var, gradients: &mut HashMap<usize, Ghost>) -> Option<Ghost> {
        gradients.remove(&leaf.node?)
    }

    /// Adds the gradients of the parameters, in their order, to the sums.
    pub(super) fn collect(&self, gradients: &mut HashMap<usize, Ghost>) {
        for node in self.parameters.take() {
            if let Some(gradient) = gradients.remove(&node) {
                self.add(gradient);
            }
        }
    }

    /// Adds a gradient to the sums.
    pub(super) fn add(&self, gradient: Ghost) {
        if let Some(divided) = &self.divided {
            divided.gradients.borrow_mut().push(gradient.dense());
            return;
        }
        let (gradient, wide) = (gradient.dense(), self.types.wide);
        let (elems, width) = (gradient.elems, gradient.width);
        let kept = match self.earlier {
            // It keeps its type until another is added.
            Earlier::None { is_alone: true } => gradient,
            Earlier::None { is_alone: false } => gradient.cast(wide),
            // The sum takes the place of an earlier gradient in its type.
            Earlier::One => {
                drop(gradient.cast(wide));
                self.tensor(elems, wide - width)
            }
            Earlier::More => return drop(gradient.cast(wide)),
        };
        self.sums.borrow_mut().push(kept);
    }

    /// Ends a phase.
    pub(super) fn phase(&self, name: &'static str) {
        let mut phases = self.phases.borrow_mut();
        let peak = self.count.peak.replace(self.count.live.get());
        match phases.iter_mut().find(|(earlier, _)| *earlier == name) {
            Some((_, most)) => *most = peak.max(*most),
            None => phases.push((name, peak)),
        }
    }

    /// The most bytes of each phase.
    pub(super) fn phases(self) -> Vec<(&'static str, usize)> {
        self.phases.take()
    }
}
