//! The shared part of the targets: values made from a fuzzer's bytes.

use arbitrary::{Result, Unstructured};
use rope_core::{
    AxisLayout, Frequencies, HeadsLayout, Lane, Layout, Llama3Scaling, LongRopeScaling, Pairing,
    Positions, RotarySpec, RotarySpecBuilder, Scaling, Strides, YarnScaling,
};

/// The widest head of a target that compares with the oracle, which takes its square.
pub const WIDEST: usize = 80;

/// One of a list.
pub fn one_of<T: Clone>(u: &mut Unstructured, list: &[T]) -> Result<T> {
    u.choose(list).cloned()
}

/// A number of the usual size, or any.
pub fn number(u: &mut Unstructured) -> Result<f64> {
    match u.int_in_range(0..=3)? {
        0 => u.arbitrary(),
        1 => one_of(
            u,
            &[0.0, -0.0, 1.0, 0.5, 1e-320, 1e300, f64::NAN, f64::INFINITY],
        ),
        2 => Ok(f64::from(u.arbitrary::<u16>()?)),
        _ => Ok(f64::from(u.arbitrary::<u16>()?) / 4096.0),
    }
}

/// A size of at most `most`, or now and then any.
pub fn size(u: &mut Unstructured, most: usize) -> Result<usize> {
    match u.int_in_range(0..=31)? {
        0 => u.arbitrary(),
        1 => {
            let shift = u.int_in_range(0..=63)?;
            Ok((1usize << shift).wrapping_add(usize::from(u.arbitrary::<bool>()?)))
        }
        _ => u.int_in_range(0..=most),
    }
}

fn sizes(u: &mut Unstructured, most: usize) -> Result<Vec<usize>> {
    let count = u.int_in_range(0..=5)?;
    (0..count).map(|_| size(u, most)).collect()
}

fn numbers(u: &mut Unstructured, count: usize) -> Result<Vec<f64>> {
    let count = if u.ratio(15, 16)? {
        count
    } else {
        u.int_in_range(0..=count + 1)?
    };
    (0..count).map(|_| number(u)).collect()
}

fn axes(u: &mut Unstructured, pairs: usize) -> Result<AxisLayout> {
    let sections = |u: &mut Unstructured| -> Result<Vec<usize>> {
        let mut sections = sizes(u, pairs)?;
        // Sections that sum to the pairs, as they have to; axis 0 takes what the others leave.
        if !sections.is_empty() && u.ratio(7, 8)? {
            let others: usize = sections[1..]
                .iter()
                .fold(0, |sum, s| sum.saturating_add(*s));
            sections[0] = pairs.saturating_sub(others);
        }
        Ok(sections)
    };
    Ok(match u.int_in_range(0..=8)? {
        0 => AxisLayout::Single,
        1 => AxisLayout::Contiguous(sections(u)?),
        2 => AxisLayout::Striped(sections(u)?),
        3 => AxisLayout::Ernie(sections(u)?),
        4 => AxisLayout::Balanced(sections(u)?),
        5 => AxisLayout::PerAxis(sections(u)?),
        6 => AxisLayout::PerAxisStriped(sections(u)?),
        7 => AxisLayout::PerChannel(sections(u)?),
        _ => {
            let lanes = if u.arbitrary()? { pairs } else { 2 * pairs };
            let lane = |u: &mut Unstructured| -> Result<Lane> {
                let axis = u.int_in_range(0..=4)?;
                let frequency = u.int_in_range(0..=pairs as u32)?;
                Ok(Lane { axis, frequency })
            };
            AxisLayout::Lanes((0..lanes).map(|_| lane(u)).collect::<Result<_>>()?)
        }
    })
}

