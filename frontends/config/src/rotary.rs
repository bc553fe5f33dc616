//! The frequencies of rotary positions (Su et al., RoFormer, 2021), as transformers computes them.

use crate::Error;
use crate::settings::Settings;
use std::f64::consts::TAU;

/// Rotary positions.
pub(crate) struct Rotary {
    /// Radians per position, of each pair of elements: half the number of elements that turn.
    pub(crate) frequencies: Vec<f32>,
}

impl Rotary {
    /// The frequencies of heads of `head` elements. The newer files have `rope_parameters`, the
    /// older ones `rope_theta` and `rope_scaling`.
    pub(crate) fn of(settings: &Settings, head: u64) -> Result<Rotary, Error> {
        let mut group = settings.group("rope_parameters")?;
        let old = settings.group("rope_scaling")?;
        if group.text_or("rope_type", "")?.is_empty() {
            group = old;
        }
        let of = |key: &str, default: f64| match group.number_or(key, f64::NAN)? {
            number if number.is_nan() => settings.number_or(key, default),
            number => Ok(number),
        };
        let base = of("rope_theta", settings.number_or("rotary_emb_base", 1e4)?)?;
        let share = of(
            "partial_rotary_factor",
            settings.number_or("rotary_pct", 1.0)?,
        )?;
        let turning = (head as f64 * share) as u64;
        let is_usable = base > 0.0 && (2..=head).contains(&turning) && turning.is_multiple_of(2);
        if !is_usable {
            let why = format!("heads of {head} elements cannot turn by base {base}, share {share}");
            return Err(Error::new("rope_parameters", why));
        }
        let mut frequencies: Vec<f32> = (0..turning / 2)
            .map(|i| 1.0 / (base as f32).powf((2 * i) as f32 / turning as f32))
            .collect();
        let kind = group.text_or("rope_type", group.text_or("type", "default")?)?;
        match kind {
            "default" => {}
            "linear" => {
                let factor = group.number("factor")? as f32;
                frequencies.iter_mut().for_each(|f| *f /= factor);
            }
            "llama3" => llama3(&group, settings, &mut frequencies)?,
            other => {
                return Err(Error::new("rope_type", format!("{other} is not known"))
                    .help("known are default, linear and llama3"));
            }
        }
        if frequencies.iter().any(|f| !f.is_finite()) {
            let why = "its numbers give frequencies that are not finite";
            return Err(Error::new("rope_parameters", why));
        }
        Ok(Rotary { frequencies })
    }
}

/// The frequencies of Llama 3.1: low ones are divided by a factor, and those between low and high
/// are in between.
fn llama3(group: &Settings, settings: &Settings, frequencies: &mut [f32]) -> Result<(), Error> {
    let factor = group.number("factor")?;
    let (low, high) = (
        group.number("low_freq_factor")?,
        group.number("high_freq_factor")?,
    );
    let trained = match group.size_or_none("original_max_position_embeddings")? {
        Some(trained) => trained,
        None => settings.size("max_position_embeddings")?,
    } as f64;
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
