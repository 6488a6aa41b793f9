//! The planner's interface for a fuzz target, only in builds with `--cfg fuzzing`.

use rope_core::{Direction, Geometry, HeadNorm, HeadsLayout, NormOrder};

use super::args::KernelType;
use super::args::{NormTiling, Tiling};
use super::coefficients::Channels;
use super::norm_tiling::plan_norm;
use super::rotator::tensor_layout;
use super::tiling::{Plan, Problem, plan_angle_gradient, plan_matrix, plan_rotation};
use crate::safe::Machine;

/// A launch, before anything about it is checked. Arrays of two are of q and k.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// The rotated channels.
    pub geometry: Geometry,
    /// Forward or adjoint.
    pub direction: Direction,
    /// The type of q and k.
    pub element: KernelType,
    /// 0 without k.
    pub heads: [usize; 2],
    /// x, y and the gradient of y.
    pub views: [[HeadsLayout; 3]; 2],
    /// True if y replaces x.
    pub in_place: bool,
    /// True if all batches share the angles of the first.
    pub shared_over_batch: bool,
    /// The order of norm and rotation.
    pub order: NormOrder,
    /// As the device reports them.
    pub vector_cores: i64,
    /// As the device reports them.
    pub ub_bytes: Option<i64>,
    /// As the device reports it.
    pub architecture: Option<i64>,
}

impl Launch {
    /// Plans every kernel.
    ///
    /// # Panics
    /// If a plan asks for more than the machine has.
    pub fn plan_all(&self) {
        let machine = Machine::new(self.vector_cores, self.ub_bytes, self.architecture);
        let (Ok(machine), Ok(channels)) = (machine, Channels::new(self.geometry)) else {
            return;
        };
        let both_views = self.views.as_flattened();
        // The conditions of `Rotator::tensors`.
        let fits = |view: &HeadsLayout| view.extent() < 1 << 47 && view.is_injective();
        let narrow = |size: usize| u32::try_from(size).ok();
        let (Some(batch), Some(seq)) = (narrow(both_views[0].batch), narrow(both_views[0].seq))
        else {
            return;
        };
        let [Some(q_heads), Some(k_heads)] = self.heads.map(narrow) else {
            return;
        };
        if [batch, seq, q_heads].contains(&0) || !both_views.iter().all(fits) {
            return;
        }
        let side = |side: usize| [0, 1].map(|of| tensor_layout(&self.views[of][side]));
        let problem = Problem {
            channels,
            direction: self.direction,
            element: self.element,
            batch,
            seq,
            heads: [q_heads, k_heads],
            input: side(0),
            output: side(if self.in_place { 0 } else { 1 }),
            in_place: self.in_place,
            shared_over_batch: self.shared_over_batch,
        };
        if let Ok(plan) = plan_rotation(&problem, machine) {
            check(&plan, &plan.tiling, machine);
        }
        if let Ok(plan) = plan_matrix(&problem, machine) {
            check(&plan.plan, &plan.plan.tiling, machine);
        }
        let forward = Problem {
            direction: Direction::Forward,
            in_place: false,
            shared_over_batch: false,
            ..problem
        };
        if let Ok(plan) = plan_angle_gradient(&forward, machine) {
            check(&plan, &plan.tiling, machine);
        }
        let norm = HeadNorm::new(1e-6).unwrap_or_else(|_| unreachable!("a positive number"));
        let norm = norm.with_order(self.order);
        for gradient in [None, Some(side(2))] {
            if let Ok(plan) = plan_norm(&problem, gradient, &norm, machine) {
                let plan: Plan<NormTiling> = plan;
                check(&plan, &plan.tiling.rope, machine);
                let runs = plan.tiling.run_length.iter().sum::<u32>();
                assert_eq!(runs, plan.tiling.head_dim, "every channel is in a run");
            }
        }
    }
}

fn check<T: std::fmt::Debug>(plan: &Plan<T>, tiling: &Tiling, machine: Machine) {
    assert!(plan.ub_bytes <= machine.ub_bytes, "{plan:?} on {machine:?}");
    assert!(
        (1..=machine.vector_cores).contains(&plan.blocks),
        "{plan:?}"
    );
    assert_eq!(tiling.map_words as usize, plan.map.len(), "{plan:?}");
    assert!(
        tiling.tokens_per_tile >= 1 && tiling.heads_per_tile >= 1,
        "{plan:?}"
    );
    assert!(u64::from(tiling.tokens_per_tile) <= tiling.seq, "{plan:?}");
    let heads = tiling.heads[0] + tiling.heads[1];
    assert!(tiling.heads_per_tile <= heads, "{plan:?}");
    assert!((1..=heads).contains(&tiling.head_groups), "{plan:?}");
}