fn scaling(u: &mut Unstructured, pairs: usize) -> Result<Scaling> {
    let stated = |u: &mut Unstructured| -> Result<Option<f64>> {
        Ok(if u.arbitrary()? {
            Some(number(u)?)
        } else {
            None
        })
    };
    Ok(match u.int_in_range(0..=7)? {
        0 => Scaling::Default,
        1 => Scaling::Linear { factor: number(u)? },
        2 => Scaling::Dynamic {
            factor: number(u)?,
            max_position_embeddings: u.arbitrary()?,
        },
        3 => Scaling::NtkAlpha { alpha: number(u)? },
        4 => Scaling::Yarn(YarnScaling {
            factor: number(u)?,
            original_max_position_embeddings: u.arbitrary()?,
            beta_fast: number(u)?,
            beta_slow: number(u)?,
            truncate: u.arbitrary()?,
            attention_factor: stated(u)?,
            mscale: stated(u)?,
            mscale_all_dim: stated(u)?,
        }),
        5 => Scaling::LongRope(LongRopeScaling {
            short_factor: numbers(u, pairs)?,
            long_factor: numbers(u, pairs)?,
            original_max_position_embeddings: u.arbitrary()?,
            factor: number(u)?,
            attention_factor: stated(u)?,
        }),
        6 => Scaling::Llama3(Llama3Scaling {
            factor: number(u)?,
            low_freq_factor: number(u)?,
            high_freq_factor: number(u)?,
            original_max_position_embeddings: u.arbitrary()?,
        }),
        _ => Scaling::Proportional {
            partial_rotary_factor: number(u)?,
            factor: number(u)?,
        },
    })
}

/// A specification that has not been checked.
pub fn builder(u: &mut Unstructured) -> Result<RotarySpecBuilder> {
    let pairs = u.int_in_range(1..=20)?;
    let rotary_dim = if u.ratio(15, 16)? {
        2 * pairs
    } else {
        size(u, 2 * pairs)?
    };
    let offset = if u.ratio(1, 2)? { 0 } else { size(u, 9)? };
    let after = if u.ratio(1, 2)? {
        0
    } else {
        u.int_in_range(0..=9)?
    };
    let head_dim = rotary_dim.saturating_add(offset).saturating_add(after);
    let mut builder = RotarySpec::builder(head_dim)
        .rotary_dim(rotary_dim)
        .rotary_offset(offset)
        .pairing(one_of(u, &Pairing::ALL)?)
        .axis_layout(axes(u, pairs)?);
    if u.arbitrary()? {
        builder = builder.theta(number(u)?);
    }
    if u.arbitrary()? {
        let frequencies = match u.arbitrary()? {
            true => Frequencies::listed(numbers(u, pairs)?),
            false => {
                let theta = if u.arbitrary()? { 1e4 } else { number(u)? };
                let scaling = scaling(u, pairs)?;
                Frequencies::new(theta).and_then(|plain| plain.with_scaling(scaling))
            }
        };
        if let Ok(frequencies) = frequencies {
            builder = builder.frequencies(frequencies);
        }
    }
    if u.ratio(1, 4)? {
        builder = builder.attention_scaling(number(u)?);
    }
    Ok(builder)
}

/// Positions for `tokens` tokens on `axes` axes.
pub fn positions(u: &mut Unstructured, axes: usize, tokens: usize) -> Result<Positions> {
    let count = axes * tokens;
    let found = if u.arbitrary()? {
        let ids: Vec<u32> = (0..count)
            .map(|_| {
                Ok(if u.ratio(1, 8)? {
                    u.int_in_range(0..=1 << 31)?
                } else {
                    u.arbitrary::<u8>()?.into()
                })
            })
            .collect::<Result<_>>()?;
        let ids: Vec<i64> = ids.into_iter().map(i64::from).collect();
        Positions::new(axes, &ids)
    } else {
        let values: Vec<f64> = (0..count)
            .map(|_| Ok(f64::from(u.arbitrary::<i32>()?) / 256.0))
            .collect::<Result<_>>()?;
        Positions::real(axes, &values)
    };
    Ok(found.expect("as many ids in range as axes and tokens"))
}

/// Values of order 1, the same for the same number.
pub fn values(count: usize) -> Vec<f64> {
    rope_check::cases::values(1, count)
}

/// Any view: mostly a permutation or slice of a tensor of some elements, else any strides.
pub fn view(u: &mut Unstructured, head_dim: usize) -> Result<HeadsLayout> {
    let layout = one_of(u, &Layout::ALL)?;
    let (batch, seq, heads) = (size(u, 3)?, size(u, 5)?, size(u, 4)?);
    if u.ratio(1, 2)? {
        let small = [batch, seq, heads].iter().all(|n| *n <= 64);
        if small {
            return Ok(HeadsLayout::contiguous(layout, batch, seq, heads, head_dim));
        }
    }
    let strides = Strides {
        batch: size(u, 512)?,
        seq: size(u, 256)?,
        head: size(u, 128)?,
    };
    Ok(HeadsLayout {
        batch,
        seq,
        heads,
        head_dim,
        strides,
    })
}
