//! Positions and angles of diffusion transformers: a latent grid of an image or a video, each axis
//! with a share of the head's channels and frequencies that restart on it.
//!
//!     cargo run -p rope-core --example latent_grid
//!
//! | model | axes | channels | text tokens |
//! |---|---|---|---|
//! | Flux | (0, row, column) | 16 + 56 + 56 | before the image, at the origin |
//! | Wan | (frame, row, column) | 44 + 42 + 42 | none: text enters by cross-attention |
//! | HunyuanVideo | (frame, row, column) | 16 + 56 + 56, theta 256 | not rotated |
//!
//! Sizes are in latent patches. Every kernel takes the rows of angles, which all layers and heads
//! share.

use rope_core::{
    AxisLayout, Direction, MatrixForm, Pairing, Positions, Result, RotarySpec, TokenAngles,
};

/// A model's rotation and the numbering of its tokens.
struct Model {
    name: &'static str,
    /// Pairs of channels of each axis.
    pairs: [usize; 3],
    theta: f64,
    /// Text tokens before the grid, all at the origin.
    text: usize,
    /// Frames, rows and columns.
    grid: [usize; 3],
}

/// Ids of the tokens, axis by axis: text at the origin, then the grid by frames, rows and columns.
fn positions(text: usize, [frames, rows, columns]: [usize; 3]) -> Result<Positions> {
    let axis_ids = |axis: usize| {
        let cells = (0..frames * rows * columns).map(move |cell| {
            let index = [
                cell / (rows * columns),
                cell / columns % rows,
                cell % columns,
            ];
            index[axis] as i64
        });
        std::iter::repeat_n(0, text).chain(cells)
    };
    let ids: Vec<i64> = (0..3).flat_map(axis_ids).collect();
    Positions::new(3, &ids)
}

fn main() -> Result<()> {
    let models = [
        Model {
            name: "Flux, 512 x 512",
            pairs: [8, 28, 28],
            theta: 1e4,
            text: 512,
            grid: [1, 32, 32],
        },
        Model {
            name: "Wan, 81 frames of 480 x 832",
            pairs: [22, 21, 21],
            theta: 1e4,
            text: 0,
            grid: [21, 30, 52],
        },
        Model {
            name: "HunyuanVideo, 33 frames of 544 x 960",
            pairs: [8, 28, 28],
            theta: 256.0,
            text: 0,
            grid: [9, 34, 60],
        },
    ];
    for model in models {
        let spec = RotarySpec::builder(128)
            .pairing(Pairing::Adjacent)
            .axis_layout(AxisLayout::PerAxis(model.pairs.to_vec()))
            .theta(model.theta)
            .build()?;
        let positions = positions(model.text, model.grid)?;
        let angles = TokenAngles::<f32>::new(&spec, &positions, None)?;
        // One signed permutation for all axes: only the rows depend on the axis of each pair.
        let form = MatrixForm::new(spec.geometry(), Direction::Forward);
        let moved = form.partner().sources().iter().zip(0_u32..);
        assert!(moved.clone().all(|(from, channel)| *from == channel ^ 1));
        assert_eq!(angles.rows().len(), positions.tokens() * spec.head_dim());
        println!(
            "{}: {} tokens, {} bytes of cos and sin for all layers",
            model.name,
            positions.tokens(),
            size_of_val(angles.rows())
        );
    }
    Ok(())
}
