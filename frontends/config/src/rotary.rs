//! The frequencies of rotary positions (Su et al., RoFormer, 2021), as transformers computes them.

use crate::Error;
use crate::settings::Settings;
use std::f64::consts::TAU;

/// Rotary positions.
pub(crate) struct Rotary {
    /// The name of the buffer of frequencies.
    pub(crate) name: &'static str,
    /// Radians per position, of each pair of elements: half the number of elements that turn.
    pub(crate) frequencies: Vec<f32>,
    /// A number of positions, and the frequencies of longer sequences.
    pub(crate) longer: Option<(u64, Vec<f32>)>,
    /// The factor of cosine and sine.
    pub(crate) factor: f64,
    /// Whether the elements of a pair are neighbours. If not, they are one of the first half and
    /// one of the second.
    pub(crate) neighbours: bool,
}

impl Rotary {
    /// Rotary positions of heads of `head` elements. `part` says that the family's heads may turn
    /// in part. The newer files have `rope_parameters`, the older ones `rope_theta` and
    /// `rope_scaling`.
    pub(crate) fn of(settings: &Settings, head: u64, part: bool) -> Result<Rotary, Error> {
        Rotary::by(settings, &parameters(settings)?, head, part)
    }

    /// The same by a group of parameters.
    pub(crate) fn by(
        settings: &Settings,
        group: &Settings,
        head: u64,
        part: bool,
    ) -> Result<Rotary, Error> {
        for kind in ["full_attention", "sliding_attention"] {
            if group.has(kind) {
                let why = format!("parameters for layers of {kind} have no meaning in this family");
                return Err(Error::new("rope_parameters", why));
            }
        }
        let of = |key: &str, default: f64| match group.number_or(key, f64::NAN)? {
            number if number.is_nan() => settings.number_or(key, default),
            number => Ok(number),
        };
        let share = of("partial_rotary_factor", 1.0)?;
        if !part && share != 1.0 {
            let why = format!("{share}: the heads of this family turn as a whole");
            return Err(Error::new("partial_rotary_factor", why));
        }
        let turning = (head as f64 * share) as u64;
        let base = of("rope_theta", 1e4)?;
        let mut rotary = Rotary::plain(base, turning, head)?;
        rotary.scale(settings, group, base)?;
        let longer = rotary.longer.iter().flat_map(|(_, longer)| longer);
        let is_finite = rotary
            .frequencies
            .iter()
            .chain(longer)
            .all(|f| f.is_finite());
        if !is_finite || !rotary.factor.is_finite() {
            let why = "its numbers give frequencies that are not finite";
            return Err(Error::new("rope_parameters", why));
        }
        Ok(rotary)
    }

    /// The frequencies for sequences of a length.
    pub(crate) fn reaching(&self, sequence: u64, packed: bool) -> Result<&[f32], Error> {
        match &self.longer {
            Some((most, _)) if packed && *most < sequence => {
                let why = format!(
                    "frequencies for more than {most} positions depend on the longest document; \
                     pack at most {most} tokens"
                );
                Err(Error::new("rope_type", why))
            }
            Some((most, longer)) if *most < sequence => Ok(longer),
            _ => Ok(&self.frequencies),
        }
    }

    /// Turns the other way.
    pub(crate) fn turn_backwards(&mut self) {
        let longer = self.longer.iter_mut().flat_map(|(_, longer)| longer);
        let all = self.frequencies.iter_mut().chain(longer);
        all.for_each(|frequency| *frequency = -*frequency);
    }

    /// The frequencies of the paper, for the first `turning` of a head's elements.
    pub(crate) fn plain(base: f64, turning: u64, head: u64) -> Result<Rotary, Error> {
        let is_usable = base > 0.0 && (2..=head).contains(&turning) && turning.is_multiple_of(2);
        if !is_usable {
            let why = format!(
                "{turning} elements of heads of {head} cannot turn in pairs by base {base}"
            );
            return Err(Error::new("rope_parameters", why));
        }
        let frequencies = (0..turning / 2)
            .map(|i| 1.0 / (base as f32).powf((2 * i) as f32 / turning as f32))
            .collect();
        Ok(Rotary {
            name: "inv_freq",
            frequencies,
            longer: None,
            factor: 1.0,
            neighbours: false,
        })
    }

    /// Changes the frequencies for sequences that are longer than the first ones trained on.
    fn scale(&mut self, settings: &Settings, group: &Settings, base: f64) -> Result<(), Error> {
        match kind(group)? {
            "default" => {}
            "linear" => {
                let factor = group.number("factor")? as f32;
                self.frequencies.iter_mut().for_each(|f| *f /= factor);
            }
            "llama3" => llama3(group, trained(settings, group)?, &mut self.frequencies)?,
            "yarn" => self.yarn(group, trained(settings, group)?, base)?,
            "longrope" | "su" => self.long(settings, group)?,
            other => {
                return Err(Error::new("rope_type", format!("{other} is not known"))
                    .help("known are default, linear, llama3, yarn and longrope"));
            }
        }
        Ok(())
    }

