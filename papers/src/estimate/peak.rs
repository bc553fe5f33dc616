//! The peak of a step by formula: the moment at which most bytes are in use, term by term.
//!
//! The sum of states, gradients and activations is more than a step needs: most gradients are made
//! after their activations are freed. Three moments can be the peak of a GPT with pre-norm layers
//! and tied embeddings on one device (`tests/tests/papers.rs` compares them with plans):
//!
//! * the gradient of the head is made: all layers' activations exist, and the logits' gradient;
//! * the gradient of the last layer's second MLP matrix is made: the gradients that flow through an
//!   MLP are the widest;
//! * the last gradient is made: if updates run after the backward, all gradients exist.

use super::{Estimate, Recompute, Setup, Shape, SizeError, estimate, fits, product};

ir::named! {
    /// When updates run.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Update {
        /// Each as soon as its gradient is complete.
        Backward = "backward",
        /// All after the backward.
        After = "after",
    }
}

/// Bytes of one kind at the peak.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Term {
    /// What they are.
    pub name: &'static str,
    /// How many.
    pub bytes: u64,
}

/// The peak of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Peak {
    /// When it is: `when …`.
    pub moment: &'static str,
    /// What is in use.
    pub terms: Vec<Term>,
    /// The sum.
    pub bytes: u64,
}

/// The peak of a step. An error if a size is out of range, or if no formula exists: for several
/// devices, recomputation, adapters, or without a vocabulary.
pub fn peak(setup: &Setup, update: Update) -> Result<Peak, SizeError> {
    let estimate = estimate(setup)?;
    let (shape, vocabulary) = setup
        .shape
        .as_ref()
        .and_then(|shape| Some((shape, shape.vocabulary?)))
        .ok_or(SizeError::NoPeak)?;
    let plain = setup.recompute == Recompute::None && setup.adapters.is_none() && !setup.foreach;
    if !plain || setup.parallel.devices() != 1 {
        return Err(SizeError::NoPeak);
    }

    let mut moments = vec![
        head(setup, &estimate, shape, vocabulary)?,
        last_layer(setup, &estimate, shape, vocabulary)?,
    ];
    if update == Update::After {
        moments.push(end(setup, &estimate, shape)?);
    }
    let largest = moments.into_iter().max_by_key(|moment| moment.bytes);
    Ok(largest.expect("there are moments"))
}

