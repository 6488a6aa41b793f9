//! The data of a pass that its layers share.

use burn::tensor::{IndexingUpdateOp, Int, Tensor};
use burn_attention::Attention;
use rope_burn::RotaryAngles;

use crate::balance::Balance;
use crate::linear::Draw;
use crate::recurrence::Recurrence;
use crate::shares::TokenPart;

/// The inputs that all layers of a pass share.
#[derive(Clone, Copy)]
pub(crate) struct Common<'a> {
    pub(crate) angles: &'a RotaryAngles,
    pub(crate) attention: &'a Attention,
    /// Attention of layers with a window, if it hides a token.
    pub(crate) window: Option<&'a Attention>,
    /// The sequence structure of the step's tokens, for layers with a state; `None` when a cache
    /// advances by one token.
    pub(crate) recurrence: Option<&'a Recurrence>,
    pub(crate) draw: Draw<'a>,
    /// False for each token that is padding, if some are.
    pub(crate) attended: Option<&'a [bool]>,
    /// The part of the tokens that this rank has, if ranks divide them.
    pub(crate) part: Option<&'a TokenPart>,
    /// Follows the routers of experts.
    pub(crate) balance: Option<&'a Balance<'a>>,
}

/// Features that are added to the first layers' outputs at the vision tokens.
pub(crate) struct Deepstack<'a> {
    /// Indices of the vision tokens among the flat `[batch * seq]` tokens.
    pub(crate) placeholders: &'a Tensor<1, Int>,
    /// The merged patch of each, if a patch has several.
    pub(crate) merged: Option<&'a Tensor<1, Int>>,
    /// One per layer, `[merged patches, hidden_size]`.
    pub(crate) features: Vec<Tensor<2>>,
}

impl Deepstack<'_> {
    /// Adds the feature of a layer to its output, if it has one.
    pub(crate) fn add(&self, index: usize, hidden: Tensor<3>) -> Tensor<3> {
        let Some(feature) = self.features.get(index) else {
            return hidden;
        };
        let [batch, seq, channels] = hidden.dims();
        let tokens = self.placeholders.clone();
        let feature = match self.merged {
            Some(merged) => feature.clone().select(0, merged.clone()),
            None => feature.clone(),
        };
        hidden
            .reshape([batch * seq, channels])
            .select_assign(0, tokens, feature, IndexingUpdateOp::Add)
            .reshape([batch, seq, channels])
    }
}
