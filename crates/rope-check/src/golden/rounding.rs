//! How programs round on the way from frequencies and positions to cos and sin.

use rope_core::RopeError;

use crate::buffer::DType;
use crate::engine::Case;

/// How far a frequency in f32 may be from the nearest one, in units of its last place, the most
/// likely first. Its exponent is rounded, and the logarithm of theta multiplies that.
pub(super) const SHIFTS: &[i32] = &[0, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6, 7, -7, 8, -8];

/// The types that a program holds the parts of its angles in; F64 for those that it does not round.
pub(super) struct Rounding {
    /// The name in a diagnosis.
    pub(super) what: String,
    position: DType,
    frequency: DType,
    /// The product of the two.
    angle: DType,
    cos_sin: DType,
}

/// The axis and the frequency of each summand of a lane's angle.
type Summands = Vec<(usize, f64)>;

impl Rounding {
    fn new(what: &str, [position, frequency, angle, cos_sin]: [DType; 4]) -> Self {
        Self {
            what: what.to_owned(),
            position,
            frequency,
            angle,
            cos_sin,
        }
    }

    /// As transformers does.
    pub(super) fn in_f32() -> Self {
        Self::new(
            "angles computed in f32",
            [DType::F32, DType::F32, DType::F32, DType::F64],
        )
    }

    /// All that are known, the commonest first. What a program does not round to 16 bits, it holds
    /// in f64 or in f32.
    pub(super) fn all() -> Vec<Self> {
        use DType::F64;
        let mut all = vec![Self::in_f32()];
        for narrow in [DType::Bf16, DType::F16] {
            let name = narrow.name();
            let mut add = |what: &str, types| all.push(Self::new(&format!("{what} {name}"), types));
            for wide in [F64, DType::F32] {
                add("frequencies rounded to", [wide, narrow, wide, F64]);
                add("positions rounded to", [narrow, wide, wide, F64]);
                add(
                    "positions and frequencies rounded to",
                    [narrow, narrow, wide, F64],
                );
                add("angles rounded to", [wide, wide, narrow, F64]);
                add("cos and sin rounded to", [wide, wide, wide, narrow]);
            }
            for cos_sin in [F64, narrow] {
                add("angles computed in", [narrow, narrow, narrow, cos_sin]);
            }
        }
        all
    }

    /// True if frequencies may be some units off those that the case makes.
    pub(super) fn shifts_frequencies(&self) -> bool {
        self.frequency == DType::F32
    }

    /// The summands of each lane's angle; of each head's lanes, where heads have their own
    /// frequencies.
    ///
    /// # Errors
    /// Those of [`rope_core::RotarySpec::inv_freq`].
    pub(super) fn lanes(&self, case: &Case) -> Result<Vec<Summands>, RopeError> {
        if let Some(own) = &case.head_frequencies {
            let lanes = own.len() / case.positions.axis_count();
            let lane_values =
                |lane: usize| own.iter().skip(lane).step_by(lanes).copied().enumerate();
            return Ok((0..lanes).map(|lane| lane_values(lane).collect()).collect());
        }
        let inv_freq = case.spec.inv_freq(case.seq_len)?;
        let lanes = case.spec.lane_map().lanes().iter();
        Ok(lanes
            .map(|lane| vec![(usize::from(lane.axis), inv_freq[lane.frequency as usize])])
            .collect())
    }

    /// Rows of cos and sin as a rotator takes them, with the frequencies of each lane shifted.
    pub(super) fn rows(&self, case: &Case, lanes: &[Summands], shifts: &[i32]) -> Vec<f64> {
        let width = case.spec.geometry().lane_count();
        let scaling = case.spec.attention_scaling();
        let frequencies: Vec<Summands> = lanes
            .iter()
            .zip(shifts)
            .map(|(lane, shift)| {
                let rounded = |(axis, frequency): &(usize, f64)| {
                    (*axis, shifted(self.frequency.round(*frequency), *shift))
                };
                lane.iter().map(rounded).collect()
            })
            .collect();
        let mut rows = Vec::with_capacity(case.positions.tokens() * 2 * lanes.len());
        for token in 0..case.positions.tokens() {
            for head in frequencies.chunks(width) {
                let angle = |lane: &Summands| {
                    lane.iter().fold(0.0, |sum, (axis, frequency)| {
                        let position = self.position.round(case.positions.value(*axis, token));
                        self.angle
                            .round(sum + self.angle.round(position * frequency))
                    })
                };
                let angles: Vec<f64> = head.iter().map(angle).collect();
                let stored = |x: f64| self.cos_sin.round(x * scaling);
                rows.extend(angles.iter().map(|angle| stored(angle.cos())));
                rows.extend(angles.iter().map(|angle| stored(angle.sin())));
            }
        }
        rows
    }
}

/// The f32 some places from one, counted away from zero. Others, and those next to zero, stay.
fn shifted(value: f64, places: i32) -> f64 {
    if places == 0 || value.abs() < 1e-30 {
        return value;
    }
    let bits = (value as f32).to_bits().wrapping_add_signed(places);
    f64::from(f32::from_bits(bits))
}