impl Peak {
    /// States, then the moment's own terms. Terms of no bytes are left out.
    fn new(
        moment: &'static str,
        estimate: &Estimate,
        terms: Vec<(&'static str, u64)>,
    ) -> Result<Peak, SizeError> {
        let states = [
            ("weights", estimate.parameters),
            ("optimizer", estimate.optimizer),
        ];
        let terms: Vec<Term> = states
            .into_iter()
            .chain(terms)
            .filter(|&(_, bytes)| bytes > 0)
            .map(|(name, bytes)| Term { name, bytes })
            .collect();
        let bytes = fits(Some(terms.iter().map(|term| u128::from(term.bytes)).sum()))?;
        Ok(Peak {
            moment,
            terms,
            bytes,
        })
    }
}

/// What all layers have saved, with the tensors that the table of a layer leaves out.
fn saved(
    setup: &Setup,
    estimate: &Estimate,
    shape: &Shape,
) -> Result<Vec<(&'static str, u64)>, SizeError> {
    let &Shape {
        layers,
        width,
        sequence,
        batch,
        ..
    } = shape;
    let of_layer = super::kept(&estimate.layer)?;
    let masks = u64::from(setup.dropout);
    Ok(vec![
        (
            "activations of the layers",
            product(&[of_layer, layers], 1)?,
        ),
        // Mean and deviation of two norms, in f32.
        (
            "norms' statistics",
            product(&[2, 2, 4, sequence, batch, layers], 1)?,
        ),
        (
            "dropout's mask of the embeddings",
            product(&[masks, sequence, batch, width], 1)?,
        ),
        // Tokens of eight bytes, which the embeddings' backward reads.
        ("input", product(&[8, sequence, batch], 1)?),
    ])
}

/// The gradient of the head is made from the logits' gradient and the final norm.
fn head(
    setup: &Setup,
    estimate: &Estimate,
    shape: &Shape,
    vocabulary: u64,
) -> Result<Peak, SizeError> {
    let (w, rows) = (
        setup.precision.width(),
        product(&[shape.sequence, shape.batch], 1)?,
    );
    let mut terms = saved(setup, estimate, shape)?;
    let of_norm = product(&[2, w, rows, shape.width], 1)?;
    terms.extend([
        (
            "gradient of the logits",
            product(&[w, rows, vocabulary], 1)?,
        ),
        (
            "gradient of the head",
            product(&[w, vocabulary, shape.width], 1)?,
        ),
        ("final norm's input and result", of_norm),
        ("final norm's statistics", product(&[2, 4, rows], 1)?),
    ]);
    Peak::new("the gradient of the head is made", estimate, terms)
}

/// The gradient of the last layer's second MLP matrix is made. Its first product's gradient is
/// already there.
fn last_layer(
    setup: &Setup,
    estimate: &Estimate,
    shape: &Shape,
    vocabulary: u64,
) -> Result<Peak, SizeError> {
    let (w, d) = (setup.precision.width(), shape.width);
    let mut terms = saved(setup, estimate, shape)?;
    let sbd = product(&[shape.sequence, shape.batch, d], 1)?;
    // With dropout, the gradient before it also exists, and its mask has been read.
    let flowing = if setup.dropout { 6 * w - 1 } else { 5 * w };
    terms.extend([
        (
            "gradients that flow through the MLP",
            product(&[flowing, sbd], 1)?,
        ),
        (
            "gradient of the MLP's second matrix",
            product(&[w, 4, d, d], 1)?,
        ),
        ("gradient of the head", product(&[w, vocabulary, d], 1)?),
        ("gradients of the final norm", product(&[w, 2, d], 1)?),
    ]);
    Peak::new("the backward of the last layer begins", estimate, terms)
}

/// The last gradient is made, and no update has run.
fn end(setup: &Setup, estimate: &Estimate, shape: &Shape) -> Result<Peak, SizeError> {
    let w = setup.precision.width();
    let sbd = product(&[w, shape.sequence, shape.batch, shape.width], 1)?;
    let terms = vec![
        ("gradients", estimate.gradients),
        ("gradient of the embeddings' sum", sbd),
        ("input", product(&[8, shape.sequence, shape.batch], 1)?),
    ];
    Peak::new("the last gradient is made", estimate, terms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::{Attention, Optimizer, Parallel, Precision};

    const SHAPE: Shape = Shape {
        layers: 4,
        width: 256,
        heads: 4,
        sequence: 128,
        batch: 8,
        vocabulary: Some(256),
    };

    fn setup(shape: Shape) -> Setup {
        Setup {
            parameters: shape.parameters().unwrap(),
            shape: Some(shape),
            optimizer: Optimizer::AdamW,
            precision: Precision::F32,
            recompute: Recompute::None,
            attention: Attention::Flash,
            dropout: false,
            foreach: false,
            adapters: None,
            parallel: Parallel::default(),
        }
    }

    /// Large batches: the last layer. Large vocabularies: the head. Many parameters and updates
    /// after the backward: its end.
    #[test]
    fn the_moment_depends_on_the_sizes() {
        let moment = |shape, update| peak(&setup(shape), update).unwrap().moment;
        assert!(moment(SHAPE, Update::After).contains("last layer"));
        let wordy = Shape {
            vocabulary: Some(1 << 16),
            ..SHAPE
        };
        assert!(moment(wordy, Update::After).contains("head"));
        let short = Shape {
            sequence: 8,
            batch: 1,
            ..SHAPE
        };
        assert!(moment(short, Update::After).contains("last gradient"));
        assert!(moment(short, Update::Backward).contains("last layer"));
    }

    #[test]
    fn what_has_no_formula_is_refused() {
        let refuses = |setup: Setup| {
            assert_eq!(peak(&setup, Update::After), Err(SizeError::NoPeak));
        };
        let good = setup(SHAPE);
        refuses(Setup {
            shape: None,
            ..good
        });
        refuses(Setup {
            recompute: Recompute::Full,
            ..good
        });
        refuses(Setup {
            foreach: true,
            ..good
        });
        refuses(Setup {
            parallel: Parallel {
                data: 2,
                ..Parallel::default()
            },
            ..good
        });
        let no_words = Shape {
            vocabulary: None,
            ..SHAPE
        };
        refuses(Setup {
            shape: Some(no_words),
            ..good
        });
    }
}