    /// YaRN (Peng et al., 2023): low frequencies are divided by a factor, high ones stay, and in
    /// between there is a ramp over the pairs.
    fn yarn(&mut self, group: &Settings, trained: u64, base: f64) -> Result<(), Error> {
        let n = self.frequencies.len() as f64;
        let factor = group.number("factor")?;
        let grown = |by: f64| grown(factor, by);
        let (some, all) = (
            group.number_or("mscale", 0.0)?,
            group.number_or("mscale_all_dim", 0.0)?,
        );
        let default = match some != 0.0 && all != 0.0 {
            true => grown(some) / grown(all),
            false => grown(1.0),
        };
        self.factor = group.number_or("attention_factor", default)?;
        // The pair that turns this often over the positions of the training.
        let pair = |turns: f64| n * (trained as f64 / (turns * TAU)).ln() / base.ln();
        let mut low = pair(group.number_or("beta_fast", 32.0)?);
        let mut high = pair(group.number_or("beta_slow", 1.0)?);
        if group.flag_or("truncate", true)? {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(2.0 * n - 1.0));
        if low == high {
            high += 0.001;
        }
        for (i, f) in self.frequencies.iter_mut().enumerate() {
            let kept = 1.0 - ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            *f = *f / factor as f32 * (1.0 - kept) + *f * kept;
        }
        Ok(())
    }

    /// LongRoPE (Ding et al., 2024): each pair has a divisor, another one in long sequences.
    fn long(&mut self, settings: &Settings, group: &Settings) -> Result<(), Error> {
        let trained = trained(settings, group)?;
        let factor = match group.number_or("factor", f64::NAN)? {
            factor if factor.is_nan() => {
                settings.size("max_position_embeddings")? as f64 / trained as f64
            }
            factor => factor,
        };
        let default = match factor {
            factor if factor <= 1.0 => 1.0,
            factor => (1.0 + factor.ln() / (trained as f64).ln()).sqrt(),
        };
        self.factor = group.number_or("attention_factor", default)?;
        let divided = |key: &str| {
            let divisors = group.numbers(key)?;
            let n = self.frequencies.len();
            if divisors.len() != n {
                let why = format!("{} numbers for {n} pairs", divisors.len());
                return Err(Error::new(key, why));
            }
            let pairs = self.frequencies.iter().zip(&divisors);
            Ok(pairs.map(|(f, divisor)| f / *divisor as f32).collect())
        };
        let (short, long) = (divided("short_factor")?, divided("long_factor")?);
        (self.frequencies, self.longer) = (short, Some((trained, long)));
        Ok(())
    }
}

/// The group of parameters of a file.
pub(crate) fn parameters(settings: &Settings) -> Result<Settings, Error> {
    match settings.group("rope_scaling")? {
        group if group.is_empty() => settings.group("rope_parameters"),
        group => Ok(group),
    }
}

/// The kind of rotary positions.
pub(crate) fn kind(group: &Settings) -> Result<&str, Error> {
    group.text_or("rope_type", group.text_or("type", "default")?)
}

/// The factor of scores that YaRN's `mscale_all_dim` asks for, in families that know it.
pub(crate) fn growth_of_scores(group: &Settings) -> Result<f64, Error> {
    let by = group.number_or("mscale_all_dim", 0.0)?;
    if kind(group)? == "default" || by == 0.0 {
        return Ok(1.0);
    }
    let grown = grown(group.number("factor")?, by);
    Ok(grown * grown)
}

/// How much sharper scores become if there are `factor` times as many positions, by a share.
fn grown(factor: f64, by: f64) -> f64 {
    match factor {
        factor if factor <= 1.0 => 1.0,
        factor => 0.1 * by * factor.ln() + 1.0,
    }
}

/// The positions that a model was first trained with.
fn trained(settings: &Settings, group: &Settings) -> Result<u64, Error> {
    let key = "original_max_position_embeddings";
    match (settings.size_or_none(key)?, group.size_or_none(key)?) {
        (Some(trained), _) | (None, Some(trained)) => Ok(trained),
        (None, None) => settings.size("max_position_embeddings"),
    }
}

/// The frequencies of Llama 3.1: low ones are divided by a factor, and those between low and high
/// are in between.
fn llama3(group: &Settings, trained: u64, frequencies: &mut [f32]) -> Result<(), Error> {
    let factor = group.number("factor")?;
    let (low, high) = (
        group.number("low_freq_factor")?,
        group.number("high_freq_factor")?,
    );
    let trained = trained as f64;
    for f in frequencies {
        let wave = TAU / f64::from(*f);
        if wave > trained / low {
            *f = (f64::from(*f) / factor) as f32;
        } else if wave >= trained / high {
            let smooth = (trained / wave - low) / (high - low);
            *f = ((1.0 - smooth) * f64::from(*f) / factor + smooth * f64::from(*f)) as f32;
        }
    }
    Ok(())
}
